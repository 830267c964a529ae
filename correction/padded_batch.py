"""A packed batch from a trainer's padded tensors; what can be seen to be wrong with them is refused here."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .batch import PackedBatch
from .errors import DataError
from .padding import pack_like
from .settings.parts import AdvantageConfig
from .terms.advantages import group_advantages

LARGEST_LOGPROB = 1e-4
"""Nats: what a softmax in float32 may be over 0 by rounding, and far less than what a wrong sign or a logit is."""


def from_padded(
    token_ids: Tensor,
    attention_mask: Tensor,
    loss_mask: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor | None,
    group_ids: Tensor,
    *,
    rewards: Tensor | None = None,
    advantages_by: AdvantageConfig | Literal["own"] | None = None,
    proximal_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_logprobs: Tensor | None = None,
    weight_versions: Tensor | None = None,
    turn_ids: Tensor | None = None,
    learner_version: int = 0,
    temperature: float = 1.0,
) -> PackedBatch:
    """The packed batch of padded tensors, of whole sequences or of responses alone; what is in the padding plays no part.

    Args:
        token_ids, behavior_logprobs, proximal_logprobs, reference_logprobs, weight_versions, turn_ids: [B, T], the value of a token at
            its own place (frameworks that shift logprobs by one must shift them back). Logprobs are natural, float32 or float64, <= 0.
        attention_mask: [B, T], true at real tokens; loss_mask: [B, T], true at trained ones, none outside attention_mask.
        advantages: [B], [B, 1] or [B, T]; None if there are rewards. group_ids: [B].
        rewards: [B]; advantages are made of them by the settings in advantages_by (a preset's are `config.advantage`). A group must be
            whole in this batch.
        advantages_by: how the advantages were made. "own" says that they are not the config's, and that this is meant.
        topk_ids, topk_logprobs: [B, T, K] of the sampler. weight_versions: None means that learner_version sampled everything.
    Raises: DataError if shapes differ, the loss mask reaches into the padding, or logprobs are positive or in half precision.
    """
    real, trained = attention_mask.bool(), loss_mask.bool()
    logprobs = {"behavior_logprobs": behavior_logprobs, "proximal_logprobs": proximal_logprobs, "reference_logprobs": reference_logprobs}
    tokens = {"token_ids": token_ids, "loss_mask": loss_mask, "weight_versions": weight_versions, "turn_ids": turn_ids, **logprobs}
    _check_shapes(real, tokens, {"topk_ids": topk_ids, "topk_logprobs": topk_logprobs}, group_ids)
    if bool((trained & ~real).any()):
        raise DataError("from_padded: loss_mask is true at padding. Both masks must have one shape [B, T] and one alignment.")
    for name, values in logprobs.items():
        _check_logprobs(name, values, trained)
    by_token = _padded_advantages(advantages, rewards, group_ids, advantages_by, real)
    versions = torch.full_like(token_ids, learner_version) if weight_versions is None else weight_versions
    return PackedBatch(
        token_ids=pack_like(token_ids, real).long(),
        offsets=torch.cat([real.new_zeros(1, dtype=torch.int64), real.sum(1).cumsum(0)]),
        loss_mask=pack_like(trained, real),
        behavior_logprobs=pack_like(behavior_logprobs, real),
        advantages=pack_like(by_token, real).to(behavior_logprobs.dtype),
        weight_versions=pack_like(versions, real).int(),
        group_ids=group_ids.long(),
        learner_version=learner_version,
        temperature=temperature,
        proximal_logprobs=_packed(proximal_logprobs, real),
        reference_logprobs=_packed(reference_logprobs, real),
        turn_ids=_packed(turn_ids, real, torch.int32),
        topk_ids=_packed(topk_ids, real, torch.int64),
        topk_logprobs=_packed(topk_logprobs, real),
        advantages_by=advantages_by,
    ).validate()


def _packed(values: Tensor | None, real: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if values is None else pack_like(values, real).to(dtype or values.dtype)


def _check_shapes(real: Tensor, tokens: dict[str, Tensor | None], listed: dict[str, Tensor | None], group_ids: Tensor) -> None:
    """tokens: each [B, T] as real is; listed: each [B, T, K]; group_ids: [B]."""
    wanted = f"[B, T] = {tuple(real.shape)}"
    for name, value in tokens.items():
        if value is not None and value.shape != real.shape:
            raise DataError(f"from_padded: {name} is {tuple(value.shape)}; every token tensor must be {wanted}")
    for name, value in listed.items():
        if value is not None and (value.dim() != 3 or value.shape[:2] != real.shape):
            raise DataError(f"from_padded: {name} is {tuple(value.shape)}; it must be [B, T, K] with {wanted}")
    if group_ids.shape != real.shape[:1]:
        raise DataError(f"from_padded: group_ids is {tuple(group_ids.shape)}; it must be [B] = {tuple(real.shape[:1])}")


def _check_logprobs(name: str, values: Tensor | None, trained: Tensor) -> None:
    """values, trained: [B, T]. Raises: DataError for half precision, and for a positive value of a trained token."""
    if values is None:
        return
    if values.dtype not in (torch.float32, torch.float64):
        raise DataError(
            f"from_padded: {name} is {values.dtype}, which rounds a logprob of -1 by up to 0.004: as much as the mismatch that is to be "
            f"corrected. Have it computed in float32; {name}.float() accepts the rounding that has happened."
        )
    largest = torch.where(trained & values.isfinite(), values, -1.0).amax() if values.numel() else values.new_tensor(-1.0)
    if float(largest) > LARGEST_LOGPROB:
        raise DataError(
            f"from_padded: {name} has {float(largest):.4g} at a trained token, and no logprob is positive. Give log p, not -log p "
            f"or a logit; {name}.clamp(max=0) accepts what is over 0 by rounding."
        )


def _padded_advantages(
    advantages: Tensor | None, rewards: Tensor | None, group_ids: Tensor, by: AdvantageConfig | Literal["own"] | None, real: Tensor
) -> Tensor:
    """[B, T] advantages, as given or made of rewards."""
    if (advantages is None) == (rewards is None):
        raise DataError("from_padded: give either advantages or rewards, and None for the other one.")
    if rewards is not None:
        if not isinstance(by, AdvantageConfig):
            raise DataError("from_padded: rewards need advantages_by, the settings to make advantages of them with: config.advantage.")
        advantages = group_advantages(rewards, group_ids, estimator=by.estimator, ddof=by.ddof, epsilon=by.epsilon)
    assert advantages is not None  # one of both is given
    rows = real.shape[0]
    if advantages.shape not in ((rows,), (rows, 1), real.shape):
        raise DataError(f"from_padded: advantages is {tuple(advantages.shape)}; it must be [B], [B, 1] or [B, T] = {tuple(real.shape)}")
    return (advantages[:, None] if advantages.dim() == 1 else advantages).expand(real.shape)
