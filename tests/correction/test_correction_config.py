"""Settings: presets first, keys next to them override; nonsense is refused with a reason."""

import pytest

from evenkeel.correction import PRESETS, CorrectionConfig, needs_topk
from evenkeel.correction.settings.base import Settings


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_complete_and_survive_a_round_trip(preset):
    config = CorrectionConfig(preset=preset)
    assert CorrectionConfig.model_validate_json(config.model_dump_json()) == config
    assert config.resolve().preset is None
    assert CorrectionConfig(**config.resolve().model_dump()) == config.resolve()
    data = PRESETS[preset]
    texts = (data.formula, data.source, data.when, data.open_constant, data.found)
    assert all(texts[:3]) and all(text == " ".join(text.split()) for text in texts)


def test_keys_given_with_a_preset_override_it():
    config = CorrectionConfig(preset="tis-token", importance={"upper": 3})
    assert (config.importance.mode.value, config.importance.upper) == ("truncate", 3)
    assert CorrectionConfig(preset="mis-full", veto=None).veto is None
    assert CorrectionConfig(objective={"clip_high": 0.28}).objective.clip_high == 0.28
    assert CorrectionConfig(preset="dapo", objective={"kind": "soft_gate"}).objective.kind == "soft_gate"
    assert CorrectionConfig(preset="minirl", objective={"gate": {"high": 0.3}}).objective.gate.high == 0.3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"preset": "tis-tokn"}, "Did you mean tis-token"),
        ({"importance": {"mode": "truncate"}}, "need a largest weight"),
        ({"importance": {"mode": "mask"}}, "does nothing"),
        ({"importance": {"mode": "clip", "lower": 3, "upper": 2}}, "nothing would be inside"),
        ({"rejection": [{"statistic": "k3"}]}, "has no bound"),
        ({"rejection": [{"statistic": "second_moment", "level": "sequence", "upper": 1}]}, "works on tokens"),
        ({"rejection": [{"statistic": "topk_tv", "upper": 1}]}, "Set ratio: q"),
        ({"normalize": {"population": "all"}}, "no importance weights to normalise"),
        ({"objective": {"kind": "clip", "ratio": "rho"}}, "no gradient"),
        ({"objective": {"kind": "clip", "ratio": "staleness"}}, "no gradient, since staleness does not contain the target policy"),
        ({"preset": "minimal-mask", "proximal": "recompute", "objective": {"gate": {"ratio": "mismatch"}}}, "the gate compares the target"),
        ({"preset": "minirl", "objective": {"gate": {"ratio": "rho"}}}, "a gate stops what an update moves too far"),
        ({"kl": {"coefficient": 0.1, "estimator": "unbiased_k3", "ratio": "mismatch"}}, "kl.ratio = mismatch: it has no gradient"),
        ({"preset": "split-tis", "proximal": "behavior"}, "ratio = mismatch with proximal = behavior.* Set proximal: recompute"),
        ({"preset": "a-3po", "rejection": [{"ratio": "staleness", "upper": 2.0}]}, "ratio = staleness with proximal = interpolate"),
        ({"preset": "split-tis", "importance": {"ratio": "rho"}}, "the objective contains since_sampling already, and a weight on rho"),
        ({"preset": "tis-token", "objective": {"ratio": "since_sampling"}}, "a weight on rho would apply it twice"),
        ({"preset": "pg-sequence", "normalize": {"population": "all"}, "kl": {"coefficient": 0.1}}, "drop the term"),
        ({"kl": {"coefficient": 0.1, "level": "sequence"}}, "Set kl.estimator: k2, or kl.level: token"),
        ({"preset": "m2po", "rejection": [{"statistic": "second_moment", "ratio": "q", "upper": x} for x in (0.04, 0.1)]}, "one budget"),
        ({"preset": "m2po", "covariance": {}}, "one choice of an optimizer step is settled"),
        ({"preset": "bandpo", "objective": {"level": "sequence"}}, "the band is that of one token"),
        ({"preset": "bandpo", "objective": {"relax": {}}}, "Set level: token and relax: null, or band: null"),
        ({"covariance": {"lower": 6}}, "nothing would be inside"),
        ({"preset": "tis-token", "rejection": [{"only_outward": True, "upper": 2.0}]}, "only_outward is for second_moment"),
        ({"preset": "dppo-binary-tv", "objective": {"gate": {"divergence": "k3"}}}, "binary_tv"),
        ({"preset": "dppo-topk-tv", "objective": {"gate": {"ratio": "r"}}}, "Set ratio: q"),
        ({"preset": "gspo", "objective": {"relax": {}}}, "a geometric ratio belongs to many tokens"),
        ({"preset": "minimal-mask", "objective": {"gate": {"side": "both"}}}, "'any', 'negative' or 'positive'"),
        ({"importanse": {}}, "no such key; the nearest is importance"),
    ],
    ids=str,
)
def test_nonsense_is_refused_with_a_reason(settings, reason):
    with pytest.raises(ValueError, match=reason):
        CorrectionConfig(**settings)


def test_a_veto_of_probabilities_has_its_own_limit():
    """Ratios: 1e-4, as in the code that has the veto. Probabilities: 1e-6, as in the Miles post: long answers have tokens under 1e-4."""
    assert CorrectionConfig(veto={}).veto.lower == 1e-4
    assert CorrectionConfig(veto={"quantity": "probability"}).veto.lower == 1e-6
    assert CorrectionConfig(preset="mis-full").veto.lower == 1e-4
    assert CorrectionConfig(preset="mis-full", veto={"quantity": "probability"}).veto.lower == 1e-6
    assert CorrectionConfig(preset="mis-full", veto={"quantity": "probability", "lower": 1e-3}).veto.lower == 1e-3
    by_probability = CorrectionConfig(veto={"quantity": "probability", "lower": None, "upper": 0.9}).veto
    assert (by_probability.lower, by_probability.upper) == (None, 0.9)


def test_a_penalty_that_pulls_nowhere_is_refused():
    """test_toy_policy.py has the gradients. A coefficient that only has the KL reported passes."""
    with pytest.raises(ValueError, match=r"kl.coefficient = 0.1: its expected gradient is 0 on-policy.* Take k2"):
        CorrectionConfig(kl={"coefficient": 0.1, "estimator": "k1"})
    assert CorrectionConfig(kl={"coefficient": 1e-9, "estimator": "k1"}).kl.estimator == "k1"
    assert CorrectionConfig(kl={"coefficient": 0.1, "estimator": "k2"}).kl.coefficient == 0.1


def test_every_field_has_its_line():
    parts = [part for part in Settings.__subclasses__() if part.__module__.startswith("evenkeel.correction.")]
    assert len(parts) > 5
    for part in parts:
        parts += part.__subclasses__()
        assert all(field.description for name, field in part.model_fields.items() if name != "kind"), part


def test_top_k_logprobs_are_asked_for_where_a_part_needs_them():
    assert {name: needs_topk(CorrectionConfig(preset=name)) for name in ("dppo-topk-tv", "dppo-topk-kl", "dppo-binary-tv", "mis-full")} == {
        "dppo-topk-tv": 20, "dppo-topk-kl": 20, "dppo-binary-tv": 0, "mis-full": 0,
    }  # fmt: skip
    criterion = {"statistic": "topk_kl", "ratio": "q", "upper": 0.1}
    assert needs_topk(CorrectionConfig(preset="ppo", rejection=[criterion], topk=7)) == 7
