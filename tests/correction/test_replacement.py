"""Another correction in the middle of a run: what stays, what narrows and by how much, what is refused."""

import math

import pytest

from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.early_warning.replacement import check_replaceable, switched, tightened
from evenkeel.correction.errors import ConfigError
from evenkeel.correction.presets.methods import PRESETS
from evenkeel.correction.presets.preset import Preset, score, truncate


def config(**settings):
    return CorrectionConfig.model_validate(settings)


def test_a_preset_comes_as_published():
    """With defaults on both sides nothing of the run is left in it."""
    for name in PRESETS:
        before = config(preset="tis-token", importance={"upper": 7})
        assert switched(before, name).resolve() == config(preset=name).resolve()


def test_what_the_run_optimises_stays():
    """Its KL penalty, entropy bonus and advantages are no matter of the correction; those that a preset is made of are its own."""
    before = config(preset="tis-token", kl={"coefficient": 0.04}, entropy_coefficient=0.01, advantage={"estimator": "rloo"})
    after = switched(before, "icepop")
    assert (after.kl.coefficient, after.entropy_coefficient, after.advantage.estimator) == (0.04, 0.01, "rloo")
    assert after.importance == config(preset="icepop").importance
    assert switched(before, "dr-grpo").advantage.estimator == "grpo_no_std"


def test_what_does_not_go_together_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"there is no such preset\. Did you mean icepop"):
        switched(config(), "icepopp")
    # A weight of mean 1 that is known after the forward alone: its factor would scale the run's entropy bonus too (schedule.fold_obstacle).
    parts = {"proximal": "behavior", "importance": truncate(2.0), "normalize": {"population": "all"}, "objective": score(None)}
    monkeypatch.setitem(PRESETS, "late", Preset(parts, formula="", source="", when=""))
    switched(config(), "late")
    with pytest.raises(ConfigError, match=r"late with this run's advantage, kl, step_size, missing, .*would also scale"):
        switched(config(entropy_coefficient=0.1), "late")


def test_what_engines_and_learner_did_not_prepare_for_is_refused():
    """Top-K logprobs and the reference model are there if the run began with a correction that needs them."""
    with_reference = config(kl={"coefficient": 0.1})
    with pytest.raises(ConfigError, match="needs a reference model"):
        check_replaceable(config(), with_reference)
    with pytest.raises(ConfigError, match="needs the engines' top-K logprobs"):
        check_replaceable(config(preset="dppo-binary-tv"), config(preset="dppo-topk-tv"))
    check_replaceable(with_reference, with_reference)
    check_replaceable(config(preset="dppo-topk-kl"), config(preset="dppo-topk-tv"))
    with pytest.raises(ConfigError, match="needs a reference model"):  # a penalty, but not on the reference: no such model is loaded
        check_replaceable(config(preset="prime-tv"), with_reference)
    check_replaceable(config(), config(preset="prime-tv"))  # its penalty's anchor is the behaviour policy


def test_bounds_of_ratios_narrow_in_the_logarithm_and_distances_in_proportion():
    before = config(
        proximal="recompute",
        importance={"mode": "clip", "lower": 0.5, "upper": 4.0, "upper_by_staleness": (4.0, 9.0)},
        rejection=[
            {"statistic": "ratio", "level": "geometric", "lower": 0.25, "upper": 16.0},
            {"statistic": "k3", "upper": 0.2},
            {"statistic": "k1", "lower": -0.2, "upper": 0.4},
        ],
        objective={"kind": "clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 9.0},
        veto={"lower": 1e-4},
    )
    after = tightened(before, 0.5)
    assert after.importance.lower == pytest.approx(math.sqrt(0.5)) and after.importance.upper == 2.0
    assert after.importance.upper_by_staleness == (2.0, 3.0)
    assert [(c.lower, c.upper) for c in after.rejection] == [(0.5, 4.0), (None, 0.1), (-0.1, 0.2)]
    assert (after.objective.clip_low, after.objective.clip_high, after.objective.dual_clip) == pytest.approx((0.1, 0.14, 3.0))
    assert after.veto == before.veto


@pytest.mark.parametrize(
    ("preset", "place", "value"),
    [
        ("gmpo", lambda c: c.objective.log_clip, 0.2),  # 0.4
        ("ctpo", lambda c: c.objective.log_dual, 0.025),  # 0.05
        ("dppo-binary-tv", lambda c: c.objective.gate.threshold, 0.075),  # 0.15
        ("minirl", lambda c: c.objective.gate.high, 0.135),  # 0.27
        ("pg-tis", lambda c: c.objective.upper, math.sqrt(3)),  # 3
        ("m2po", lambda c: c.rejection[0].upper, 0.02),  # 0.04
    ],
)
def test_every_kind_of_trust_region(preset, place, value):
    assert place(tightened(config(preset=preset), 0.5)) == pytest.approx(value)


def test_what_is_tightened_is_a_valid_correction():
    """For every preset: the same settings written out are accepted. Those without a bound are refused."""
    unbounded = []
    for name in PRESETS:
        try:
            after = tightened(config(preset=name), 0.3)
        except ConfigError:
            unbounded.append(name)
        else:
            assert config(**after.model_dump()) == after and after != config(preset=name)
    assert set(unbounded) >= {"pg", "pg-is", "sapo", "vespo"}
    assert all(config(preset=name).importance.upper is None for name in unbounded)
