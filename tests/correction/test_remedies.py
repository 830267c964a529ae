"""What the advice rests on: which corrections hold at which KL and length, by the exact policy of benchmarks/remedies.py."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch

from benchmarks.remedies import ExactPolicy, Sample, outcomes, recorded_table
from evenkeel.correction import PRESETS, CorrectionConfig, correct
from evenkeel.correction.early_warning.monitor import SYMPTOMS
from evenkeel.correction.early_warning.replacement import breaks_at_an_alarm
from evenkeel.correction.errors import ConfigError
from lab.recorded_runs import RecordedRun

_PRESET = r"correction\.preset: ([a-z-]+)(?:,? or (?!lower)([a-z-]+))?"
LENGTHS = (8, 128, 2048)
NAMED = sorted({name for symptom in SYMPTOMS for names in re.findall(_PRESET, symptom.remedy) for name in names if name})
"""Presets that a remedy tells to set."""


@pytest.fixture(scope="module")
def at_the_alarm() -> dict[int, Sample]:
    """Answers by length, at the KL of the alarm that docs/correction.md shows."""
    policy = ExactPolicy.of_kl(8e-3)
    return {length: policy.sample(max(2**15 // length, 32), length, seed=3) for length in LENGTHS}


def shares(sample: Sample, **settings: object) -> float:
    """Tokens that a correction keeps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return float(correct(sample.batch, CorrectionConfig.model_validate(settings)).keep_mask.double().mean())


# -- the policy itself ---------------------------------------------------------------------------------------------------


def test_the_exact_gradient_is_the_slope_of_the_expected_reward() -> None:
    """By central differences of the closed form of the reward: needed tokens stay, the logits move along a parameter."""
    policy = ExactPolicy.of_kl(1e-2)
    for length in (8, 300):
        slopes = []
        for k in range(policy.features.shape[-1]):
            up, down = (policy.reward_mean((policy.learner + h * policy.features[..., k]).log_softmax(-1), length) for h in (1e-5, -1e-5))
            slopes.append((up - down) / 2e-5)
        assert policy.exact_gradient(length).tolist() == pytest.approx(slopes, rel=1e-6)


def test_without_a_gap_the_plain_gradient_is_exact() -> None:
    policy = ExactPolicy.of_kl(0.0)
    baseline = policy.reward_mean(policy.mu, 64)
    for is_weighted in (False, True):
        torch.testing.assert_close(policy.gradient_on_engine(64, baseline, is_weighted=is_weighted), policy.exact_gradient(64))


def test_samples_have_the_expectations_that_the_closed_forms_say() -> None:
    """Mean ratio 1, mean log ratio -KL, both known gradients: each within 4 standard errors of 16,384 answers."""
    policy = ExactPolicy.of_kl(5e-2)
    sample = policy.sample(2**14, 16, seed=1)
    log_rho = sample.batch.proximal_logprobs - sample.batch.behavior_logprobs
    for values, expected in ((log_rho.exp(), 1.0), (log_rho, -5e-2), (sample.advantages, 0.0)):
        assert abs(float(values.mean()) - expected) < 4 * float(values.std()) / len(values) ** 0.5
    for gradients, exact in sample.known:
        assert bool(((gradients.mean(0) - exact).abs() < 4 * gradients.std(0) / len(gradients) ** 0.5).all())
    assert not torch.equal(sample.known[0][1], sample.known[1][1])


# -- what holds, and what doesn't ----------------------------------------------------------------------------------------


def test_what_the_monitor_advises_keeps_the_batch_and_the_gradient() -> None:
    """Every preset that a symptom names, at each KL and length: over four fifths of the tokens, no more noise than a fifth above that of
    on-policy samples; up to a KL of 0.01 the mean gradient is right to 5 %.
    """
    assert NAMED == ["dppo-binary-tv", "icepop", "mis-token", "tis-token"]
    for one in outcomes(NAMED, (1e-4, 1e-2, 1e-1), (8, 512), tokens=2**16):
        assert one.kept_tokens > 0.8 and one.noise < 1.2, one
        assert one.kl > 1e-2 or one.bias < 0.05 + 3 * one.bias_error, one


@pytest.mark.parametrize("length", LENGTHS)
def test_a_fixed_band_on_geometric_means_leaves_out_nearly_all(at_the_alarm: dict[int, Sample], length: int) -> None:
    """k3 8e-3: mean log rho is -0.008, the band begins at -0.001. It holds for long answers at a KL of a tenth of its width."""
    assert shares(at_the_alarm[length], preset="mis-geometric") < 0.1
    assert shares(at_the_alarm[length], preset="seq-mask-tis") < 0.1
    if length == 2048:
        assert shares(ExactPolicy.of_kl(1e-4).sample(64, length, seed=3), preset="mis-geometric") > 0.9


def test_products_hold_while_kl_times_length_is_small() -> None:
    """KL x length of 0.06, 0.6 and 6: nearly all, about half, nearly none."""
    kept = [shares(ExactPolicy.of_kl(kl).sample(256, 64, seed=3), preset="mis-sequence") for kl in (1e-3, 1e-2, 1e-1)]
    assert kept[0] > 0.9 and 0.3 < kept[1] < 0.6 and kept[2] < 0.1


def test_a_recorded_batch_is_counted_where_there_is_something_to_learn() -> None:
    """Ratios 1, 3 and 1 of tokens with an advantage: mis-token (0.5 to 2) keeps two of three; the answer without one doesn't count."""
    proximal = [-2.0, -2.0 + math.log(3), -2.0, -9.0]
    record = {"lengths": [2, 1, 1], "behavior": [-2.0] * 4, "proximal": proximal, "advantages": [1.0, 1.0, -1.0, 0.0]}
    run = RecordedRun("bfloat16-healthy", 0, {"sampled_reward": [1.0]}, batches={29: record})
    (row,) = recorded_table([run], ("ppo", "mis-token", "mis-geometric")).splitlines()[2:]
    assert row.split("|")[1:3] == [" bfloat16-healthy ", " 29 "] and row.split("|")[4:7] == [" 100 ", " 67 ", " 33 "]
    assert recorded_table([RecordedRun("healthy", 0, {"sampled_reward": [1.0]})], ("ppo",)) == ""


BAND = {"statistic": "ratio", "level": "geometric", "lower": 0.999, "upper": 1.001}


@pytest.mark.parametrize("length", LENGTHS)
def test_a_band_that_knows_the_usual_kl_keeps_what_is_usual(at_the_alarm: dict[int, Sample], length: int) -> None:
    """3 standard errors on either side. At ten times the KL 128 tokens lie 1.1 of their standard errors (0.035) below its lower end,
    -0.042: one in seven is kept. 8 tokens can't be told apart, 2,048 always.
    """
    assert shares(at_the_alarm[length], rejection=[{**BAND, "usual_kl": 8e-3}]) > 0.97
    if length > 8:
        other = ExactPolicy.of_kl(8e-2).sample(64, length, seed=3)
        assert shares(other, rejection=[{**BAND, "usual_kl": 8e-3}]) < {128: 0.3, 2048: 0.01}[length]


def test_a_usual_kl_is_for_geometric_means_of_ratios() -> None:
    for wrong in ({"level": "token"}, {"statistic": "k3"}):
        with pytest.raises(ValueError, match=r"usual_kl = 0\.01 is for ratios at level: geometric"):
            CorrectionConfig.model_validate({"rejection": [{**BAND, "usual_kl": 0.01, **wrong}]})


# -- what is said --------------------------------------------------------------------------------------------------------


def test_a_criterion_that_rejects_most_is_named_with_the_ratios(at_the_alarm: dict[int, Sample]) -> None:
    with pytest.warns(UserWarning) as told:
        correct(at_the_alarm[128].batch, CorrectionConfig(preset="mis-geometric"))
    (message,) = [str(one.message) for one in told]
    batch = at_the_alarm[128].batch
    mean = float((batch.proximal_logprobs - batch.behavior_logprobs).mean())
    assert message.startswith("correction: ratio_geometric_rho rejects 9") and f"at a mean log ratio of {mean:.2g}" in message
    assert "geometric means lie round 0.992" in message and "preset: tis-token" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        correct(at_the_alarm[128].batch, CorrectionConfig(preset="mis-token"))


def test_presets_that_would_break_at_an_alarm_are_known() -> None:
    """By their bands and products; none of those that the monitor names."""
    broken = {name for name in PRESETS if breaks_at_an_alarm(CorrectionConfig(preset=name))}
    geometric, products = {"mis-geometric", "mis-geometric-miles", "seq-mask-tis"}, {"tis-sequence", "mis-sequence", "mis-sequence-upper"}
    assert geometric | products <= broken and not broken & set(NAMED)
    assert "exceeds 0.001 nats" in (breaks_at_an_alarm(CorrectionConfig(preset="mis-geometric")) or "")
    assert breaks_at_an_alarm(CorrectionConfig.model_validate({"rejection": [{**BAND, "usual_kl": 8e-3}]})) is None


def test_symptoms_name_presets_that_exist() -> None:
    assert NAMED == ["dppo-binary-tv", "icepop", "mis-token", "tis-token"]
    assert set(NAMED) <= set(PRESETS)


def test_an_unknown_setting_of_the_monitor_names_the_known_ones() -> None:
    from evenkeel.correction.early_warning.monitor import MonitorConfig

    with pytest.raises((ConfigError, ValueError), match=r"setting = bf16: no level is known.*dense_bfloat16"):
        MonitorConfig(setting="bf16")
