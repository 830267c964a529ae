"""Engines that get every other version alone (weight_sync.every_steps: 2), by either transport, in whole runs with real engines.

Behaviours locked here: no token is of a version between; none is older than allowed; what is read at equal weights agrees; and a
broadcast keeps its one group over versions that aren't sent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import RECIPE, Run

pytestmark = [pytest.mark.engine, pytest.mark.slow]
STEPS = 6
SETTINGS = [f"steps={STEPS}", "weight_sync.every_steps=2", "max_staleness=2", "checkpoint.every_steps=0", "evaluation.problems=4"]


def staleness_of(line: dict[str, Any]) -> set[int]:
    """Versions between sampling and training of the batch's tokens."""
    parts = ((name.rpartition("/")[2], value) for name, value in line.items() if name.startswith("staleness/tokens/"))
    return {int(age.rstrip("+")) for age, tokens in parts if tokens}


@pytest.mark.parametrize("transport", ["object_store", "broadcast"])
def test_tokens_are_of_the_versions_that_went_out(small_model: Path, tmp_path: Path, transport: str) -> None:
    run_dir = tmp_path / "run"
    run = Run(run_dir, str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", f"weight_sync.transport={transport}", *SETTINGS)
    try:
        assert run.wait(400.0) == 0, run.output()[-4000:]
    finally:
        run.close()
    assert "goes through the object store" not in run.output()
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        trained_at = line["step"] - 1
        ages = staleness_of(line)
        assert ages and max(ages) <= 2 and {(trained_at - age) % 2 for age in ages} == {0}, (line["step"], ages)
        assert line.get("mismatch/max_abs_log_ratio", 0.0) < 2e-5 and line.get("sync/probe_max_abs_difference", 0.0) < 2e-5
    assert any("sync/probe_max_abs_difference" in line for line in lines)
    told = [line["step"] for line in lines[1:] if line.get("sync/receipts")]  # the first step's is of the worker's start
    assert [step // 2 * 2 for step in told] in ([2, 4, 6], [2, 4]), "a receipt is in its step's line or, if it is late, in the next"
