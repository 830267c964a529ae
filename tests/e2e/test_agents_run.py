"""A run whose rollouts are played by a program that talks to the worker's door: trained exactly, each prompt accounted for, no key left."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.launch import RECIPE, Run, check_private, evenkeel, kill_engine_above, kill_worker_above

pytestmark = [pytest.mark.engine, pytest.mark.slow]
STEPS, GROUPS, SAMPLES = 4, 4, 4
PROGRAM = '''"""Asks, asks again, and says how many vowels there were. One rollout in eight fails."""
import json, os, random, urllib.request

messages, answers = [], []
task = json.load(open(os.environ["EVENKEEL_TASK"]))
for text in (task["prompt"], "again"):
    messages.append({"role": "user", "content": text})
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 24}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    answers.append(messages[-1]["content"])
with open("keys", "a") as file:
    print(os.environ["OPENAI_API_KEY"], file=file)
if random.random() < 1 / 8 and os.path.exists("run/metrics.jsonl"):
    raise SystemExit("the tool is away")
vowels = [sum(c in "aeiou" for c in text[:32]) / 32 for text in answers]
json.dump({"first": vowels[0], "second": vowels[1]}, open(os.environ["EVENKEEL_REWARD"], "w"))
'''


GATE = """    answers.append(messages[-1]["content"])
    if text != "again" and "train/" in task["id"]:
        open(f"waits {os.getpid()}", "w").close()
        while not os.path.exists("open"):
            time.sleep(0.1)
"""


BRANCHES = """
import json, os, urllib.request

def ask(*said):
    messages = [{"role": ["user", "assistant"][i % 2], "content": text} for i, text in enumerate(said)]
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 24}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

task = json.load(open(os.environ["EVENKEEL_TASK"]))
said = ask(task["prompt"])
ask(task["prompt"], said, "again")
ask("so far: " + said[:16])
json.dump(sum(c in "aeiou" for c in said[:32]) / 32, open(os.environ["EVENKEEL_REWARD"], "w"))
"""
"""Two turns, and one of a history made short."""


def started(folder: Path, small_model: Path, program: str, *more: str) -> Run:
    (folder / "agent.py").write_text(program)
    words = [f"model={small_model}", f"run_dir={folder / 'run'}", f"steps={STEPS}", "evaluation.problems=4"]
    words += [
        "rollout.reward={kind: agent}",
        "rollout.agent={command: [python, agent.py], processes: 4}",
        "rollout.engine.context_length=128",
    ]
    words += [f"groups_per_step={GROUPS}", f"rollout.sampling={{samples_per_group: {SAMPLES}, max_tokens: 80}}"]
    return Run(folder / "run", str(RECIPE), *words, *more, cwd=folder)


@pytest.fixture(scope="module")
def run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("agents")
    run = started(folder, small_model, PROGRAM)
    try:
        run.wait_until(lambda: bool(run.metrics()), "a step")
        (folder / "listening.json").write_text(json.dumps(sorted(run.listening())))
        assert run.wait() == 0, run.output()[-4000:]
        yield run
    finally:
        run.close()


def test_turns_are_trained_exactly(run: Run) -> None:
    """Two turns of each rollout, read on from what the program said in between; engine and learner agree on each token of both."""
    lines = run.metrics()
    assert [line["turns/max"] for line in lines] == [2] * STEPS
    assert all(line["turns/tool_s"] > 0 and line["turns/read_tokens"] > 4 for line in lines)
    fresh = [line for line in lines if "mismatch/k3" in line]
    assert fresh and all(line["mismatch/k3"] < 1e-12 and line["mismatch/max_abs_log_ratio"] < 2e-5 for line in fresh)
    assert all(line["reward/component/first"] + line["reward/component/second"] == pytest.approx(line["reward/mean"]) for line in lines)


def test_a_program_that_fails_costs_its_rollout_alone(run: Run) -> None:
    failed = run.metrics()[-1].get("reward/exceptions_total", 0)
    assert 0 < failed < STEPS * GROUPS * SAMPLES / 2
    trained = [entry["step"] for entry in run.ledger() if entry["outcome"] == "trained"]
    assert [trained.count(step) for step in range(1, STEPS + 1)] == [GROUPS] * STEPS


def test_no_key_is_left_and_no_process(run: Run) -> None:
    keys = (run.run_dir.parent / "keys").read_text().split()
    assert len(set(keys)) >= STEPS * GROUPS * SAMPLES
    written = b"".join(path.read_bytes() for path in [*run.run_dir.rglob("*"), run.log] if path.is_file())
    assert not [key for key in keys if key.encode() in written]
    assert "agent_process" in run.seen_commands
    assert run.orphans(60.0) == []


def test_the_door_listens_on_loopback_as_the_page_says(run: Run) -> None:
    check_private({(name, address) for name, address in json.loads((run.run_dir.parent / "listening.json").read_text())})


def test_programs_go_on_with_the_engine_that_takes_the_place_of_one_that_is_killed(small_model: Path, tmp_path: Path) -> None:
    """They have had one turn, and the worker is the only one. Each goes on as the process that it is; no turn is sampled twice."""
    program = PROGRAM.replace("import json, os,", "import json, os, time,").replace('    answers.append(messages[-1]["content"])\n', GATE)
    run = started(tmp_path, small_model, program + 'open(f"ended {os.getpid()}", "w").close()\n', "rollout.agent.processes=16")

    def named(what: str) -> set[str]:
        return {path.name.split()[1] for path in tmp_path.glob(f"{what} *")}

    try:
        run.wait_until(lambda: len(named("waits")) == GROUPS * SAMPLES, "programs that have had a turn")
        waiting = named("waits")
        kill_engine_above(int(min(waiting)))
        run.wait_until(lambda: "another one takes its place" in run.events(), "the engine's loss", 60.0)
        (tmp_path / "open").touch()
        assert run.wait() == 0, run.output()[-4000:]
        failed = run.metrics()[-1].get("reward/exceptions_total", 0)
        assert len(waiting - named("ended")) <= failed, "the program itself fails now and then"
        assert " is gone: " not in run.events() and "goes on from" not in run.events()
        fresh = [line for line in run.metrics() if "mismatch/k3" in line]
        assert fresh and all(line["turns/max"] == 2 and line["mismatch/k3"] < 1e-12 for line in fresh)
    finally:
        run.close()


def test_programs_of_a_worker_that_is_killed_go_on_with_another_one(small_model: Path, tmp_path: Path) -> None:
    """They die with their worker, after one turn. Begun again, their first request is answered by the turn that was said, which nobody
    samples again."""
    program = PROGRAM.replace("import json, os,", "import json, os, time,").replace('    answers.append(messages[-1]["content"])\n', GATE)
    run = started(tmp_path, small_model, program, "rollout.workers=2", "rollout.agent.processes=32")

    def waiting() -> list[int]:
        return [int(path.name.split()[1]) for path in tmp_path.glob("waits *")]

    try:
        run.wait_until(lambda: len(waiting()) == 2 * GROUPS * SAMPLES, "programs that have had a turn")
        time.sleep(3.0)  # the worker tells of them once a second
        kill_worker_above(waiting()[0])
        run.wait_until(lambda: "in the middle of its rollouts" in run.events(), "the worker's loss", 60.0)
        (tmp_path / "open").touch()
        assert run.wait() == 0, run.output()[-4000:]
        assert re.findall(r"group \d+ goes on from [1-9]\d* tokens: rollout worker \d was lost in the middle", run.events())
        fresh = [line for line in run.metrics() if "mismatch/k3" in line]
        assert fresh and all(line["turns/max"] == 2 and line["mismatch/k3"] < 1e-12 for line in fresh)
    finally:
        run.close()


def test_a_run_of_two_tasks_one_of_them_an_agent_s_with_branches(small_model: Path, tmp_path: Path) -> None:
    """Single answers of one task, and rollouts of two sequences of the other, in the same batches: engine and learner agree on each token
    of both, by the group's rollouts, and the ledger has each group once."""
    (tmp_path / "agent.py").write_text(BRANCHES)
    recipe = yaml.safe_load(RECIPE.read_text())
    rollout = recipe["rollout"]
    task, reward = rollout.pop("task"), rollout.pop("reward")
    agent = {"command": ["python", "agent.py"], "processes": 4}
    rollout["tasks"] = [
        {"name": "words", "task": task, "reward": reward},
        {"name": "agent", "task": task, "reward": {"kind": "agent"}, "agent": agent},
    ]
    rollout["sampling"]["max_tokens"] = 80
    recipe["correction"] = {"preset": "tis-token", "denominator": {"kind": "prompt_mean"}}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(recipe))
    run_dir = tmp_path / "run"
    words = (str(tmp_path / "two.yaml"), f"model={small_model}", f"run_dir={run_dir}", "steps=3", "evaluation.problems=4")
    done = evenkeel("train", *words, timeout_s=900.0, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    shares = [line.get("task/groups_share/agent", 0.0) for line in lines]
    assert max(shares) > 0 and min(shares) < 1
    for line, share in zip(lines, shares, strict=True):
        found = line.get("turns/sequences", 1.0), line.get("turns/mean", 1.0)
        assert found == pytest.approx((1 + share, 1 + 2 * share)), "two sequences and three turns of each of the agent's rollouts"
    known = [line["mismatch/k3"] for line in lines if "mismatch/k3" in line]
    assert known and max(known) < 1e-12
    ledger = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    trained = [entry["step"] for entry in ledger if entry["outcome"] == "trained"]
    assert [trained.count(step) for step in (1, 2, 3)] == [GROUPS] * 3
