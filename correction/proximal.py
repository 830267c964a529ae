"""The proximal policy, the anchor of the trust region: a choice of three."""

from __future__ import annotations

import torch
from torch import Tensor

from correction.choices import ProximalSource as ProximalSource


def interpolated_logprobs(behavior: Tensor, target: Tensor, staleness: Tensor) -> Tensor:
    """Log-linear interpolation: log prox = alpha log mu + (1 - alpha) log theta, alpha = 1 / staleness.

    At staleness 1 the proximal policy is mu, at 2 it lies half-way, so that rho = r = sqrt(q). At staleness 0 it is mu, as in
    AReaL; the other reading gives theta (decision C11).
    Args:
        behavior, target: [N] logprobs; target is detached here.
        staleness: [N] int64, versions, >= 0.
    Source: A-3PO (arXiv 2512.06547); AReaL's prox_logp_method = loglinear.
    """
    alpha = 1 / staleness.clamp(min=1)
    mixed = alpha * behavior + (1 - alpha) * target.detach()
    return torch.where(staleness > 1, mixed, behavior).to(behavior.dtype)
