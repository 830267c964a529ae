"""Rejection and veto: which tokens, turns or sequences take part at all.

A criterion is a statistic of two policies, a level, and bounds; what lies outside is dropped. Criteria are combined by AND and
look at the raw ratio, never at the bounded weight. They only ever shrink the mask. Not here: what the loss is then divided by.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..settings.choices import AdvantageSign, RejectionLevel, Statistic
from .divergence import Estimator, binary_kl, binary_kl_max, estimate, table_kl, table_tv, topk_table, total_variation
from .segments import Segments, masked

MOST = 0.9
"""A criterion that rejects more than this share of its tokens gets a warning."""


def token_statistic(statistic: Statistic, numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """[N] statistic of each token, 0 outside the mask; RATIO and SECOND_MOMENT give the log ratio (bounds follow in log space).

    Args:
        numerator, denominator: [N] logprobs of the sampled token.
    Raises: ValueError for a top-K statistic, which needs more than the sampled token: see `topk_statistic`.
    """
    if statistic in (Statistic.RATIO, Statistic.SECOND_MOMENT):
        return masked(numerator - denominator, mask)
    if statistic in (Statistic.K1, Statistic.K2, Statistic.K3):
        return estimate(masked(numerator - denominator, mask), Estimator(statistic.value))
    # A masked position may hold anything: both policies become the same there, and the divergence 0.
    numerator, denominator = masked(numerator, mask), masked(denominator, mask)
    if statistic is Statistic.BINARY_TV:
        return total_variation(denominator, numerator)
    if statistic is Statistic.BINARY_KL:
        return binary_kl(denominator, numerator)
    if statistic is Statistic.BINARY_KL_MAX:
        return binary_kl_max(denominator, numerator)
    raise ValueError(f"{statistic.value} is not a function of the sampled token's logprobs alone")


def topk_statistic(
    statistic: Statistic,
    *,
    token_ids: Tensor,
    topk_ids: Tensor,
    behavior: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    mask: Tensor,
) -> Tensor:
    """[N] float64: top-K TV or KL from the behaviour policy to the target, 0 outside the mask.

    Args:
        behavior, target: (logprobs of the K tokens [N, K], logprob of the sampled token [N]).
    Source: Trust Region (arXiv 2602.04879), Eq. 14-16.
    """
    first = topk_table(topk_ids, behavior[0], token_ids, behavior[1])
    second = topk_table(topk_ids, target[0], token_ids, target[1])
    divergence = table_tv(first, second) if statistic is Statistic.TOPK_TV else table_kl(first, second)
    return torch.where(mask, divergence, 0)


def unit_statistic(values: Tensor, mask: Tensor, segments: Segments, level: RejectionLevel) -> Tensor:
    """[U]: tokens' statistics [N] brought to a level; float64 above the token."""
    if level is RejectionLevel.TOKEN:
        return values
    if level is RejectionLevel.GEOMETRIC:
        return segments.mean(values, mask)
    if level is RejectionLevel.MAXIMUM:
        return segments.maximum(torch.where(mask, values, -torch.inf)).double()
    return segments.sum(values)


def within(values: Tensor, *, lower: Tensor | float | None, upper: Tensor | float | None, is_open: bool = False) -> Tensor:
    """[U] bool: inside the bounds, which count as inside unless is_open. What is not finite is outside."""
    if not is_open:
        nearest = values if lower is None else values.clamp(min=lower)
        return ~((nearest if upper is None else nearest.clamp(max=upper)) - values).bool()  # a cast costs less than a comparison
    inside = torch.ones_like(values, dtype=torch.bool)
    if lower is not None:  # a comparison with not a number is False
        inside &= values > lower
    if upper is not None:
        inside &= values < upper
    return inside


def log_bound(bound: Tensor | float | None) -> Tensor | float | None:
    """Bound of a ratio, as bound of its log; 0 becomes -inf."""
    if bound is None:
        return None
    if isinstance(bound, Tensor):
        return bound.double().log()
    return math.log(bound) if bound > 0 else -math.inf


def allowing_for(
    lower: Tensor | float | None, upper: Tensor | float | None, *, kl: float, tokens: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Bounds [U] of a mean log ratio, moved to -kl and widened by 3 standard errors of a mean over so many tokens.

    The mean of log rho over tokens of mu is -KL, and for small gaps its variance is 2 KL: a fixed band round 1 holds neither for a KL above
    its width nor for short sequences.
    Args:
        lower, upper: log bounds (nats).
        tokens: [U] of each sequence; one without tokens is never rejected.
    """
    scatter = 3 * (2 * kl / tokens.clamp(min=1)).sqrt()
    return (None if lower is None else lower - kl - scatter), (None if upper is None else upper - kl + scatter)


def has_sign(advantages: Tensor, sign: AdvantageSign) -> Tensor:
    """[U] bool: units that a criterion looks at. Zero advantage is on neither side."""
    if sign is AdvantageSign.NEGATIVE:
        return advantages < 0
    if sign is AdvantageSign.POSITIVE:
        return advantages > 0
    return torch.ones_like(advantages, dtype=torch.bool)


def is_outward(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """[N] bool: tokens whose ratio the update moves away from 1: the two quadrants in which a clip works."""
    return (log_ratio * advantages.sign()) > 0


def second_moment_keep(log_ratio: Tensor, mask: Tensor, *, budget: float, is_open: bool = False, least: int = 1) -> Tensor:
    """[N] bool: tokens left after dropping those with the largest (log x)^2 until the mean of the rest is at most the budget.

    The fewest tokens that bring the mean there are dropped.
    Args:
        log_ratio: [N] nats, of the global batch: the threshold depends on all tokens.
        is_open: the mean has to be under the budget; least: tokens that always stay.
    Source: M2PO (arXiv 2510.01161), Algorithm 1; AReaL's rule is open, and always leaves one.
    """
    moments = log_ratio.double().square()
    keep = mask & ((moments < budget) if is_open else (moments <= budget))  # so is their mean: only the others are in doubt, mostly few
    doubtful = (mask & ~keep).nonzero().squeeze(1)
    rising, order = moments[doubtful].sort(stable=True)
    count = int(keep.count_nonzero())
    counts = torch.arange(count + 1, count + 1 + doubtful.numel(), device=mask.device)
    means = (masked(moments, keep).sum() + rising.cumsum(0)) / counts
    more = int(((means < budget) if is_open else (means <= budget)).sum())  # means of a rising sequence rise: these are its first ones
    keep[doubtful[order[: max(more, least - count)]]] = True
    return keep


def veto_keep(values: Tensor, mask: Tensor, segments: Segments, *, lower: float | None, upper: float | None) -> Tensor:
    """[N] bool: False for every token of a sequence in which a masked-in token is under lower or over upper.

    Args:
        values: [N] log of the vetoed quantity: the raw token ratio, or a probability.
        lower, upper: hard limits, exclusive: a token at the limit passes.
    Source: Miles mismatch post and code; SkyRL's outlier mask has the upper side too.
    """
    bad = mask & ~within(values, lower=log_bound(lower), upper=log_bound(upper))
    if mask.device.type == "cpu" and not bool(bad.any()):  # as nearly always
        return torch.ones_like(mask)
    return ~segments.spread(segments.any(bad))


def narrow_bounds(label: str, level: RejectionLevel | None, share: float, mean: float) -> str:
    """One sentence for a criterion that rejects MOST of a batch, which then teaches little.

    Args:
        label, level: of the criterion; the veto has no level.
        share: rejected, of the tokens that it looked at.
        mean: of the log of the criterion's ratio (nats) over the trained tokens; of rho it is minus their KL, over tokens of mu.
    """
    reason = ""
    if level is RejectionLevel.GEOMETRIC:
        reason = f": geometric means lie round {math.exp(mean):.4f}, long answers closely"
    elif level is RejectionLevel.SEQUENCE:
        reason = f": a product over n tokens lies round exp({mean:.2g} n)"
    return (
        f"correction: {label} rejects {share:.1%} of the tokens, at a mean log ratio of {mean:.2g}{reason}. "
        "Bound ratios of tokens instead (preset: tis-token), or widen the bounds"
    )
