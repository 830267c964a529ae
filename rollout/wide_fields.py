"""The wide fields of a group (correction/wide.py), taken out of the group and put back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.wide import WideFields, route_keys
from evenkeel.rollout.trajectory import Group, KeptTokens, RoutedExperts, TopLogprobs, Trajectory

_DTYPES = {"i": torch.int32, "f": torch.float32, "B": torch.uint8, "h": torch.int16}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def tensor_of(row: array[Any]) -> Tensor:
    """A tensor that shares the array's memory."""
    return torch.frombuffer(row, dtype=_DTYPES[row.typecode]) if row else torch.zeros(0, dtype=_DTYPES[row.typecode])


def fields_of(one: Trajectory) -> WideFields | None:
    """The wide fields of a sequence, as tensors that share its memory; None if it has none."""
    top, routes, sets = one.top_logprobs, one.routed_experts, one.kept_tokens
    if top is None and routes is None and sets is None:
        return None
    return WideFields(
        routed_experts=None if routes is None else tensor_of(routes.ids).view(-1, routes.layers, routes.k),
        topk_ids=None if top is None else tensor_of(top.ids).view(-1, top.k),
        topk_logprobs=None if top is None else tensor_of(top.logprobs).view(-1, top.k),
        kept_counts=None if sets is None else tensor_of(sets.counts),
        kept_ids=None if sets is None else tensor_of(sets.ids),
    )


def has_wide_fields(group: Group) -> bool:
    return any(fields_of(one) is not None for one in group.sequences)


def split_wide_fields(group: Group) -> tuple[Group, tuple[WideFields, ...]]:
    """The group without its wide fields, and the wide fields of each of its sequences."""
    fields = tuple(fields_of(one) or WideFields() for one in group.sequences)
    return group.with_sequences(map(_without, group.sequences, fields)), fields


def _without(one: Trajectory, fields: WideFields) -> Trajectory:
    routes = fields.routed_experts
    keys = None if routes is None else route_keys(routes[: len(one.prompt_ids)])
    return replace(one, top_logprobs=None, routed_experts=None, kept_tokens=None, route_keys=keys)


def join_wide_fields(group: Group, fields: Sequence[WideFields]) -> Group:
    """Undo split_wide_fields: the group with the wide fields of each sequence put back."""
    return group.with_sequences(map(_with, group.sequences, fields))


def _with(one: Trajectory, fields: WideFields) -> Trajectory:
    top = routes = sets = None
    if fields.topk_ids is not None and fields.topk_logprobs is not None:
        top = TopLogprobs(fields.topk_ids.shape[1], _array_of(fields.topk_ids), _array_of(fields.topk_logprobs))
    if fields.routed_experts is not None:
        _, layers, k = fields.routed_experts.shape
        routes = RoutedExperts(layers, k, _array_of(fields.routed_experts))
    if fields.kept_counts is not None and fields.kept_ids is not None:
        sets = KeptTokens(_array_of(fields.kept_counts), _array_of(fields.kept_ids))
    return replace(one, top_logprobs=top, routed_experts=routes, kept_tokens=sets, route_keys=None)


def _array_of(values: Tensor) -> array[Any]:
    return array(_CODES[values.dtype], values.contiguous().numpy().tobytes())
