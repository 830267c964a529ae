"""Layouts of the learner in a whole run: two pipeline stages with weights by broadcast, then a resume on two data-parallel ranks.

Behaviours locked here: the engines agree with the learner on every batch of both, so that export, sync, checkpoint and resharding are
right; groups of torch.distributed, of the ranks and of the broadcast, listen on loopback alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import RECIPE, Run, check_private, evenkeel

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STAGES = ["learner.pipeline_parallel=2", "weight_sync.transport=broadcast", "steps=2"]
DATA = ["learner.pipeline_parallel=1", "learner.data_parallel=2", "learner.distributed_optimizer=true", "steps=4"]


def test_a_run_of_two_stages_goes_on_with_two_data_ranks(tmp_path: Path) -> None:
    model, run_dir = tmp_path / "model", tmp_path / "run"
    made = evenkeel("init-model", str(RECIPE), f"model={model}", "init.architecture.layers=2")
    assert made.returncode == 0, made.stdout + made.stderr
    for words in ([str(RECIPE), f"model={model}", f"run_dir={run_dir}", "max_staleness=0", *STAGES], ["--resume", str(run_dir), *DATA]):
        run = Run(run_dir, *words)
        try:
            before = len(run.metrics())
            run.wait_until(lambda run=run, known=before: len(run.metrics()) > known, "a step")
            check_private(run.listening())
            assert run.wait(480.0) == 0, run.output()[-4000:]
        finally:
            run.close()
        assert "goes through the object store" not in run.output()
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["mismatch/max_abs_log_ratio"] < 2e-5 and line.get("sync/probe_max_abs_difference", 0.0) < 2e-5
        assert line["learner/grad_norm"] > 0, "a batch without gradient would make agreement at later versions a matter of course"
    assert any("sync/probe_max_abs_difference" in line for line in lines)  # a line has what was answered by then
