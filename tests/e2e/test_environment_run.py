"""A whole run in an environment: rollouts of several turns are sampled, corrected and trained, and the two engines agree on all of them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.launch import RECIPE, Run, evenkeel, kill_worker_above
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROUNDS = """
import asyncio

class Rounds:
    async def reset(self, task):
        self.task = task["id"]
        return task["prompt"]

    async def step(self, turn):
        await asyncio.sleep(0.02)
        return "again", float(len(turn.token_ids)), turn.number == 2
"""
GATE = """
        if turn.number == 1 and "train" in self.task:
            folder(f"waits {id(self)} {os.getpid()}").touch()
            while not folder("open").exists():
                await asyncio.sleep(0.1)
"""


def recipe_in(folder: Path, rounds: str) -> tuple[str, str]:
    """A recipe whose task is this environment, and its model: half of the tokens that are no characters end a turn, so that a model of
    random weights has short ones."""
    (folder / "rounds.py").write_text(rounds)
    model = save_tiny_model(save_tiny_tokenizer(folder / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    broken = [token for token in range(len(tokenizer)) if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": broken[::2]}))
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe["rollout"] |= {"reward": {"kind": "environment"}, "environment": {"path": "rounds:Rounds", "folder": str(folder)}}
    recipe["rollout"]["engine"] |= {"context_length": 512}
    recipe["rollout"]["sampling"] |= {"max_tokens": 200}
    (folder / "rounds.yaml").write_text(yaml.safe_dump(recipe))
    return str(folder / "rounds.yaml"), f"model={model}"


def test_a_run_in_an_environment(tmp_path: Path) -> None:
    """Mismatch at equal weights is rounding in every step, over all turns; rewards are the lengths of what was said."""
    done = evenkeel("train", *recipe_in(tmp_path, ROUNDS), f"run_dir={tmp_path / 'run'}", "steps=3", timeout_s=900.0)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:
        assert 2 < step["turns/mean"] <= step["turns/max"] == 3 and step["turns/tool_s"] > 0
        assert step["reward/mean"] == pytest.approx(step["length/trained_tokens"], rel=1e-6), "all that was said, and nothing that was read"
    known = [step["mismatch/k3"] for step in steps if "mismatch/k3" in step]  # where a step has tokens of its own version
    assert known and max(known) < 1e-11
    spans = RunFolder.view(tmp_path / "run").read_timeline()
    tools, samples = ([span for span in spans if span.what == what] for what in ("tool", "sample"))
    by_group = {span.group: span for span in samples}
    assert {span.group for span in tools} >= {span.group for span in samples if span.why is None}, (
        "of each group it is told when its tools work"
    )
    assert all(by_group[span.group].begin <= span.begin and span.end <= by_group[span.group].end for span in tools)


def test_sessions_of_a_worker_that_is_killed_go_on_with_another_one(tmp_path: Path) -> None:
    """One of two workers is killed while all rollouts wait for their environments' second step: what it had goes on with the other one. It
    is trained with the logprobs of an engine that is gone, which are the learner's, to rounding."""
    at = f"import os\nfrom pathlib import Path\nfolder = Path({str(tmp_path)!r}).joinpath\n"
    told = recipe_in(tmp_path, at + ROUNDS.replace("        await asyncio.sleep(0.02)\n", GATE))
    settings = ("steps=3", "rollout.workers=2", "rollout.environment.deadline_s=300")
    run = Run(tmp_path / "run", *told, f"run_dir={tmp_path / 'run'}", *settings)

    def waiting() -> list[int]:
        return [int(path.name.split()[2]) for path in tmp_path.glob("waits *")]

    try:
        run.wait_until(lambda: len(waiting()) == 2 * 4 * 4, "rollouts that have had two turns")
        time.sleep(3.0)  # the worker tells of them once a second
        kill_worker_above(waiting()[0])
        run.wait_until(lambda: "in the middle of its rollouts" in run.events(), "the worker's loss", 60.0)
        (tmp_path / "open").touch()
        assert run.wait() == 0, run.output()[-4000:]
        going_on = re.findall(r"group (\d+) goes on from (\d+) tokens: rollout worker \d was lost in the middle", run.events())
        assert len(going_on) > 1 and all(int(tokens) > 0 for _, tokens in going_on)
        spans = RunFolder.view(tmp_path / "run").read_timeline()
        assert {int(group) for group, _ in going_on} <= {span.group for span in spans if span.what == "sample" and span.why is None}
        known_k3 = [step["mismatch/k3"] for step in run.metrics() if "mismatch/k3" in step]
        assert known_k3 and max(known_k3) < 1e-11
    finally:
        run.close()


@pytest.mark.parametrize("settings", ["", "true_on_policy=true max_staleness=0"])
def test_a_run_whose_rollouts_have_branches(tmp_path: Path, settings: str) -> None:
    """After two turns each rollout goes on in a new conversation. The engines agree on both, to rounding, or in the mode to the bit; the
    ledger has each rollout's group once."""
    new = "NewConversation('once more') if turn.number == 1 else 'again'"
    rounds = ROUNDS.replace('"again"', new).replace("== 2", "== 3")
    rounds = "from evenkeel.rollout.environments.interface import NewConversation\n" + rounds
    run_dir = tmp_path / "run"
    done = evenkeel("train", *recipe_in(tmp_path, rounds), f"run_dir={run_dir}", "steps=3", *settings.split(), timeout_s=900.0)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:
        assert 1 < step["turns/sequences"] <= 2 < step["turns/mean"] <= step["turns/max"] == 4
        assert step["reward/mean"] == pytest.approx(step["length/trained_tokens"], rel=1e-6), "all that was said in both conversations"
    known = [step["mismatch/k3"] for step in steps if "mismatch/k3" in step]
    assert known and max(known) <= (0.0 if settings else 1e-11)
    trained = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    assert len({line["prompt_id"] for line in trained}) == len(trained) >= 12
