"""Wide fields: those of a batch with many values a token (routed experts, the sampler's K likeliest tokens).

They are ten times what all others take, and only the forward passes of the learner look at them. So a batch may do without them and say for
each of its sequences where they are; a learner's rank then fetches those of the sequences that it computes with.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class WideFields:
    """Wide fields of one sequence with n tokens, m of them in the loss mask; None where there are none."""

    routed_experts: Tensor | None = None
    """[n - 1, layers, k]: as PackedBatch's, without the last token."""
    topk_ids: Tensor | None = None
    """[m, K] int32."""
    topk_logprobs: Tensor | None = None
    """[m, K] float32."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.routed_experts, self.topk_ids, self.topk_logprobs) if one is not None)

    def __or__(self, other: WideFields) -> WideFields:
        """Both; the other's where each has a field."""
        routes = self.routed_experts if other.routed_experts is None else other.routed_experts
        if other.topk_ids is None:
            return WideFields(routes, self.topk_ids, self.topk_logprobs)
        return WideFields(routes, other.topk_ids, other.topk_logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class WidePlace:
    """Where the wide fields of one sequence are."""

    sources: tuple[tuple[Any, int], ...]
    """The WideFields of several sequences, or a reference to them; and which of them are its own."""
    route_keys: array[int] | None = None
    """For each token before the first trained one a number that stands for its routed experts: where prompts were routed alike is known
    without them. None: there are no routed experts."""

    @property
    def references(self) -> list[Any]:
        return [held for held, _ in self.sources]

    def holding(self, read: Mapping[Any, Any]) -> WidePlace:
        """With what was read in the place of references. Args: read: by reference; those that aren't in it stay."""
        return WidePlace(tuple((read.get(held, held), number) for held, number in self.sources), self.route_keys)

    def fields(self) -> WideFields:
        """Raises: DataError for what was not read."""
        found = WideFields()
        for held, number in self.sources:
            if not isinstance(held, Sequence) or isinstance(held, str):
                raise DataError(f"wide fields of a sequence were not read: there is a {type(held).__name__} in their place")
            found |= held[number]
        return found

    def __or__(self, other: WidePlace) -> WidePlace:
        """Both; routed experts are those of one of them."""
        return WidePlace(self.sources + other.sources, self.route_keys if other.route_keys is None else other.route_keys)


def route_keys(routed_experts: Tensor) -> array[int]:
    """Keys of tokens, from [n, layers, k]. Equal keys of unequal experts (one in four thousand millions) only make another plan of who
    reads what: what is read is decided by the experts themselves."""
    return array("I", (zlib.crc32(row) for row in routed_experts.contiguous().numpy()))


def routed_experts_of(found: Sequence[WideFields], lengths: Sequence[int]) -> Tensor | None:
    """[N, layers, k] uint8 or int16, of sequences of these lengths; None where there are none. At the last token of a sequence, which has
    none: 0 to k - 1.

    Raises: DataError if only some sequences have them, or they don't fit the tokens.
    """
    routes = [fields.routed_experts for fields in found if fields.routed_experts is not None]
    if (shape := _shape_of(routes, found, lengths)) is None:
        return None
    layers, k, dtype = shape
    nowhere = torch.arange(k, dtype=dtype).expand(1, layers, k)
    return torch.cat([piece for one in routes for piece in (one, nowhere)])


def _shape_of(routes: Sequence[Tensor], found: Sequence[WideFields], lengths: Sequence[int]) -> tuple[int, int, torch.dtype] | None:
    if not routes:
        return None
    shapes = {(*one.shape[1:], one.dtype) for one in routes}
    if [len(one) for one in routes] != [length - 1 for length in lengths] or len(shapes) > 1:
        raise DataError(
            f"{len(routes)} of {len(found)} trajectories have routed experts, of (layers, k, type) {sorted(map(str, shapes))}: they must "
            "be there for every token but the last of all trajectories of a batch, or of none, from one model"
        )
    return shapes.pop()


def topk_of(found: Sequence[WideFields], mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Ids [N, K] int64 and logprobs [N, K] of the most likely tokens, 0 outside the loss mask; None where there are none.

    Raises: DataError if only some sequences have them, K differs, or they don't fit the mask.
    """
    listed = [fields.topk_ids for fields in found if fields.topk_ids is not None]
    logprobs = [fields.topk_logprobs for fields in found if fields.topk_logprobs is not None]
    if (k := _k_of(listed, found, int(mask.sum()))) is None:
        return None, None
    all_ids, all_logprobs = torch.zeros(len(mask), k, dtype=torch.int64), torch.zeros(len(mask), k, dtype=torch.float32)
    all_ids[mask], all_logprobs[mask] = torch.cat(listed).long(), torch.cat(logprobs)
    return all_ids, all_logprobs


def _k_of(listed: Sequence[Tensor], found: Sequence[WideFields], tokens: int) -> int | None:
    if not listed:
        return None
    sizes = {ids.shape[1] for ids in listed}
    if len(listed) < len(found) or len(sizes) > 1 or sum(map(len, listed)) != tokens:
        raise DataError(
            f"{len(listed)} of {len(found)} trajectories have top-K logprobs, with K of {sorted(sizes)}: "
            "they must be there for every response token of all trajectories of a batch, or of none, with one K"
        )
    return sizes.pop()


def check_fields(found: Sequence[WideFields], lengths: Sequence[int], mask: Tensor) -> None:
    """Raises: DataError as the two above, without their work."""
    _shape_of([fields.routed_experts for fields in found if fields.routed_experts is not None], found, lengths)
    _k_of([fields.topk_ids for fields in found if fields.topk_ids is not None], found, int(mask.sum()))
