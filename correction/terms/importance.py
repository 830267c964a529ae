"""Importance weights: what a unit's ratio becomes before it multiplies the loss.

off: 1. raw: the ratio. truncate: min(ratio, upper). clip: into [lower, upper]. mask: the ratio inside [lower, upper], 0 outside.
Weights are detached and multiply the objective from outside: w * max(-r A, -clip(r) A), never inside its min and max.

Batch normalisation goes in two phases, so that micro-batches and ranks can't change it: phase 1 gives partial sums, which add up over any
split of the batch; phase 2 divides by the mean of the whole. Textbook self-normalised importance sampling divides by the sum instead: the
same up to a constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..settings.choices import Population, WeightMode
from .segments import Segments, masked

SMALLEST_MEAN = 1e-8
"""A mean weight of less than this is not divided by (verl): the batch has no usable token, and noise would be blown up."""


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


def weight_sums(unit_weights: Tensor, mask: Tensor, keep: Tensor, segments: Segments, population: Population) -> Tensor:
    """[2] float64: sum of the units' weights and number of units. Adds up over any split that leaves units whole.

    At sequence level each sequence counts once, whatever its length.
    Args:
        unit_weights: [U]; mask, keep: [N] bool.
    """
    counted = segments.any(mask)
    if population is Population.KEPT:
        counted = segments.any(keep) & (unit_weights > 0)
    weights = masked(unit_weights, counted)
    return torch.stack([weights.sum(dtype=torch.float64), counted.count_nonzero().double()])


def normalizer(weight_sum: float, count: float) -> float:
    """Factor on every weight that makes the population's mean 1; 1.0 where there is nothing to normalise."""
    if count <= 0 or weight_sum / count <= SMALLEST_MEAN:
        return 1.0
    return count / weight_sum
