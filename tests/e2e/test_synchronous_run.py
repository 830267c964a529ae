"""A synchronous run with two learner ranks and weights by broadcast, ended by Ctrl-C.

Behaviours locked here: the two engines agree at equal weights on every batch; nothing is stale; Ctrl-C ends with exit code 0, a checkpoint,
a report and no process left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.record.run_folder import RunFolder
from actors.resume import TrainingState
from tests.e2e.launch import RECIPE, Run

pytestmark = pytest.mark.engine

STEPS = 3


@pytest.fixture(scope="module")
def run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run_dir = tmp_path_factory.mktemp("sync") / "run"
    overrides = ["max_staleness=0", "learner.data_parallel=2", "weight_sync.transport=broadcast", "checkpoint.every_steps=0"]
    run = Run(run_dir, str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", *overrides)
    try:
        run.wait_until(lambda: len(run.metrics()) >= STEPS, f"{STEPS} steps")
        run.interrupt()
        run.wait(120.0)
        yield run
    finally:
        run.close()


def test_ctrl_c_ends_with_a_checkpoint_and_a_report(run: Run) -> None:
    assert run.process.returncode == 0, run.output()[-4000:]
    assert "Traceback" not in run.output()
    folder = RunFolder.view(run.run_dir)
    checkpoint = folder.latest_checkpoint()
    assert [checkpoint.step] == [c.step for c in folder.checkpoints()] and checkpoint.step == run.steps()[-1]
    state = TrainingState.load(checkpoint.state)
    assert state.weight_version == checkpoint.step
    assert folder.report_path.stat().st_size > 10_000
    assert f"evenkeel train --resume {run.run_dir}" in run.output()


def test_no_process_is_left_after_ctrl_c(run: Run) -> None:
    for name in ("raylet", "gcs_server", "LearnerRankActor", "sglang", "reward_process"):
        assert name in run.seen_commands, "the count must have seen what it counts"
    assert run.orphans() == []


def test_engines_agree_on_every_batch(run: Run) -> None:
    """The bounds of the issue: float32 forwards of two implementations at the same weights, k3 by expm1 in float64."""
    lines = run.metrics()
    for line in lines:
        assert line["mismatch/k3"] < 1e-11
        assert line["mismatch/max_abs_log_ratio"] < 2e-5
    probes = [line["sync/probe_max_abs_difference"] for line in lines if "sync/probe_max_abs_difference" in line]
    assert probes and max(probes) < 2e-5  # a line has what was answered by then


def test_nothing_is_stale_and_the_policy_moves(run: Run) -> None:
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        assert line["staleness/max"] == 0 and line["staleness/mixed_version_share"] == 0
        assert line["groups/admitted_total"] - line["groups/trained_total"] - line["groups/discarded_total"] <= 4
        assert line["learner/grad_norm"] > 0, "a batch without gradient would make agreement at later versions a matter of course"


def test_a_healthy_run_has_no_warning(run: Run) -> None:
    assert all(line["monitor/level"] == 0 for line in run.metrics())
    assert RunFolder.view(run.run_dir).read_monitor_events() == []


def test_weights_went_by_broadcast(run: Run) -> None:
    assert "goes through the object store" not in run.output()
