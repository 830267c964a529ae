"""How much of the variance of log(pi_theta / mu) is mismatch of the engines, and how much staleness.

With pi_v the learner's policy at the weights that sampled a token, log(pi_theta / mu) = log(pi_v / mu) + log(pi_theta / pi_v). The first is
mismatch: one set of weights in two engines. The second is staleness: two sets of weights in one engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..terms.ratios import LOG_RATIO_LIMIT


@dataclass(frozen=True, slots=True)
class VarianceSplit:
    """total = mismatch + staleness + 2 covariance, all in nats^2 over the same tokens."""

    tokens: int
    total: float
    mismatch: float
    staleness: float
    covariance: float

    def __str__(self) -> str:
        return (
            f"{self.total:.4e} = mismatch {self.mismatch:.4e} + staleness {self.staleness:.4e} + 2 x covariance {self.covariance:.4e} "
            f"nats^2 over {self.tokens} tokens"
        )


def split_variance(behavior: Tensor, at_sampling: Tensor, target: Tensor) -> VarianceSplit:
    """The split over a set of sampled tokens. Variances of the set itself: sums are divided by N, not N - 1.

    Args:
        behavior: [N] log mu, as the engine reported it when it sampled (nats).
        at_sampling: [N] log pi_v: the learner, at the weights that sampled the token.
        target: [N] log pi_theta: the learner, at the weights that train on it.
    Raises: ValueError if there are no tokens.
    """
    if not len(behavior):
        raise ValueError("split_variance: no tokens: a variance needs some")
    mismatch, staleness = (later.double() - earlier.double() for earlier, later in ((behavior, at_sampling), (at_sampling, target)))
    total = target.double() - behavior.double()
    mismatch, staleness, total = (x - x.mean() for x in (mismatch, staleness, total))
    means = (float((left * right).mean()) for left, right in ((total, total), (mismatch,) * 2, (staleness,) * 2, (mismatch, staleness)))
    return VarianceSplit(len(behavior), *means)


def split_numbers(behavior: Tensor, at_sampling: Tensor, target: Tensor) -> dict[str, float]:
    """The split by its names in quantities.SPLIT, with the KL of either part; empty without tokens. Args: as split_variance's."""
    if not len(behavior):
        return {}
    split = split_variance(behavior, at_sampling, target)
    return {
        "split_tokens": float(split.tokens),
        "split_total_variance": split.total,
        "split_mismatch_variance": split.mismatch,
        "split_staleness_variance": split.staleness,
        "split_covariance": split.covariance,
        "split_mismatch_k3_kl": _k3(behavior, at_sampling),
        "split_staleness_k3_kl": _k3(at_sampling, target),
    }


def _k3(earlier: Tensor, later: Tensor) -> float:
    x = (later.double() - earlier.double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return float((torch.expm1(x) - x).mean())
