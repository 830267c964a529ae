"""The probe warns by what a type of numbers allows, once a version."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.commands.recipe import load_config
from actors.config import RunConfig
from actors.record.probe_watch import ProbeWatch
from actors.settings.derived import derived
from actors.settings.probe_limits import ProbeLimits


@pytest.mark.parametrize(
    ("dtype", "differences", "is_told"),
    [
        ("float32", [1e-6, 2e-6], False),
        ("float32", [1e-6, 2e-3], True),
        ("bfloat16", [0.008, 0.007, 0.24], False),  # Qwen3-8B in public comparisons: mean 0.008, largest 0.24
        ("bfloat16", [0.008, 0.007, 0.6], True),
        ("bfloat16", [0.03, 0.03, 0.03], True),  # no outlier, but all of them
        ("float16", [0.001, 0.001, 0.03], False),
        ("float16", [0.001, 0.001, 0.1], True),
    ],
)
def test_limits_by_type(dtype: str, differences: list[float], is_told: bool) -> None:
    told = ProbeWatch(ProbeLimits.of(dtype)).add("0", 1, differences)
    assert (told is not None) is is_told


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
    run = derived(run, has_gpu=True)
    assert (ProbeWatch(ProbeLimits.of_run(run)).add("0", 1, differences) is not None) is is_told


def test_a_configured_limit_stands_alone() -> None:
    watch = ProbeWatch(ProbeLimits.of("bfloat16", 0.1))
    assert watch.add("0", 1, [0.09, 0.09]) is None
    told = watch.add("0", 2, [0.09, 0.11])
    assert told is not None and "by up to 0.11 nats" in told and "allowed: 0.1;" in told


def test_a_version_is_told_once_however_many_engines_are_beyond() -> None:
    watch = ProbeWatch(ProbeLimits.of("float32"))
    at_once = [watch.add(str(engine), 7, [0.01 * engine]) for engine in range(1, 500)]
    assert [told is not None for told in at_once] == [True] + [False] * 498
    differences, lines = watch.take()
    assert len(differences) == 499 and max(differences) == 4.99
    assert lines == ["weights v7 are beyond the probe's limits on 498 further rollout workers, most on 499, by 5 nats"]
    assert watch.take() == ([], [])
    assert watch.add("0", 8, [0.1]) is not None
