"""How much of the variance of log(pi_theta / mu) is mismatch of the engines, and how much staleness.

With pi_v the learner's policy at the weights that sampled a token, log(pi_theta / mu) = log(pi_v / mu) + log(pi_theta / pi_v). The first is
mismatch: one set of weights in two engines. The second is staleness: two sets of weights in one engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
