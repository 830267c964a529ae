"""What a preset is, and short words for the settings that presets are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PresetSettings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Preset:
    """One method."""

    settings: PresetSettings
    """Keys of CorrectionConfig; values not named there are the config's defaults."""
    formula: str
    """What is optimised, in one line."""
    source: str
    """Paper or code that defines it; a constant from elsewhere is named with its place."""
    when: str
    """When to use it."""
    open_constant: str = ""
    """A constant that the source leaves open and that the user should choose; empty: none."""
    found: str = ""
    """What was found with it, by whom, and who found the opposite; empty: nothing in the sources that were read."""


def clip(low: float = 0.2, high: float = 0.2, **more: Any) -> PresetSettings:
    """PPO's objective."""
    return {"kind": "clip", "clip_low": low, "clip_high": high, **more}


def score(ratio: str | None = "q", **more: Any) -> PresetSettings:
    """A score-form objective."""
    return {"kind": "score", "ratio": ratio, **more}


def band(lower: float, upper: float, level: str = "token", **more: Any) -> PresetSettings:
    """A criterion on a ratio, rho unless said otherwise."""
    return {"statistic": "ratio", "level": level, "lower": lower, "upper": upper, **more}


def truncate(upper: float, level: str = "token", **more: Any) -> PresetSettings:
    """Truncated importance weights on rho, unless said otherwise."""
    return {"mode": "truncate", "level": level, "upper": upper, **more}


SEQUENCE_MEAN: PresetSettings = {"kind": "sequence_mean"}
SEQUENCE_SUM: PresetSettings = {"kind": "sequence_sum"}
NO_STD: PresetSettings = {"estimator": "grpo_no_std"}
BYPASS: PresetSettings = {"proximal": "behavior"}
NORMALIZED: PresetSettings = {"population": "all"}


def clip_gate(ratio: str, high: float, **more: Any) -> PresetSettings:
    """Tokens that PPO's clip on a ratio would leave without gradient."""
    return {"kind": "clip", "ratio": ratio, "low": 0.2, "high": high, **more}


def divergence_gate(divergence: str, threshold: float, **more: Any) -> PresetSettings:
    """Tokens that have gone further from the behaviour policy than a threshold, and would go on."""
    return {"kind": "divergence", "divergence": divergence, "threshold": threshold, **more}


def gated(gate: PresetSettings | None, *, upper: float | None = None, proximal: PresetSettings | None = None) -> PresetSettings:
    """The one formula of the Trust Region paper (Eq. 23): sg[M min(q, C)] A log theta, summed over tokens, A without std.

    Args: gate: M; upper: C; proximal: nothing (recompute) or BYPASS.
    """
    more: PresetSettings = {} if gate is None else {"gate": gate}
    return {**(proximal or {}), "objective": score(upper=upper, **more), "denominator": SEQUENCE_SUM, "advantage": NO_STD}
