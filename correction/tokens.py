"""The loss as coefficients of the tokens, for trainers that have a backward pass of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import CorrectedBatch
from .config import CorrectionConfig
from .errors import ConfigError
from .loss import PolicyLoss, policy_loss


def token_coefficients(
    corrected: CorrectedBatch,
    target_logprobs: Tensor,
    config: CorrectionConfig,
    *,
    target_topk_logprobs: Tensor | None = None,
) -> tuple[Tensor, PolicyLoss]:
    """What each token's logprob is multiplied with in the gradient: d loss / d log pi_theta.

    `(coefficients * target_logprobs).sum().backward()` has the gradient of `policy_loss(...).loss.backward()`, with the coefficients as
    plain numbers: for fused kernels, and for tests.
    Args:
        target_logprobs: [N]; a gradient that they carry is not followed.
    Returns: [N] coefficients, and the loss that they are of.
    Raises: ConfigError if there is an entropy bonus, whose gradient doesn't go through these logprobs; what `policy_loss` raises.
    """
    if config.entropy_coefficient > 0:
        raise ConfigError(
            "token_coefficients: an entropy bonus has a gradient of its own, which coefficients of logprobs can't carry. "
            "Set entropy_coefficient: 0 and add your own."
        )
    leaf = target_logprobs.detach().requires_grad_()
    with torch.enable_grad():
        result = policy_loss(corrected, leaf, config, target_topk_logprobs=target_topk_logprobs)
        (coefficients,) = torch.autograd.grad(result.loss, leaf, retain_graph=True)
    return coefficients, result
