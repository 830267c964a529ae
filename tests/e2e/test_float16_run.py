"""A whole run in float16, engine and learner: the scaled loss gives updates that are applied, and both sides still agree after each.

Behaviour locked here: no step is skipped, the exported weights move, and on fresh batches the gap is that of 11 bits: above float32's,
far below bfloat16's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.launch import RECIPE, Run, evenkeel

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 3
FLOAT16 = ["learner.dtype=float16", "rollout.engine.dtype=float16", "max_staleness=0", f"steps={STEPS}"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_run_in_float16_applies_its_updates(tmp_path: Path) -> None:
    model, run_dir = tmp_path / "model", tmp_path / "run"
    made = evenkeel("init-model", str(RECIPE), f"model={model}", timeout_s=240.0)
    assert made.returncode == 0, made.stdout + made.stderr
    run = Run(run_dir, str(RECIPE), f"model={model}", f"run_dir={run_dir}", *FLOAT16)
    try:
        assert run.wait(480.0) == 0, run.output()[-4000:]
    finally:
        run.close()
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert (line["learner/optimizer_steps"], line["steps/skipped_total"], line["steps/overflowed_total"]) == (1, 0, 0)
        assert line["learner/loss_scale"] == 2.0**16 and line["learner/grad_norm"] > 0
        assert 2e-5 < line["mismatch/max_abs_log_ratio"] < 0.02, "a rounding of 2^-11, some tens of times; float32 agrees to 2e-5"
        assert line["mismatch/k3"] < 1e-5
    before, after = weights(model), weights(run_dir / "checkpoints" / f"step_{STEPS:06d}" / "hf")
    assert before.keys() == after.keys()
    moved = {name: float((after[name] - before[name]).abs().max()) for name in before}
    assert all(5e-4 < distance < 5e-3 for distance in moved.values()), "three steps of Adam at 1e-3, in every matrix"
