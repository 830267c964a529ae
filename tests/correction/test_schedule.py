"""When each part runs. By definition: early needs mu and pi_prox alone, late needs pi_theta or a proximal policy made in the forward."""

import pytest

from evenkeel.correction import CorrectionConfig
from evenkeel.correction.settings.schedule import Schedule, Stage, defers, fold_obstacle, needs_reference_logprobs

EARLY, LATE = Stage.EARLY, Stage.LATE
BAND = {"lower": 0.5, "upper": 2.0}
PARTS = {
    "importance": {"mode": "truncate", "upper": 2.0},
    "rejection": [BAND, {**BAND, "ratio": "q"}],
    "veto": {"lower": 1e-4},
    "normalize": {"population": "kept"},
    "denominator": {"count": "kept"},
}


@pytest.mark.parametrize(
    ("settings", "is_deferred", "expected"),
    [
        # Weights and one criterion on rho are early; a criterion on q is late, and with it what counts survivors.
        (PARTS, False, Schedule(EARLY, (EARLY, LATE), EARLY, EARLY, LATE, LATE)),
        # Deferred, rho itself exists only in the forward.
        (PARTS, True, Schedule(LATE, (LATE, LATE), LATE, LATE, LATE, LATE)),
        (PARTS | {"proximal": "interpolate"}, False, Schedule(LATE, (LATE, LATE), LATE, LATE, LATE, LATE)),
        # Normalised over all units, weights don't wait for a late criterion.
        (PARTS | {"normalize": {"population": "all"}}, False, Schedule(EARLY, (EARLY, LATE), EARLY, EARLY, EARLY, LATE)),
        # In bypass rho means q, which is late; a probability under mu is known early.
        (
            {"preset": "bypass", "rejection": [BAND], "veto": {"quantity": "probability", "lower": 1e-4}},
            False,
            Schedule(EARLY, (LATE,), EARLY, None, None, None),
        ),
        ({"preset": "ppo"}, False, Schedule(EARLY, (), None, None, None, None)),
        # Parts of rho are known when rho is.
        ({"preset": "split-mis"}, False, Schedule(EARLY, (EARLY,), None, EARLY, None, None)),
        ({"preset": "split-mis"}, True, Schedule(LATE, (LATE,), None, LATE, None, None)),
    ],
)
def test_the_stage_of_each_part(settings: dict[str, object], is_deferred: bool, expected: Schedule) -> None:
    assert Schedule.of(CorrectionConfig.model_validate(settings), is_deferred=is_deferred) == expected


@pytest.mark.parametrize(
    ("settings", "steps", "has_auxiliary_loss", "expected"),
    [
        ({"preset": "tis-token"}, 1, False, True),
        ({"preset": "tis-token"}, 2, False, False),  # the second step's forward is at other weights
        ({"preset": "bypass"}, 1, False, False),
        ({"preset": "tis-token", "proximal": "interpolate"}, 1, False, False),
        ({"preset": "tis-token", "normalize": {"population": "all"}}, 1, False, True),
        ({"preset": "tis-token", "normalize": {"population": "all"}}, 1, True, False),  # the forward runs first
    ],
)
def test_which_runs_defer_their_batches(settings: dict[str, object], steps: int, has_auxiliary_loss: bool, expected: bool) -> None:
    config = CorrectionConfig.model_validate(settings)
    assert defers(config, steps, has_auxiliary_loss=has_auxiliary_loss) is expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"preset": "prime-tv"}, False),  # both have a KL penalty on the behaviour policy
        ({"preset": "prime-ipo"}, False),
        ({"kl": {"coefficient": 0.1, "anchor": "proximal"}}, False),
        ({"kl": {"coefficient": 0.1}}, True),
        ({"kl": {"coefficient": 0.0, "anchor": "reference"}}, False),
    ],
)
def test_a_penalty_on_another_policy_needs_no_reference(settings: dict[str, object], expected: bool) -> None:
    assert needs_reference_logprobs(CorrectionConfig.model_validate(settings)) is expected


def test_nothing_waits_for_a_proximal_policy_that_is_not_recomputed() -> None:
    """Whoever calls a batch in bypass deferred gets the same schedule: there the veto's probability is known before training."""
    settings = {"preset": "bypass", "veto": {"quantity": "probability", "lower": 1e-4}, "denominator": {"count": "kept"}}
    config = CorrectionConfig.model_validate(settings)
    assert Schedule.of(config, is_deferred=True) == Schedule.of(config, is_deferred=False)
    assert fold_obstacle(config, is_deferred=True, has_auxiliary_loss=True) is None


def test_a_late_factor_with_another_term_is_an_obstacle() -> None:
    """The factor would scale the KL penalty too; settled early, it is in the policy's weights alone."""
    config = CorrectionConfig(importance={"mode": "truncate", "upper": 2.0}, normalize={"population": "all"}, kl={"coefficient": 0.1})
    assert fold_obstacle(config, is_deferred=False) is None
    assert "would also scale the KL" in (fold_obstacle(config, is_deferred=True) or "")
    assert fold_obstacle(config.model_copy(update={"kl": config.kl.model_copy(update={"coefficient": 0.0})}), is_deferred=True) is None
