"""Batch normalisation of importance weights in two phases, so that micro-batches and ranks can't change it.

Phase 1 gives partial sums, which add up over any split of the batch; phase 2 divides by the mean of the whole. Textbook
self-normalised importance sampling divides by the sum instead: the same up to a constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from correction.choices import Population as Population
from correction.masking import masked
from correction.segments import Segments

SMALLEST_MEAN = 1e-8
"""A mean weight of less than this is not divided by (verl): the batch has no usable token, and noise would be blown up."""


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
    return torch.stack([weights.sum(dtype=torch.float64), counted.sum(dtype=torch.float64)])


def normalizer(weight_sum: float, count: float) -> float:
    """Factor on every weight that makes the population's mean 1; 1.0 where there is nothing to normalise."""
    if count <= 0 or weight_sum / count <= SMALLEST_MEAN:
        return 1.0
    return count / weight_sum
