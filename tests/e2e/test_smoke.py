"""`evenkeel train RECIPE --smoke` for real: ranks, an engine and a step, and nothing is left of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launch import RECIPE, evenkeel
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3", ["learner.tensor_parallel=2", "learner.sequence_parallel=true", "weight_sync.transport=broadcast"]),
        ("qwen3_moe", ["learner.data_parallel=2", "learner.expert_parallel=2"]),
    ],
    ids=["dense", "experts"],
)
def test_smoke_makes_one_step_and_removes_its_folder(tmp_path: Path, family: str, words: list[str]) -> None:
    """The probe agrees to float32's rounding."""
    model = save_tiny_model(save_tiny_tokenizer(tmp_path / "model"), family, tie=False, num_hidden_layers=5)
    done = evenkeel("train", str(RECIPE), "--smoke", f"model={model}", f"run_dir={tmp_path / 'runs' / 'x'}", *words, timeout_s=900.0)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[-6:-1]}
    assert list(rows) == ["learner", "engines", "step", "sync", "probe"]
    assert rows["learner"].endswith("2 ranks up") and "sampled its first group" in rows["engines"]
    assert float(rows["probe"].split()[-2]) < 1e-4, rows["probe"]
    assert "smoke: passed" in done.stdout.splitlines()[-1] and list((tmp_path / "runs").iterdir()) == []
