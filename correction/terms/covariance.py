"""Which tokens an optimizer step chooses by covariance: that of advantage and logprob, whose mean takes the policy's entropy down.

Means, ranks and draws are over all trained tokens of the step, so they don't depend on micro-batches; nor on the tokens' order, since a
token draws its lot from its own logprob. Not here: what becomes of the chosen ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_covariances(advantages: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """[N] float64: (A - mean A) (log theta - mean log theta), 0 outside the mask.

    Args:
        target: [N] log pi_theta, nats; both means are over the mask [N] bool.
    Source: The Entropy Mechanism (arXiv 2505.22617), in whose code the means are a micro-batch's.
    """
    count = mask.sum().clamp(min=1)
    centred = [torch.where(mask, values.double(), 0) for values in (advantages, target)]
    first, second = (torch.where(mask, values - values.sum() / count, 0) for values in centred)
    return first * second


def chosen_count(tokens: int, share: float) -> int:
    """Tokens to choose of so many: the share, rounded down, at least one; 0 of none."""
    return min(max(int(share * tokens), 1), tokens)


def largest(values: Tensor, mask: Tensor, count: int) -> Tensor:
    """[N] bool: the `count` tokens of the mask with the largest values; of equal ones the first."""
    order = torch.where(mask, values, -torch.inf).argsort(descending=True, stable=True)
    chosen = torch.zeros_like(mask)
    chosen[order[:count]] = True
    return chosen & mask


def drawn(lots: Tensor, eligible: Tensor, count: int) -> Tensor:
    """[N] bool: up to `count` of the eligible tokens, those with the largest lots [N] int64."""
    places = eligible.nonzero().squeeze(1)
    chosen = torch.zeros_like(eligible)
    chosen[places[lots[places].argsort(descending=True, stable=True)[:count]]] = True
    return chosen


def token_lots(target: Tensor, seed: int) -> Tensor:
    """[N] int64, as good as random: the bits of each logprob and the seed, well stirred.

    Source of the stirring: splitmix64 (Steele, Lea, Flood, 2014), with shifts that keep the sign.
    """
    x = target.double().view(torch.int64) + seed
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)
