"""Divergences of two policies, estimated or bounded from what is known of the sampled token.

k1, k2, k3 estimate a KL from the sampled token's ratio alone. The binary ones merge all other tokens into one event:
exact for two outcomes, lower bounds of the full divergence otherwise (data processing inequality). The top-K ones keep
K tokens and the sampled one apart and merge the rest.  All in float64: in float32, e^x - 1 - x errs by 1e-7 even at x = 1e-4,
where its value is 5e-9.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from .ratios import LOG_RATIO_LIMIT

COMPLEMENT_FLOOR = 2.0**-25
"""Least probability of "any other token": a float32 logprob that rounds to 0 says no more than 1 - p < 6e-8."""
CPU_CHUNK = 2**16
"""Tokens whose numbers stay in a processor's cache, which more than halves the time of what has many of them."""


class Estimator(enum.StrEnum):
    """Schulman's estimators of KL(den || num) from samples of den, with x = num / den at the sample."""

    K1 = "k1"
    """-log x: unbiased, may be negative."""
    K2 = "k2"
    """(log x)^2 / 2: biased, never negative."""
    K3 = "k3"
    """x - 1 - log x: unbiased, never negative."""


def estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """[N] float64 of one estimator; carries the gradient of log_ratio.

    Args:
        log_ratio: [N] nats, log of numerator over denominator; cut to +-20 first.
    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    x = log_ratio.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator is Estimator.K1:
        return -x
    if estimator is Estimator.K2:
        return 0.5 * x.square()
    return torch.expm1(x) - x


def total_variation(first: Tensor, second: Tensor) -> Tensor:
    """[N] float64: |p - p'| of the sampled token, the total variation of the binary distributions.

    Args:
        first, second: [N] logprobs.
    Source: Trust Region (arXiv 2602.04879), binary TV.
    """
    return (first.double().exp() - second.double().exp()).abs()


def binary_kl(first: Tensor, second: Tensor) -> Tensor:
    """[N] float64: p log(p/p') + (1-p) log((1-p)/(1-p')), with p of `first` and p' of `second`.

    Args:
        first, second: [N] logprobs, each <= 0.
    Source: Trust Region (arXiv 2602.04879); KPop takes the larger of both directions.
    """
    less, _, ratio, apart = _binary_parts(first, second)
    return torch.addcmul(ratio, less, apart).clamp(min=0)


def binary_kl_max(first: Tensor, second: Tensor) -> Tensor:
    """[N] float64: the larger of the binary KLs of both directions. Args: as for `binary_kl`."""
    found = []
    for some, others in zip(torch.split(first, CPU_CHUNK), torch.split(second, CPU_CHUNK), strict=True):
        less, less_other, ratio, apart = _binary_parts(some, others)
        found.append(torch.maximum(torch.addcmul(ratio, less, apart), -torch.addcmul(ratio, less_other, apart)))
    return torch.cat(found).clamp_(min=0)


def _binary_parts(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[N] float64 each: p - 1, p' - 1, x = log(p/p') and x - log((1-p)/(1-p')); KL(p || p') is x + (p - 1)(x - log((1-p)/(1-p')))."""
    log_p, log_other = first.double(), second.double()
    less, less_other = (torch.expm1(one).clamp(max=-COMPLEMENT_FLOOR) for one in (log_p, log_other))  # no cancellation near p = 1
    ratio = log_p - log_other
    return less, less_other, ratio, ratio - (less / less_other).log()


def topk_table(topk_ids: Tensor, topk_logprobs: Tensor, token_ids: Tensor, sampled_logprobs: Tensor) -> Tensor:
    """Probabilities of K tokens, of the sampled token if it is none of them, and of all the others together.

    Args:
        topk_ids: [N, K] int64; topk_logprobs: [N, K] of either policy at these ids.
        token_ids: [N] the sampled token; sampled_logprobs: [N] its logprob under the same policy.
    Returns: [N, K + 2] float64, rows sum to 1; the sampled token's own column is 0 when it is among the K.
    """
    inside = topk_logprobs.double().exp()
    is_listed = (topk_ids == token_ids[:, None]).any(1)
    sampled = torch.where(is_listed, 0, sampled_logprobs.double().exp())
    other = (1 - inside.sum(1) - sampled).clamp(min=1e-12)
    return torch.cat([inside, sampled[:, None], other[:, None]], 1)


def table_tv(first: Tensor, second: Tensor) -> Tensor:
    """[N] float64: half the sum of |p - p'| over the rows of two tables, the merged rest included.

    Source: Trust Region (arXiv 2602.04879) Eq. 16 and its official code; Eq. 15 leaves the rest out.
    """
    return 0.5 * (first - second).abs().sum(1)


def table_kl(first: Tensor, second: Tensor) -> Tensor:
    """[N] float64: sum of p log(p/p') over the rows of two tables; an entry with p = 0 adds nothing."""
    floor = 1e-12
    return torch.where(first > 0, first * (first.clamp(min=floor).log() - second.clamp(min=floor).log()), 0).sum(1).clamp(min=0)
