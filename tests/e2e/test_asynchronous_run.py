"""An asynchronous run, two optimizer steps a batch, proximal logprobs recomputed, that loses its driver, is moved, loses the model that it
began with, is resumed, loses the checkpoint that it was resumed from, and then its rollout worker.

Behaviours locked here: admission bound and staleness at every step; tokens on both sides of a weight update carry the versions that sampled
them, and their logprobs are those of exactly those versions' checkpoints; a killed rollout worker takes its engine along and is replaced;
after kill -9 of the driver no process is left, and a resume needs nothing but the run's folder and has every step and every prompt once.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from actors.record.run_folder import RunFolder
from actors.state.resume import TrainingState
from tests.e2e.launch import RAY_AGENTS, RECIPE, Run, check_private, command_of, living
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


@dataclass
class Story:
    """What the tests look at afterwards."""

    first: Run
    """Its folder is as the driver's death left it."""
    resumed: Run
    """Of a copy of that folder, until Ctrl-C."""
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
    last_step: int


@pytest.fixture(scope="module")
def story(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    run_dir = tmp_path_factory.mktemp("async") / "run"
    model, moved = run_dir.with_name("model"), run_dir.with_name("moved")
    shutil.copytree(small_model, model)
    first = Run(run_dir, str(RECIPE), f"model={model}", f"run_dir={run_dir}", *OVERRIDES)
    runs = [first]
    try:
        first.wait_until(lambda: len(first.metrics()) >= 7, "seven steps")
        listening = first.listening()
        first.kill()
        left_soon = first.orphans(30.0, but=RAY_AGENTS)
        checkpoint = RunFolder.view(run_dir).checkpoints()[-1].step
        shutil.rmtree(model)
        shutil.copytree(run_dir, moved)
        resumed = Run(moved, "--resume", str(moved), f"checkpoint.keep={KEEP}")
        runs.append(resumed)
        resumed.wait_until(lambda: _steps_saved(moved)[0] > checkpoint + KEEP, f"{KEEP + 2} checkpoints, the last {KEEP} of them kept")
        saved = _steps_saved(moved)
        (worker,) = resumed.pids("RolloutWorker")
        below = psutil.Process(worker).children(recursive=True)
        of_worker = [command_of(process) for process in below]
        recovery = Recovery(resumed, "rollout worker killed, the only one", "its engine ends with it; a new one comes")
        os.kill(worker, signal.SIGKILL)
        outlived = [command_of(process) for process in living(below, timeout_s=30.0)]
        # The old one's groups are under way again and a few steps may still come from what is finished; four more need the new one.
        recovery.wait(steps=4)
        resumed.interrupt()
        assert resumed.wait() == 0, resumed.output()[-4000:]
        yield Story(first, resumed, listening, left_soon, checkpoint, saved, of_worker, outlived, _steps_saved(moved)[-1])
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
    outstanding = [t.prompt.prompt_id for t in state.queue.in_flight] + [g.prompt.prompt_id for g in state.queue.finished]
    positions = sorted(int(prompt_id.rpartition("/")[2]) for prompt_id in settled + outstanding)
    assert positions == list(range(state.queue.admitted))
    trained = [entry["step"] for entry in entries if entry["outcome"] == "trained"]
    assert [trained.count(step) for step in range(1, story.last_step + 1)] == [GROUPS] * story.last_step
    assert "damaged" not in story.resumed.events(), "a resume counts the ledger, the lines and the checkpoints' files"


def test_the_admission_bound_holds_at_every_step(story: Story) -> None:
    for line in story.resumed.metrics():
        outstanding = line["groups/admitted_total"] - line["groups/trained_total"] - line["groups/discarded_total"]
        assert outstanding <= (MAX_STALENESS + 1) * GROUPS
        assert line["queue/outstanding"] <= (MAX_STALENESS + 1) * GROUPS
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


def test_a_healthy_run_has_no_warning(story: Story) -> None:
    """Nor has a resumed one; its monitor has gone on with what the first part knew."""
    assert all(line["monitor/level"] == 0 for line in story.resumed.metrics())
    folder = RunFolder.view(story.resumed.run_dir)
    assert folder.read_monitor_events() == []
    monitor = TrainingState.load(folder.checkpoints()[-1].state).monitor
    assert monitor["series"]["k3_kl"]["seen"] == story.last_step


def test_tokens_carry_the_versions_that_sampled_them(story: Story, small_model: Path) -> None:
    """Each token's behaviour logprob is, to 1e-5, that of the transformers model loaded from its version's checkpoint.

    Version 0 is the start's: on a busy machine only the first checkpoint finds groups that were finished ahead.

    The trajectories are those that were finished and not trained when a checkpoint was made; straddling ones are rare among them, and
    tests/rollout/test_engine_updates.py compares those. Here they have to be in the batches.
    """
    assert any(line["staleness/mixed_version_share"] > 0 for line in story.resumed.metrics())
    checkpoints = {c.step: c for c in RunFolder.view(story.first.run_dir).checkpoints()}
    groups = {g.group_id: g for c in checkpoints.values() for g in TrainingState.load(c.state).queue.finished}
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
def test_a_run_that_was_interrupted_is_resumed_and_ends_by_its_steps(story: Story, tmp_path: Path) -> None:
    """A second resume. The fast suite has one after kill -9, a Ctrl-C whose checkpoint accounts for every prompt, and a run to its end."""
    folder = Path(shutil.copytree(story.resumed.run_dir, tmp_path / "again"))
    again = Run(folder, "--resume", str(folder), f"steps={story.last_step + 1}")
    try:
        assert again.wait() == 0, again.output()[-4000:]
        assert again.steps() == list(range(1, story.last_step + 2))
        assert RunFolder.view(folder).checkpoints()[-1].step == story.last_step + 1
        assert "damaged" not in again.events() and "Traceback" not in again.output() and again.orphans() == []
    finally:
        again.close()
