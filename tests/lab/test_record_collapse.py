"""Recorded runs of engines in other number formats: fresh batches, and a mismatch in every step."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from lab.kept_engines import recipe
from lab.record_collapse import CONDITIONS, ENGINES, OVERRIDES, Recorder

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_every_step_has_a_mismatch_that_follows_the_format(tmp_path: Path) -> None:
    """The engine computes in bfloat16, 8 bits: log ratios of some 1e-2, k3 of half their square. Weights in float8, 4 bits, add more: over
    the recorded runs' first 30 steps the medians are 5e-5 and 3e-4.

    Both kinds run by one engine, one after the other: what is sent decides.
    """
    levels = {}
    with Recorder.start(recipe(tmp_path / "model", *OVERRIDES, *ENGINES["float8"].overrides)) as recorder:
        assert isinstance(recorder, Recorder)
        for name in ("bfloat16", "float8"):
            recorder.kind = ENGINES[name]
            steps = recorder.record(CONDITIONS["healthy"], seed=0, steps=3)
            assert [step["staleness_max"] for step in steps] == [0, 0, 0]
            assert all(step["mismatch_k3_kl"] == step["k3_kl"] for step in steps)
            levels[name] = statistics.median(step["mismatch_k3_kl"] for step in steps)
            assert set(recorder.batches) == {0} and sum(recorder.batches[0]["lengths"]) == len(recorder.batches[0]["proximal"])
    assert 1e-8 < levels["bfloat16"] < 1e-3
    assert levels["float8"] > 3 * levels["bfloat16"]
