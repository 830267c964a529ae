"""When each part runs. By definition: early needs mu and pi_prox alone, late needs pi_theta or a proximal policy made in the forward."""

import pytest

from correction import CorrectionConfig
from correction.schedule import Schedule, Stage, fold_obstacle

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
    ],
)
def test_the_stage_of_each_part(settings: dict[str, object], is_deferred: bool, expected: Schedule) -> None:
    assert Schedule.of(CorrectionConfig.model_validate(settings), is_deferred=is_deferred) == expected


def test_a_late_factor_with_another_term_is_an_obstacle() -> None:
    """The factor would scale the KL penalty too; settled early, it is in the policy's weights alone."""
    config = CorrectionConfig(
        importance={"mode": "truncate", "upper": 2.0}, normalize={"population": "all"}, kl={"coefficient": 0.1}
    )
    assert fold_obstacle(config, is_deferred=False) is None
    assert "would also scale the KL" in (fold_obstacle(config, is_deferred=True) or "")
    assert fold_obstacle(config.model_copy(update={"kl": config.kl.model_copy(update={"coefficient": 0.0})}), is_deferred=True) is None
