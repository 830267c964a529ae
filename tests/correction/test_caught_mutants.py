"""The checks of test_third_reference.py and test_split_ratio.py can fail: with one constant, sign or policy of ours changed, each does.

What a preset says is changed in its settings; a formula in what it is called with, or in what comes of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from evenkeel.correction.config import merged
from evenkeel.correction.correct import correct
from tests.correction import test_split_ratio as split
from tests.correction import test_third_reference as third

Change = Callable[[Callable[..., Any]], Callable[..., Any]]
THIRD, LOSS, SETTLING = "tests.correction.test_third_reference", "evenkeel.correction.loss", "evenkeel.correction.settling"
K3 = {"statistic": "k3", "level": "geometric", "upper": 0.01}
BAND = {"statistic": "ratio", "ratio": "q", "lower": 0.2, "upper": 4.0, "is_open": True}
MISMATCH_BAND = {"statistic": "ratio", "ratio": "mismatch", "lower": 0.5, "upper": 2.0}


def setting(preset: str, **change: Any) -> tuple[str, Change]:
    return "evenkeel.correction.config.preset_settings", lambda ours: lambda name: merged(ours(name), change if name == preset else {})


def times(factor: float, *names: str) -> Change:
    """With other values of named arguments."""
    return lambda ours: lambda *args, **named: ours(*args, **{name: named[name] * (factor if name in names else 1) for name in named})


def answer(change: Callable[[Any], Any]) -> Change:
    return lambda ours: lambda *args, **named: change(ours(*args, **named))


def apart(seed: int) -> None:
    split.test_a_bound_meets_the_part_that_it_is_for(correct)


MUTANTS: list[tuple[tuple[str, Change], Callable[..., None], dict[str, Any]]] = [
    (setting("dro", kl={"coefficient": 0.04}), third.test_dro, {}),
    (setting("mirror-descent", kl={"coefficient": 2e-3}), third.test_mirror_descent, {}),
    (setting("mirror-descent", kl={"level": "token"}), third.test_mirror_descent, {}),
    (setting("oapl", kl={"level": "token"}), third.test_oapl, {"beta1": 1.0, "beta2": 1e-3}),
    ((f"{THIRD}.group_advantages", times(-1, "temperature")), third.test_oapl, {"beta1": 0.3, "beta2": 0.5}),
    (setting("delightful", objective={"delight": {"gain": 1.1}}), third.test_delightful, {}),
    ((f"{LOSS}.delight_factor", times(-1, "temperature")), third.test_delightful, {}),
    (setting("pg-clip", objective={"lower": 0.7}), third.test_weight_of_the_current_policy, {}),
    (setting("pg-clip", objective={"upper": 1.2}), third.test_weight_of_the_current_policy, {}),
    (setting("sao-mask", rejection=[BAND | {"lower": 0.3}]), third.test_sao_mask, {}),
    (setting("sao-mask", rejection=[BAND | {"upper": 3.0}]), third.test_sao_mask, {}),
    ((f"{SETTLING}.token_covariances", answer(lambda covariances: -covariances)), third.test_clip_cov, {}),
    ((f"{SETTLING}.token_covariances", answer(lambda covariances: covariances * 1.5)), third.test_clip_cov, {}),
    ((f"{SETTLING}.token_covariances", answer(lambda covariances: -covariances)), third.test_kl_cov, {}),
    ((f"{LOSS}._covariance_penalty", answer(lambda penalty: -penalty)), third.test_kl_cov, {}),
    ((f"{LOSS}.divergence_band", times(1.1, "delta")), third.test_bandpo, {"divergence": "kl", "delta": 0.05}),
    ((f"{LOSS}.divergence_band", answer(lambda ends: (2 - ends[0], ends[1]))), third.test_bandpo, {"divergence": "tv", "delta": 0.05}),
    ((f"{LOSS}.prefix_clip", times(1.1, "power")), third.test_ctpo, {}),
    ((f"{LOSS}.prefix_clip", times(1.5, "log_low")), third.test_ctpo, {}),
    ((f"{LOSS}.prefix_clip", times(1.5, "log_dual")), third.test_ctpo, {}),
    (setting("k3-sequence", rejection=[K3 | {"upper": 0.02}]), third.test_k3_by_sequence, {}),
    (setting("k3-sequence", rejection=[K3 | {"level": "sequence"}]), third.test_k3_by_sequence, {}),
    ((f"{THIRD}.step_size_factor", answer(lambda factor: factor**2)), third.test_learning_rate_of_vcpo, {}),
    (setting("split-tis", importance={"upper": 2.5}), apart, {}),
    (setting("split-tis", importance={"ratio": "rho"}, objective={"ratio": "r"}), apart, {}),
    (setting("split-tis", objective={"clip_high": 2.5}), apart, {}),
    (setting("split-mis", rejection=[MISMATCH_BAND | {"upper": 3.5}]), apart, {}),
]


@pytest.mark.parametrize(("patch", "check", "of"), MUTANTS)
def test_a_changed_constant_sign_or_policy_is_caught(
    monkeypatch: pytest.MonkeyPatch, patch: tuple[str, Change], check: Callable[..., None], of: dict[str, Any]
) -> None:
    """By one of the seeds. That the check passes without the change is its own test."""
    place, change = patch
    module, name = place.rsplit(".", 1)
    monkeypatch.setattr(place, change(getattr(importlib.import_module(module), name)))
    with pytest.raises(AssertionError):
        for seed in third.SEEDS:
            check(seed=seed, **of)
