"""Importance weights: what a unit's ratio becomes before it multiplies the loss.

off: 1. raw: the ratio. truncate: min(ratio, upper). clip: into [lower, upper]. mask: the ratio inside [lower, upper], 0 outside.
Weights are detached and multiply the objective from outside: w * max(-r A, -clip(r) A), never inside its min and max.
"""

from __future__ import annotations

import torch
from torch import Tensor

from correction.choices import WeightMode as WeightMode
from correction.masking import masked


def bounded_weights(ratios: Tensor, *, mode: WeightMode, lower: Tensor | float | None, upper: Tensor | float | None) -> Tensor:
    """Weights of units from their ratios.

    Bounds are inclusive, have no unit, and may be one for each unit (bounds that depend on staleness).
    Args:
        ratios: [U] detached, already at their level.
        mode: see the module's docstring. Truncate uses upper alone; clip and mask use those that are given.
    Returns: [U], the dtype of ratios.
    Source: truncate: Ionides (2008), "TIS" in Yao et al. (2025); mask: IcePop (arXiv 2510.18855), which keeps the ratio, not 1.
    """
    if mode is WeightMode.OFF:
        return torch.ones_like(ratios)
    if mode is WeightMode.RAW:
        return ratios
    low = 0.0 if lower is None or mode is WeightMode.TRUNCATE else lower
    high = torch.inf if upper is None else upper
    if mode is WeightMode.MASK:
        return masked(ratios, (ratios >= low) & (ratios <= high))
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.clamp(torch.clamp(ratios, min=low), max=high)
    return ratios.clamp(low, high)


def staleness_bound(table: tuple[float, ...], staleness: Tensor) -> Tensor:
    """The bound of each unit, from a table with one entry for each staleness; the last entry holds for all older ones.

    Args:
        table: not empty; entry s is the bound at staleness s.
        staleness: [U] int64, versions, >= 0.
    Returns: [U] float32.
    """
    return torch.tensor(table, device=staleness.device).index_select(0, staleness.clamp(max=len(table) - 1))
