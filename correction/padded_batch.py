"""A packed batch from a trainer's padded tensors or its lists; what can be seen to be wrong with them is refused here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from .batch import PackedBatch
from .checks import FLOATS
from .errors import DataError
from .padding import pack_like
from .settings.parts import AdvantageConfig
from .terms.advantages import group_advantages

Rows = Sequence[Sequence[Any] | Tensor]
"""One list or tensor for each of S sequences."""


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
    at_sampling_logprobs: Tensor | None = None,
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
        token_ids, behavior_logprobs, proximal_logprobs, at_sampling_logprobs, reference_logprobs, weight_versions, turn_ids: [B, T], the
            value of a token at its own place (frameworks that shift logprobs by one must shift them back). Logprobs are natural, float32
            or float64, <= 0.
        attention_mask: [B, T], true at real tokens; loss_mask: [B, T], true at trained ones, none outside attention_mask.
        advantages: [B], [B, 1] or [B, T]; None if there are rewards. group_ids: [B].
        rewards: [B]; advantages are made of them by the settings in advantages_by (a preset's are `config.advantage`). A group must be
            whole in this batch.
        advantages_by: how the advantages were made. "own" says that they are not the config's, and that this is meant.
        topk_ids, topk_logprobs: [B, T, K] of the sampler. weight_versions: None means that learner_version sampled everything.
    Raises: DataError if shapes differ, the loss mask reaches into the padding, or logprobs are positive or in half precision.
    """
    _check_tensors(token_ids, attention_mask, loss_mask, behavior_logprobs, group_ids)
    real, trained = attention_mask.bool(), loss_mask.bool()
    logprobs = {
        "behavior_logprobs": behavior_logprobs,
        "proximal_logprobs": proximal_logprobs,
        "at_sampling_logprobs": at_sampling_logprobs,
        "reference_logprobs": reference_logprobs,
    }
    tokens = {"token_ids": token_ids, "loss_mask": loss_mask, "weight_versions": weight_versions, "turn_ids": turn_ids, **logprobs}
    _check_shapes(real, tokens, {"topk_ids": topk_ids, "topk_logprobs": topk_logprobs}, group_ids)
    _check_precision(logprobs)
    if bool((trained & ~real).any()):
        raise DataError("from_padded: loss_mask is true at padding. Both masks must have one shape [B, T] and one alignment.")
    by_token = _padded_advantages(advantages, rewards, group_ids, advantages_by, real)
    versions = torch.full(real.shape, learner_version, device=real.device) if weight_versions is None else weight_versions
    batch = PackedBatch(
        token_ids=pack_like(token_ids, real).long(),
        offsets=torch.cat([real.new_zeros(1, dtype=torch.int64), real.sum(1).cumsum(0)]),
        loss_mask=pack_like(trained, real),
        behavior_logprobs=pack_like(behavior_logprobs, real),
        advantages=pack_like(by_token, real).to(behavior_logprobs.dtype),
        weight_versions=pack_like(versions, real),
        group_ids=group_ids.long(),
        learner_version=learner_version,
        temperature=temperature,
        proximal_logprobs=_packed(proximal_logprobs, real),
        at_sampling_logprobs=_packed(at_sampling_logprobs, real),
        reference_logprobs=_packed(reference_logprobs, real),
        turn_ids=_packed(turn_ids, real, torch.int32),
        topk_ids=_packed(topk_ids, real, torch.int64),
        topk_logprobs=_packed(topk_logprobs, real),
        advantages_by=advantages_by,
    ).validate()
    return replace(batch, weight_versions=batch.weight_versions.int())  # after validate: a version that int32 doesn't have would wrap


def _check_tensors(*given: Any) -> None:
    for name, value in zip(("token_ids", "attention_mask", "loss_mask", "behavior_logprobs", "group_ids"), given, strict=True):
        if not isinstance(value, Tensor):
            raise DataError(f"from_padded: {name} is a {type(value).__name__}, not a torch tensor. from_lists takes lists")


def from_lists(
    token_ids: Rows,
    loss_mask: Rows,
    behavior_logprobs: Rows,
    advantages: Rows | Sequence[float] | Tensor | None,
    group_ids: Sequence[int] | Tensor,
    *,
    rewards: Sequence[float] | Tensor | None = None,
    advantages_by: AdvantageConfig | Literal["own"] | None = None,
    proximal_logprobs: Rows | None = None,
    at_sampling_logprobs: Rows | None = None,
    reference_logprobs: Rows | None = None,
    weight_versions: Rows | None = None,
    learner_version: int = 0,
    temperature: float = 1.0,
) -> PackedBatch:
    """The packed batch of ragged lists, one row for each of S sequences, as slime's rollout data are.

    The rows of a sequence have one length n. token_ids may have the prompt before them: its last n are taken, and then the batch, the
    target logprobs as well, is of the responses alone.
    Args:
        token_ids, loss_mask, behavior_logprobs, proximal_logprobs, at_sampling_logprobs, reference_logprobs, weight_versions: S lists or
            1-D tensors (slime's tokens, loss_masks, rollout_log_probs, log_probs, ref_log_probs). None in the place of a logprob: it
            wasn't reported.
        advantages: [S] numbers, or S rows; None if there are rewards. Everything else: as for `from_padded`.
    Raises: DataError if the lengths of a sequence's rows differ, and what `from_padded` raises.
    """
    lengths = [len(row) for row in loss_mask]
    if not lengths:
        raise DataError("from_lists: loss_mask is empty: there is no sequence")

    def padded(name: str, rows: Rows | None, dtype: torch.dtype | None = None) -> Tensor | None:
        return None if rows is None else _padded_rows(name, rows, lengths, dtype)

    values: Any = advantages
    if advantages is not None and not isinstance(advantages, Tensor):
        is_by_token = any(getattr(one, "ndim", isinstance(one, Sequence)) for one in advantages[:1])
        values = _padded_rows("advantages", advantages, lengths) if is_by_token else torch.tensor(advantages)  # type: ignore[arg-type]
    ids = _padded_rows("token_ids", token_ids, lengths, torch.int64)
    return from_padded(
        ids,
        torch.arange(max(lengths), device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None],
        _padded_rows("loss_mask", loss_mask, lengths, torch.bool),
        _padded_rows("behavior_logprobs", behavior_logprobs, lengths),
        values,
        torch.as_tensor(group_ids, device=ids.device),
        rewards=None if rewards is None else torch.as_tensor(rewards, device=ids.device),
        advantages_by=advantages_by,
        proximal_logprobs=padded("proximal_logprobs", proximal_logprobs),
        at_sampling_logprobs=padded("at_sampling_logprobs", at_sampling_logprobs),
        reference_logprobs=padded("reference_logprobs", reference_logprobs),
        weight_versions=padded("weight_versions", weight_versions, torch.int64),
        learner_version=learner_version,
        temperature=temperature,
    )


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


def _padded_rows(name: str, rows: Rows, lengths: list[int], dtype: torch.dtype | None = None) -> Tensor:
    """[S, T]. Raises: DataError naming the sequence."""
    if len(rows) != len(lengths):
        raise DataError(f"from_lists: {name} has {len(rows)} rows for the {len(lengths)} sequences of loss_mask")
    found = []
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(row) != length and not (name == "token_ids" and len(row) > length):
            raise DataError(f"from_lists: {name}[{number}] has {len(row)} values, and loss_mask[{number}] {length}: one for each token")
        own = row if isinstance(row, Tensor) else torch.tensor([math.nan if one is None else one for one in row], dtype=dtype)
        found.append(own[len(own) - length :].to(dtype or own.dtype))
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


def _check_precision(logprobs: dict[str, Tensor | None]) -> None:
    """Raises: DataError for half precision."""
    for name, values in logprobs.items():
        if values is not None and values.dtype not in FLOATS:
            raise DataError(
                f"from_padded: {name} is {values.dtype}, which rounds a logprob of -1 by up to 0.004: as much as the mismatch that is to "
                f"be corrected. Have it computed in float32; {name}.float() accepts the rounding that has happened."
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
        if by.is_by_turn:
            raise DataError("from_padded: advantage.level = turn needs rewards of turns: make advantages with turn_advantages, [B, T].")
        advantages = group_advantages(rewards, group_ids, **by.of_group)
    assert advantages is not None  # one of both is given
    rows = real.shape[0]
    if advantages.shape not in ((rows,), (rows, 1), real.shape):
        raise DataError(f"from_padded: advantages is {tuple(advantages.shape)}; it must be [B], [B, 1] or [B, T] = {tuple(real.shape)}")
    return (advantages[:, None] if advantages.dim() == 1 else advantages).expand(real.shape)
