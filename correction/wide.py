"""Wide fields: those of a batch with many values a token (routed experts, the sampler's K likeliest tokens, its kept sets).

They take ten times the bytes of all other fields, and only the learner's forward passes read them. So a batch may hold references to them
instead, for each of its sequences; a rank of the learner then fetches the fields of the sequences that it computes.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
    kept_counts: Tensor | None = None
    """[m] int32: tokens in the kept set of each; 0: it was drawn from the whole vocabulary."""
    kept_ids: Tensor | None = None
    """[sum of kept_counts] int32: the kept sets, one after the other."""

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self._values().values())

    def _values(self) -> dict[str, Tensor]:
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    def __or__(self, other: WideFields) -> WideFields:
        """The fields of both; the other's where both have a field."""
        return replace(self, **other._values())


@dataclass(frozen=True, slots=True, eq=False)
class WidePlace:
    """Where the wide fields of one sequence are."""

    sources: tuple[tuple[Any, int], ...]
    """Pairs: the WideFields of several sequences, or a reference to them; and the index of this sequence among them."""
    route_keys: array[int] | None = None
    """For each token before the first trained one, a number that stands for its routed experts: it tells, without reading them, which
    prompts were routed alike. None: there are no routed experts."""
    has_routes: bool = True
    """False: its routed experts, if it has some, are not to be replayed."""

    @property
    def references(self) -> list[Any]:
        return [held for held, _ in self.sources]

    def holding(self, read: Mapping[Any, Any]) -> WidePlace:
        """A copy whose references are replaced by what was read. Args: read: by reference; references that are not in it stay."""
        return replace(self, sources=tuple((read.get(held, held), number) for held, number in self.sources))

    def fields(self) -> WideFields:
        """The fields of the sequence, from all sources. Raises: DataError if a source was not read."""
        found = WideFields()
        for held, number in self.sources:
            if not isinstance(held, Sequence) or isinstance(held, str):
                raise DataError(f"wide fields of a sequence were not read: there is a {type(held).__name__} in their place")
            found |= held[number]
        return found if self.has_routes else replace(found, routed_experts=None)

    def __or__(self, other: WidePlace) -> WidePlace:
        """The sources of both; the other's routed experts where both have some."""
        keys = self.route_keys if other.route_keys is None else other.route_keys
        return replace(self, sources=self.sources + other.sources, route_keys=keys)


def route_keys(routed_experts: Tensor) -> array[int]:
    """A key for each token, from [n, layers, k]. Different experts have equal keys in one of four thousand million cases. That only changes
    the plan of who reads what: what is read is decided by the experts themselves."""
    return array("I", (zlib.crc32(row) for row in routed_experts.contiguous().numpy()))


def routed_experts_of(found: Sequence[WideFields], lengths: Sequence[int]) -> Tensor | None:
    """[N, layers, k] uint8 or int16, for sequences of these lengths; None where there are none. The last token of a sequence has no routed
    experts and gets 0 to k - 1.

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


def kept_of(found: Sequence[WideFields], mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Counts [N] int32, 0 outside the loss mask, and ids [sum] int32 of the kept sets; None where there are none.

    Raises: DataError if only some sequences have them, or they don't fit the mask.
    """
    counts = [fields.kept_counts for fields in found if fields.kept_counts is not None]
    ids = [fields.kept_ids for fields in found if fields.kept_ids is not None]
    if not _check_kept(counts, ids, found, int(mask.sum())):
        return None, None
    of_all = torch.zeros(len(mask), dtype=torch.int32)
    of_all[mask] = torch.cat(counts)
    return of_all, torch.cat(ids)


def _check_kept(counts: Sequence[Tensor], ids: Sequence[Tensor], found: Sequence[WideFields], tokens: int) -> bool:
    """Whether there are kept sets."""
    if not counts:
        return False
    sizes = [int(one.sum()) for one in counts]
    if len(counts) < len(found) or sum(map(len, counts)) != tokens or sizes != list(map(len, ids)):
        raise DataError(
            f"{len(counts)} of {len(found)} trajectories have kept sets, {sum(map(len, counts))} for {tokens} trained tokens, with "
            f"{sum(map(len, ids))} ids instead of {sum(sizes)}: they must be there for every response token of all trajectories of a "
            "batch, or of none"
        )
    return True


def kept_rows(counts: Tensor, ids: Tensor, index: Tensor) -> Tensor:
    """The ids of the kept sets of some tokens, one set after the other.

    Args:
        counts: [N] of all tokens; ids: [sum of counts]; index: [n] int64, the tokens in the order wanted.
    """
    sizes = counts.long()
    first = (sizes.cumsum(0) - sizes)[index]
    wanted = sizes[index]
    place = torch.arange(int(wanted.sum()), device=ids.device)
    return ids[place + torch.repeat_interleave(first - (wanted.cumsum(0) - wanted), wanted)]


def check_fields(found: Sequence[WideFields], lengths: Sequence[int], mask: Tensor) -> None:
    """Check as the functions above, without building their tensors. Raises: DataError as they do."""
    _shape_of([fields.routed_experts for fields in found if fields.routed_experts is not None], found, lengths)
    _k_of([fields.topk_ids for fields in found if fields.topk_ids is not None], found, int(mask.sum()))
    counts = [fields.kept_counts for fields in found if fields.kept_counts is not None]
    ids = [fields.kept_ids for fields in found if fields.kept_ids is not None]
    _check_kept(counts, ids, found, int(mask.sum()))
