"""The probe warns by what a type of numbers allows at the model's depth, and by what the engines differ by; once a cause."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from evenkeel.actors.config import RunConfig
from evenkeel.actors.record.recorder import ProbeWatch
from evenkeel.actors.settings.probe_limits import ProbeLimits
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.recipe import load_config


@pytest.mark.parametrize(
    ("dtype", "layers", "differences", "is_told"),
    [
        ("float32", 3, [1e-6, 2e-6], False),  # the nano model
        ("float32", 3, [1e-6, 2e-3], True),
        ("bfloat16", 3, [0.004, 0.007, 0.063], False),
        ("bfloat16", 3, [0.06, 0.06, 0.063], True),
        ("bfloat16", 30, [0.05, 0.063, 0.45], False),  # SmolLM2-135M-Instruct, whose sampler and learner are healthy
        ("bfloat16", 30, [0.58, 0.79, 4.2], True),  # the same with one projection's rows reversed
        ("bfloat16", 36, [0.008, 0.007, 0.24], False),  # Qwen3-8B in public comparisons: mean 0.008, largest 0.24
        ("bfloat16", 36, [0.008, 0.007, 2.0], True),
        ("bfloat16", 36, [0.2, 0.2, 0.2], True),  # no outlier, but all of them
        ("float16", 36, [0.001, 0.001, 0.03], False),
        ("float16", 36, [0.001, 0.001, 0.3], True),
        ("float32", 3, [0.0, math.nan, 0.0], True),
    ],
)
def test_limits_by_type_and_depth(dtype: str, layers: int, differences: list[float], is_told: bool) -> None:
    told = ProbeWatch(ProbeLimits.of(dtype, layers)).add("0", 1, differences)
    assert (told is not None) is is_told


def test_a_cause_is_told_once_and_another_one_too() -> None:
    """Engines that compute otherwise show at verified weights; from then on what counts is whether weights arrive, by what these engines
    differ by. So it is also of engines that differ less than allowed."""
    watch = ProbeWatch(ProbeLimits(1.0, 0.1))
    told = watch.add("0", 0, [0.3, 0.3, 0.3])
    assert told is not None and "v0" in told and "allowed: 1, median 0.1" in told and "checksums agree" in told and "diff-engines" in told
    assert [watch.add("0", version, [0.4, 0.4, 0.4]) for version in range(1, 6)] == [None] * 5
    assert watch.add("1", 5, [0.3, 0.3, 0.3]) is None, "another engine, of the same cause"
    told = watch.add("0", 6, [1.0, 1.0, 1.0])
    assert told is not None and "v6" in told and "allowed: 0.9, median 0.9" in told and "doesn't have the learner's weights" in told
    assert [watch.add("0", version, [1.0, 1.0, 1.0]) for version in (7, 8)] == [None] * 2
    assert watch.add("0", 9, [0.3, 0.3, 0.3]) is None
    assert watch.add("0", 10, [1.0, 1.0, 1.0]) is not None, "anew"
    watch = ProbeWatch(ProbeLimits(1.0, 0.1))
    assert watch.add("0", 0, [0.01, 0.01, 0.02]) is None
    assert watch.add("0", 1, [0.03, 0.03, 0.03]) is None
    assert watch.add("0", 2, [0.05, 0.05, 0.05]) is not None, "allowed of engines in general, but not of these"


@pytest.mark.parametrize(
    ("differences", "is_told"),
    [
        ([0.013, 0.012, 0.24], False),  # a trained mixture of experts: at the last token a router chose others
        ([0.1, 0.1, 0.6], False),  # random weights of two layers, rounded up: in bfloat16 alone both would be too much
        ([0.013, 0.013, 2.5], True),
        ([0.3, 0.3, 0.3], True),
    ],
)
def test_engines_in_float8_may_differ_more(differences: list[float], is_told: bool) -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "qwen3_30b_a3b_4nodes.yaml"
    run = load_config(RunConfig, recipe, ["rollout.engine.quantization=float8_block"])
    run = with_devices(run, has_gpu=True)
    assert (ProbeWatch(ProbeLimits.of_run(run)).add("0", 1, differences) is not None) is is_told


def test_a_configured_limit_stands_alone() -> None:
    watch = ProbeWatch(ProbeLimits(0.1, math.inf))
    assert watch.add("0", 1, [0.09, 0.09]) is None
    told = watch.add("0", 2, [0.09, 0.11])
    assert told is not None and "by up to 0.11 nats" in told and "allowed: 0.1;" in told


def test_a_version_is_told_once_however_many_engines_are_beyond() -> None:
    watch = ProbeWatch(ProbeLimits(1e-3, math.inf))
    at_once = [watch.add(str(engine), 7, [0.01 * engine]) for engine in range(1, 500)]
    assert [told is not None for told in at_once] == [True] + [False] * 498
    differences, lines = watch.take()
    assert len(differences) == 499 and max(differences) == 4.99
    assert lines == ["weights v7 are beyond the probe's limits on 498 further rollout workers, most on 499, by 5 nats"]
    assert watch.take() == ([], [])
    assert watch.add("1", 8, [0.1]) is None, "it is told already"
