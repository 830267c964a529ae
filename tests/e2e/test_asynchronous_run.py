"""An asynchronous run, two optimizer steps a batch, proximal logprobs recomputed, that loses its rollout worker and then its driver.

Behaviours locked here: admission bound and staleness at every step; tokens on both sides of a weight update carry the versions that sampled
them, and their logprobs are those of exactly those versions' checkpoints; a killed rollout worker is replaced; after kill -9 of the driver
no process is left, and a resume ends with every step and every prompt once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from actors.record.run_folder import RunFolder
from actors.resume import TrainingState
from tests.e2e.launch import RAY_AGENTS, RECIPE, Run
from tests.rollout.hf_reference import hf_model, response_logprobs

pytestmark = pytest.mark.engine

GROUPS, MAX_STALENESS = 4, 1
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
    resumed: Run
    left_soon: list[str]
    """Processes of the first run half a minute after the driver's death."""
    checkpoint_at_kill: int
    last_step: int


@pytest.fixture(scope="module")
def story(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    run_dir = tmp_path_factory.mktemp("async") / "run"
    first = Run(run_dir, str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", *OVERRIDES)
    resumed = None
    try:
        first.wait_until(lambda: len(first.metrics()) >= 3, "three steps")
        (worker,) = first.pids("RolloutWorker")
        os.kill(worker, signal.SIGKILL)
        # The old one's groups are under way again and a few steps may still come from what is finished; four more need the new one.
        target = len(first.metrics()) + 4
        first.wait_until(lambda: len(first.metrics()) >= target, "steps with a replacement of the rollout worker")
        first.kill()
        left_soon = first.orphans(30.0, but=RAY_AGENTS)
        checkpoint = RunFolder.view(run_dir).latest_checkpoint().step
        resumed = Run(run_dir, "--resume", str(run_dir), f"steps={checkpoint + 4}")
        assert resumed.wait() == 0, resumed.output()[-4000:]
        yield Story(first, resumed, left_soon, checkpoint, checkpoint + 4)
    finally:
        first.close()
        if resumed is not None:
            resumed.close()


def test_no_process_outlives_the_driver(story: Story) -> None:
    for name in ("raylet", "gcs_server", "RolloutWorker", "LearnerRankActor", "sglang", "reward_process"):
        assert name in story.first.seen_commands, "the count must have seen what it counts"
    assert story.left_soon == []
    assert story.first.orphans(60.0) == [], "Ray's agents have had their minute by now"
    assert story.resumed.orphans() == []


def test_a_killed_rollout_worker_is_replaced(story: Story) -> None:
    events = story.first.events()
    assert "rollout worker 0 is gone" in events and "rollout 1 is up" in events
    assert "Traceback" not in story.resumed.output()


def test_resume_ends_with_every_step_once(story: Story) -> None:
    assert story.resumed.steps() == list(range(1, story.last_step + 1))
    folder = RunFolder.view(story.resumed.run_dir)
    assert folder.latest_checkpoint().step == story.last_step
    assert folder.report_path.exists()
    assert f"going on from step {story.checkpoint_at_kill}" in story.resumed.events()


def test_every_prompt_is_accounted_for_once(story: Story) -> None:
    """Settled in the ledger, or still outstanding in the last checkpoint: together the first `admitted` positions of the stream."""
    entries = story.resumed.ledger()
    settled = [entry["prompt_id"] for entry in entries]
    assert len(set(settled)) == len(settled)
    state = TrainingState.load(RunFolder.view(story.resumed.run_dir).latest_checkpoint().state)
    outstanding = [t.prompt.prompt_id for t in state.queue.in_flight] + [g.prompt.prompt_id for g in state.queue.finished]
    positions = sorted(int(prompt_id.rpartition("/")[2]) for prompt_id in settled + outstanding)
    assert positions == list(range(state.queue.admitted))
    trained = [entry["step"] for entry in entries if entry["outcome"] == "trained"]
    assert [trained.count(step) for step in range(1, story.last_step + 1)] == [GROUPS] * story.last_step


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
    monitor = TrainingState.load(folder.latest_checkpoint().state).monitor
    assert monitor["series"]["k3_kl"]["seen"] == story.last_step


def test_tokens_carry_the_versions_that_sampled_them(story: Story) -> None:
    """Each token's behaviour logprob is, to 1e-5, that of the transformers model loaded from its version's checkpoint.

    The trajectories are those that were finished and not trained when a checkpoint was made; straddling ones are rare among them, and
    tests/rollout/test_engine.py compares those. Here they have to be in the batches.
    """
    assert any(line["staleness/mixed_version_share"] > 0 for line in story.resumed.metrics())
    checkpoints = {c.step: c for c in RunFolder.view(story.resumed.run_dir).checkpoints()}
    groups = {g.group_id: g for c in checkpoints.values() for g in TrainingState.load(c.state).queue.finished}
    found = [trajectory for group in groups.values() for trajectory in group.trajectories]
    models = {step: hf_model(checkpoint.hf) for step, checkpoint in checkpoints.items()}
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
