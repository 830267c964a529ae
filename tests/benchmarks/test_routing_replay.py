"""R3 with engines of another precision than the learner's: the benchmark, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.routing_replay import SHAPE, measure
from evenkeel.learner.hf.nano import build_nano_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_replay_lowers_the_mismatch(tmp_path: Path) -> None:
    """A bfloat16 engine chooses other experts for some tokens than a float32 learner; with its choice replayed what is left is rounding."""
    build_nano_model(tmp_path / "m", ["What is 1 + 2?", "What is 3 + 4?"], SHAPE)
    own, replayed = measure(tmp_path / "m", "bfloat16", prompts=16, max_tokens=48)
    assert own.tokens > 500
    assert own.equal_topk < replayed.equal_topk < 1.0
    assert replayed.k3 < own.k3 / 2
    assert replayed.largest < own.largest
