"""Ratios of two policies at the sampled token, in log space, and their value at a level.

Three ratios, each written numerator over denominator:  rho = proximal / behaviour (mismatch and staleness),
r = target / proximal (drift),  q = target / behaviour = rho * r.  The proximal policy, the anchor of the trust region, is a choice of
three. With a fourth policy, the learner's at the weights that sampled a token, rho is told apart: mismatch = at_sampling / behaviour,
staleness = proximal / at_sampling (arXiv 2605.12070). Not here: what is done with the ratios.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..settings.choices import Level, Ratio
from .segments import Segments, masked

LOG_RATIO_LIMIT = 20.0
"""Log ratios are cut to +-20 after they have been summed and before exp, as verl and Miles do: e^20 = 4.9e8 stays finite squared."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprobs of the sampled tokens under each policy, detached; None where a policy is not known at this point."""

    behavior: Tensor
    """[N] log mu."""
    proximal: Tensor | None
    """[N] log pi_prox."""
    target: Tensor | None
    """[N] log pi_theta."""
    at_sampling: Tensor | None = None
    """[N] log pi_v: the learner's at the weights that sampled the token."""

    def pair(self, ratio: Ratio) -> tuple[Tensor, Tensor]:
        """(numerator, denominator) of a ratio.

        Raises: ValueError if one of the two is not known yet; the caller has mistaken a late part for an early one.
        """
        numerator, denominator = (getattr(self, policy) for policy in ratio.policies)
        if numerator is None or denominator is None:
            raise ValueError(f"ratio {ratio.value} needs a policy that is only known inside the training forward")
        return numerator, denominator

    def log_ratio(self, ratio: Ratio, mask: Tensor) -> Tensor:
        """[N] log of a ratio; 0 outside the mask, whatever stands there."""
        numerator, denominator = self.pair(ratio)
        return masked(numerator - denominator, mask)


def aggregate_log_ratio(log_ratio: Tensor, mask: Tensor, segments: Segments, *, level: Level) -> Tensor:
    """The log ratio of each unit of a level, before any cut.

    token: itself; turn, sequence: the sum; geometric: the mean over the tokens in mask.
    Args:
        log_ratio: [N] nats, 0 outside the mask.
        mask: [N] bool.
        segments: the units of the level.
    Returns: [U] in the dtype of log_ratio.
    """
    if level is Level.TOKEN:
        return log_ratio
    if level is Level.GEOMETRIC:
        return segments.mean(log_ratio, mask).to(log_ratio.dtype)
    return segments.sum(log_ratio).to(log_ratio.dtype)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp after the cut to +-LOG_RATIO_LIMIT: never infinite, never zero."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def interpolated_logprobs(behavior: Tensor, target: Tensor, staleness: Tensor) -> Tensor:
    """Log-linear interpolation: log prox = alpha log mu + (1 - alpha) log theta, alpha = 1 / staleness.

    At staleness 1 the proximal policy is mu, at 2 it lies half-way, so that rho = r = sqrt(q). At staleness 0 it is mu, as in
    AReaL; the other reading gives theta.
    Args:
        behavior, target: [N] logprobs; target is detached here.
        staleness: [N] int64, versions, >= 0.
    Source: A-3PO (arXiv 2512.06547); AReaL's prox_logp_method = loglinear.
    """
    alpha = 1 / staleness.clamp(min=1).to(behavior.dtype)
    mixed = alpha * behavior + (1 - alpha) * target.detach()
    return torch.where(staleness > 1, mixed, behavior).to(behavior.dtype)
