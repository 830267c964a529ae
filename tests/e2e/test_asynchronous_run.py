"""An asynchronous run, two optimizer steps a batch, proximal logprobs recomputed, that loses its driver, is moved, loses the model that it
began with, is resumed at ten times its learning rate on a Ray cluster that was there before it, loses the checkpoint that it was resumed
from, and then its rollout worker, and is ended by an alarm.

Behaviours locked here: admission bound and staleness at every step; tokens on both sides of a weight update carry the versions that sampled
them, and their logprobs are those of exactly those versions' checkpoints; a killed rollout worker takes its engine along and is replaced;
after kill -9 of the driver no process is left, and a resume needs nothing but the run's folder and has every step and every prompt once.

Every actor that joined the cluster is in the service discovery and serves metrics, and the cluster outlives the run; the monitor follows
every step but those that are counted as left out; its event is in every place where a person or a program may look; the run ends after the
step under way with a checkpoint from which it can go on, and with an exit code of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from evenkeel.actors.checkpoints.state import TrainingState
from evenkeel.actors.driver.controller import ENDED_BY_ALARM
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.early_warning.monitor import Event, Monitor, State
from tests.e2e.cluster import is_up, ray_cluster, scraped_roles
from tests.e2e.launch import RAY_AGENTS, RECIPE, Run, check_private, command_of, environment, living
from tests.evenkeel.dashboard.made_runs import read_report
from tests.failures.measured import Recovery
from tests.rollout.hf_reference import hf_model, response_logprobs

pytestmark = pytest.mark.engine

GROUPS, MAX_STALENESS, KEEP = 4, 1, 2
OVERRIDES = [
    f"groups_per_step={GROUPS}",
    f"max_staleness={MAX_STALENESS}",
    "learner.optimizer_steps_per_batch=2",
    "correction.preset=decoupled-ppo",
    "rollout.sampling.max_tokens=96",  # sampling has to take longer than training, or nothing is in flight at an update
]
# Any sure growth to 3 times is an alarm: the first part of the run is the level, and ten times its learning rate is a hundred times its
# drift. An alarm must hold for as many steps as the test needs to kill a worker, and to see it replaced.
GROWTH, PATIENCE = 3, 16
ALARM = [
    "learner.learning_rate=0.01", "monitor.on_alarm=stop",
    *(f"monitor.thresholds.{one}" for one in (
        "skip_steps=1", "baseline_steps=8", "level_steps=3", "trend_steps=8", "watch_growth=2", f"alarm_growth={GROWTH}",
        "watch_deviations=0.1", "alarm_deviations=0.1", f"patience={PATIENCE}",
    )),
]  # fmt: skip
STEPS_BEFORE = 9
"""Of the first part: those that the monitor leaves out, and its baseline."""
ROLES = {"controller", "correction", "learner", "rollout"}
BARE_NAMES = ("actors", "correction", "engines", "learner", "rollout")
"""Of folders here. Whoever imported one by that name would have a second copy of each of its classes."""
OURS = ("RolloutWorker", "LearnerRankActor", "CorrectionService", "sglang::", "reward_process")
"""What a run starts on a cluster."""


@dataclass
class Story:
    """What the tests look at afterwards."""

    first: Run
    """Its folder is as the driver's death left it."""
    resumed: Run
    """Of a copy of that folder, on a cluster, until the alarm."""
    listening: set[tuple[str, str]]
    """Commands of the first run's processes, with the addresses that they listened on."""
    left_soon: list[str]
    """Processes of the first run half a minute after the driver's death."""
    checkpoint_at_kill: int
    saved_until_kill: list[int]
    """Steps of the checkpoints in the resumed run's folder when its rollout worker was killed."""
    of_worker: list[str]
    """Command lines of the processes that the rollout worker had started."""
    outlived_worker: list[str]
    """Those of them that were still there half a minute after its death."""
    discovered: set[str]
    """Roles that were in the service discovery, before the worker was killed or after it was replaced."""
    scraped: set[str]
    """Those of them that served metrics of ours."""
    outlived_run: list[str]
    """Command lines of what the run had on the cluster and half a minute after its end still has."""
    cluster_is_up: bool
    """After the run."""
    last_step: int


@pytest.fixture(scope="module")
def story(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    run_dir = tmp_path_factory.mktemp("async") / "run"
    model, moved = run_dir.with_name("model"), run_dir.with_name("moved")
    shutil.copytree(small_model, model)
    # Started among files with the names of modules that every process of the run imports, and with those of evenkeel's folders on its path.
    taken = {run_dir.parent: ("socket", "struct", "select", "token", "asyncio", "json"), run_dir.with_name("path"): BARE_NAMES}
    for folder, names in taken.items():
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / f"{name}.py").write_text("raise RuntimeError(f'{__file__} was imported')")
    path = os.pathsep.join([str(run_dir.with_name("path")), environment()["PYTHONPATH"]])
    words = str(RECIPE), f"model={model}", f"run_dir={run_dir}", *OVERRIDES
    first = Run(run_dir, *words, cwd=run_dir.parent, PYTHONPATH=path)
    runs = [first]
    try:
        first.wait_until(lambda: len(first.metrics()) >= STEPS_BEFORE, f"{STEPS_BEFORE} steps")
        listening = first.listening()
        first.kill()
        left_soon = first.orphans(30.0, but=RAY_AGENTS)
        checkpoint = RunFolder.view(run_dir).checkpoints()[-1].step
        shutil.rmtree(model)
        shutil.copytree(run_dir, moved)
        with ray_cluster(RAY_worker_niceness="0") as cluster:  # of any step that takes long the monitor may leave another one out
            words = ["--resume", str(moved), f"checkpoint.keep={KEEP}", *ALARM]
            resumed = Run(moved, *words, address=cluster.address, **cluster.variables)
            runs.append(resumed)
            resumed.wait_until(lambda: scraped_roles(moved)[1] >= ROLES, "pages with the metrics of all actors")
            resumed.wait_until(lambda: _steps_saved(moved)[0] > checkpoint + KEEP, f"{KEEP + 2} checkpoints, the last {KEEP} of them kept")
            saved, (discovered, scraped) = _steps_saved(moved), scraped_roles(moved)
            (worker,) = cluster.head.processes("RolloutWorker")
            below = worker.children(recursive=True)
            of_worker = [command_of(process) for process in below]
            recovery = Recovery(resumed, "rollout worker killed, the only one", "its engine ends with it; a new one comes")
            worker.kill()
            outlived = [command_of(process) for process in living(below, timeout_s=30.0)]
            # The old one's groups are under way again and two steps may still come from what is finished; the third needs the new one.
            recovery.wait(steps=3)
            discovered, scraped = (old | new for old, new in zip((discovered, scraped), scraped_roles(moved), strict=True))
            of_run = [process for name in OURS for process in cluster.head.processes(name)]
            resumed.wait()
            outlived_run = [command_of(process) for process in living(of_run, timeout_s=30.0)]
            cluster_is_up = is_up(cluster)
        yield Story(
            first, resumed, listening, left_soon, checkpoint, saved, of_worker, outlived, discovered, scraped, outlived_run, cluster_is_up,
            _steps_saved(moved)[-1],
        )  # fmt: skip
    finally:
        for run in runs:
            run.close()


def _steps_saved(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in RunFolder.view(run_dir).checkpoints()]


def test_a_private_run_listens_on_loopback_alone_and_as_the_page_says(story: Story) -> None:
    """Ray's control service, daemon and workers listened on all interfaces of the user's laptop."""
    assert len(story.listening) >= 6, story.listening
    check_private(story.listening)


def test_no_process_outlives_the_driver(story: Story) -> None:
    for name in ("raylet", "gcs_server", "RolloutWorker", "LearnerRankActor", "sglang", "reward_process"):
        assert name in story.first.seen_commands, f"the count must have seen what it counts: {story.first.seen_commands}"
    assert story.left_soon == []
    assert story.first.orphans(60.0) == [], "Ray's agents have had their minute by now"
    assert story.resumed.orphans() == []


def test_a_run_joins_a_cluster_that_outlives_it_and_its_actors_can_be_scraped(story: Story) -> None:
    """Every actor that joined is in the service discovery and serves evenkeel_ metrics; nothing of the run is left on the cluster."""
    assert story.discovered == story.scraped == ROLES
    assert story.cluster_is_up and story.outlived_run == []
    assert "raylet" not in story.resumed.seen_commands, "it would be a Ray of the run's own"


def test_a_killed_rollout_worker_is_replaced(story: Story) -> None:
    """When neither the model folder that the run began with nor the checkpoint that it was resumed from is there any more."""
    assert story.checkpoint_at_kill not in story.saved_until_kill and len(story.saved_until_kill) in (KEEP, KEEP + 1)
    events = story.resumed.events()
    assert "rollout worker 0 is gone" in events and "rollout 1 is up" in events
    assert "Traceback" not in story.resumed.output()


def test_an_engine_ends_with_its_worker(story: Story) -> None:
    """Scheduler and scorers, killed as it is in the middle of sampling; nobody told them."""
    assert any(command.startswith("sglang::scheduler") for command in story.of_worker)
    assert any("reward_process" in command for command in story.of_worker), story.of_worker
    assert story.outlived_worker == []


def test_the_last_checkpoint_is_a_model_that_transformers_loads(story: Story) -> None:
    """With its tokenizer: config and tokenizer outlive every folder that they were copied from."""
    folder = RunFolder.view(story.resumed.run_dir).checkpoints()[-1].hf
    logprobs = response_logprobs(hf_model(folder), (1, 20, 30), tuple(range(40, 60)))
    assert all(-100.0 < value < 0.0 for value in logprobs)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("spell backward")) == "spell backward"


def test_resume_ends_with_every_step_once(story: Story) -> None:
    assert story.resumed.steps() == list(range(1, story.last_step + 1))
    folder = RunFolder.view(story.resumed.run_dir)
    assert folder.checkpoints()[-1].step == story.last_step
    assert (folder.path / "report.html").exists()
    assert f"going on from step {story.checkpoint_at_kill}" in story.resumed.events()
    assert f"checkpoint.keep 100 -> {KEEP}" in story.resumed.events(), "what was set anew is told"


def test_every_prompt_is_accounted_for_once(story: Story) -> None:
    """Settled in the ledger, or still outstanding in the last checkpoint: together the first `admitted` positions of the stream."""
    entries = story.resumed.ledger()
    settled = [entry["prompt_id"] for entry in entries]
    assert len(set(settled)) == len(settled)
    state = TrainingState.load(RunFolder.view(story.resumed.run_dir).checkpoints()[-1].state)
    outstanding = [t.prompt.prompt_id for t in state.book.in_flight] + [g.prompt.prompt_id for g in state.book.finished]
    positions = sorted(int(prompt_id.rpartition("/")[2]) for prompt_id in settled + outstanding)
    assert positions == list(range(state.book.admitted))
    trained = [entry["step"] for entry in entries if entry["outcome"] == "trained"]
    assert [trained.count(step) for step in range(1, story.last_step + 1)] == [GROUPS] * story.last_step
    assert "damaged" not in story.resumed.events(), "a resume counts the ledger, the lines and the checkpoints' files"


def test_the_admission_bound_holds_at_every_step(story: Story) -> None:
    for line in story.resumed.metrics():
        outstanding = line["groups/admitted_total"] - line["groups/trained_total"] - line["groups/discarded_total"]
        assert outstanding <= (MAX_STALENESS + 1) * GROUPS
        assert line["groups/outstanding"] <= (MAX_STALENESS + 1) * GROUPS
        assert line["staleness/max"] <= MAX_STALENESS
        assert line["groups/trained_total"] == GROUPS * line["step"]


def test_the_decoupled_way_ran(story: Story) -> None:
    """Two optimizer steps with a forward before them; engines and learner agree on the tokens that are not stale."""
    lines = story.resumed.metrics()
    assert all(line["learner/optimizer_steps"] == 2 and line["time/proximal_s"] > 0 for line in lines)
    fresh = [line for line in lines if "mismatch/k3" in line]
    assert fresh
    for line in fresh:
        assert line["mismatch/k3"] < 1e-11 and line["mismatch/max_abs_log_ratio"] < 2e-5


def first_alarm(story: Story) -> Event:
    return next(event for event in RunFolder.view(story.resumed.run_dir).read_monitor_events() if event.state is State.ALARM)


def diagnosed(run: Run) -> list[dict[str, float]]:
    """Lines of the steps that the monitor saw: a step has none where a slow machine had two others to diagnose."""
    return [line for line in run.metrics() if "monitor/level" in line]


def test_a_healthy_run_has_no_warning(story: Story) -> None:
    """Nor has a resumed one before the growth has lasted; its monitor has gone on with what the first part knew."""
    healthy = story.checkpoint_at_kill + PATIENCE - 1
    assert all(line["monitor/level"] == 0 for line in diagnosed(story.resumed) if line["step"] <= healthy)
    folder = RunFolder.view(story.resumed.run_dir)
    assert all(event.step > healthy for event in folder.read_monitor_events())
    state = TrainingState.load(folder.checkpoints()[-1].state)
    seen, left_out = len(diagnosed(story.resumed)), state.totals.get("monitor/left_out_total", 0)
    assert all(state.monitor["series"][name]["seen"] == seen for name in ("k3_kl", "drift_k3_kl"))
    assert seen + left_out == story.last_step


def test_the_run_ends_by_the_alarm_with_its_own_exit_code(story: Story) -> None:
    run = story.resumed
    assert run.process.returncode == ENDED_BY_ALARM == 3, run.output()[-4000:]
    assert "Traceback" not in run.output()
    alarm = first_alarm(story)
    left_out = sum("monitor/level" not in line for line in run.metrics()[alarm.step :])
    assert alarm.step <= story.last_step <= alarm.step + 2 + left_out, "after the step under way, or the one after it"
    assert f"alarm of {alarm.name} at step {alarm.step}: the run ends with a checkpoint" in run.output()
    assert f"evenkeel train --resume {run.run_dir}" in run.output()


def test_the_alarm_is_in_every_view(story: Story) -> None:
    run, alarm = story.resumed, first_alarm(story)
    assert alarm.growth >= GROWTH and alarm.step >= story.checkpoint_at_kill + PATIENCE
    (line,) = (line for line in diagnosed(run) if line["step"] == alarm.step)
    assert line["monitor/level"] == 2 and line[f"monitor/alarms_total/{alarm.name}"] == 1
    assert f"alarm   step {alarm.step}: {alarm.message}" in run.events()
    assert f"alarm: step {alarm.step}: {alarm.message}" in run.output()
    shown = read_report(run.run_dir / "report.html")["overview"]
    assert (alarm.step, "alarm", alarm.message) in [(one["step"], one["state"], one["text"]) for one in shown["warnings"]]


def test_a_resume_would_know_what_the_run_knew(story: Story) -> None:
    """The monitor in the last checkpoint stands where the last line that it wrote says."""
    folder = RunFolder.view(story.resumed.run_dir)
    checkpoint = folder.checkpoints()[-1]
    assert checkpoint.step == story.resumed.metrics()[-1]["step"]
    state = TrainingState.load(checkpoint.state)
    monitor = Monitor()
    monitor.load_state_dict(state.monitor)
    last = diagnosed(story.resumed)[-1]
    assert monitor.state.rank == last["monitor/level"]  # a step or two after the alarm; the quantity may have come back by then
    told = [event for event in folder.read_monitor_events() if event.name == first_alarm(story).name]
    assert monitor.states[told[-1].name] is told[-1].state
    assert state.totals[f"monitor/alarms_total/{first_alarm(story).name}"] >= 1 and state.replacement is None


def test_diagnostics_are_timed_and_detailed(story: Story) -> None:
    seen = diagnosed(story.resumed)
    assert len(seen) >= 12 and all(line["time/diagnose_s"] > 0 and "correction/bucket_rho_std_0" in line for line in seen)


def test_tokens_carry_the_versions_that_sampled_them(story: Story, small_model: Path) -> None:
    """Each token's behaviour logprob is, to 1e-5, that of the transformers model loaded from its version's checkpoint.

    Version 0 is the start's: on a busy machine only the first checkpoint finds groups that were finished ahead.

    The trajectories are those that were finished and not trained when a checkpoint was made; straddling ones are rare among them, and
    tests/rollout/test_engine_updates.py compares those. Here they have to be in the batches.
    """
    assert any(line["staleness/mixed_version_share"] > 0 for line in story.resumed.metrics())
    checkpoints = {c.step: c for c in RunFolder.view(story.first.run_dir).checkpoints()}
    groups = {g.group_id: g for c in checkpoints.values() for g in TrainingState.load(c.state).book.finished}
    found = [trajectory for group in groups.values() for trajectory in group.trajectories]
    models = {0: hf_model(small_model)} | {step: hf_model(checkpoint.hf) for step, checkpoint in checkpoints.items()}
    compared = 0
    for trajectory in found:
        spans = [span for span in trajectory.version_spans if span.version in models]
        for span in spans:
            expected = response_logprobs(models[span.version], trajectory.prompt_ids, trajectory.response_ids)[span.start : span.end]
            sampled = trajectory.behavior_logprobs[span.start : span.end]
            assert max(abs(a - b) for a, b in zip(expected, sampled, strict=True)) < 1e-5, trajectory.version_spans
            compared += span.end - span.start
    assert compared > 500


def test_versions_differ_enough_to_tell_them_apart(story: Story) -> None:
    """Without this the comparison above would pass with any version: neighbouring checkpoints differ by far more than 1e-5."""
    folder = RunFolder.view(story.resumed.run_dir)
    before, after = (hf_model(c.hf) for c in folder.checkpoints()[-2:])
    prompt_ids, response_ids = (1, 20, 30), tuple(range(40, 80))
    old, new = (response_logprobs(model, prompt_ids, response_ids) for model in (before, after))
    assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 1e-3


@pytest.mark.slow
def test_a_run_that_an_alarm_has_ended_is_resumed_and_ends_by_its_steps(story: Story, tmp_path: Path) -> None:
    """A second resume, on a private Ray again. The fast suite has one after kill -9, an alarm's checkpoint that accounts for every prompt,
    and in simulated runs (tests/simulation) the same controller to the last of its steps."""
    folder = Path(shutil.copytree(story.resumed.run_dir, tmp_path / "again"))
    again = Run(folder, "--resume", str(folder), "ray.address=null", "monitor.on_alarm=none", f"steps={story.last_step + 1}")
    try:
        assert again.wait() == 0, again.output()[-4000:]
        assert again.steps() == list(range(1, story.last_step + 2))
        assert RunFolder.view(folder).checkpoints()[-1].step == story.last_step + 1
        assert "damaged" not in again.events() and "Traceback" not in again.output() and again.orphans() == []
    finally:
        again.close()
