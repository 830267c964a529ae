"""The wide fields of a group (correction/wide.py), taken out of the group and put back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.wide import WideFields, route_keys
from evenkeel.rollout.trajectory import Group, RoutedExperts, TopLogprobs, Trajectory

_DTYPES = {"i": torch.int32, "f": torch.float32, "B": torch.uint8, "h": torch.int16}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def tensor_of(row: array[Any]) -> Tensor:
    """A tensor that shares the array's memory."""
    return torch.frombuffer(row, dtype=_DTYPES[row.typecode]) if row else torch.zeros(0, dtype=_DTYPES[row.typecode])


def fields_of(one: Trajectory) -> WideFields | None:
    """The wide fields of a trajectory, as tensors that share its memory; None if it has none."""
    top, routes = one.top_logprobs, one.routed_experts
    if top is None and routes is None:
        return None
    return WideFields(
        routed_experts=None if routes is None else tensor_of(routes.ids).view(-1, routes.layers, routes.k),
        topk_ids=None if top is None else tensor_of(top.ids).view(-1, top.k),
        topk_logprobs=None if top is None else tensor_of(top.logprobs).view(-1, top.k),
    )


def has_wide_fields(group: Group) -> bool:
    return any(one.top_logprobs is not None or one.routed_experts is not None for one in group.trajectories)


def split_wide_fields(group: Group) -> tuple[Group, tuple[WideFields, ...]]:
    """The group without its wide fields, and the wide fields of each of its trajectories."""
    fields = tuple(fields_of(one) or WideFields() for one in group.trajectories)
    return replace(group, trajectories=tuple(map(_without, group.trajectories, fields))), fields


def _without(one: Trajectory, fields: WideFields) -> Trajectory:
    routes = fields.routed_experts
    keys = None if routes is None else route_keys(routes[: len(one.prompt_ids)])
    return replace(one, top_logprobs=None, routed_experts=None, route_keys=keys)


def join_wide_fields(group: Group, fields: Sequence[WideFields]) -> Group:
    """Undo split_wide_fields: the group with the wide fields of each trajectory put back."""
    return replace(group, trajectories=tuple(map(_with, group.trajectories, fields)))


def _with(one: Trajectory, fields: WideFields) -> Trajectory:
    top = routes = None
    if fields.topk_ids is not None and fields.topk_logprobs is not None:
        top = TopLogprobs(fields.topk_ids.shape[1], _array_of(fields.topk_ids), _array_of(fields.topk_logprobs))
    if fields.routed_experts is not None:
        _, layers, k = fields.routed_experts.shape
        routes = RoutedExperts(layers, k, _array_of(fields.routed_experts))
    return replace(one, top_logprobs=top, routed_experts=routes, route_keys=None)


def _array_of(values: Tensor) -> array[Any]:
    return array(_CODES[values.dtype], values.contiguous().numpy().tobytes())
