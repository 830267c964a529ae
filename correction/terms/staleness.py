"""How many weight updates lie between sampling a token and training on it, and where they happened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import NO_VERSION, PackedBatch
from .segments import masked


def token_staleness(batch: PackedBatch) -> Tensor:
    """[N] integers, versions, >= 0; 0 for tokens that no weights sampled."""
    age = (batch.learner_version - batch.weight_versions).clamp(min=0)  # PackedBatch.validate refuses newer ones
    return masked(age, batch.weight_versions >= 0)


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """The trained tokens as R spans, in which neither sequence nor weight version changes.

    A trajectory has few of them, since weights and masks change rarely: what depends on the version alone is settled on the
    spans, and what is wanted of the tokens of one age is gathered by index instead of being selected out of all.
    """

    starts: Tensor
    """[R] int64: index of the first token."""
    lengths: Tensor
    """[R] int64: tokens, > 0."""
    sequences: Tensor
    """[R] int64: sequence that the span is part of."""
    versions: Tensor
    """[R] integers: version of the weights that sampled the span; NO_VERSION if none did."""
    staleness: Tensor
    """[R] int64, versions, >= 0."""

    def token_index(self, chosen: Tensor, *, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The chosen spans [R bool] in chunks of about `chunk` tokens: indices [n] int64 of the tokens, rising, and of their spans."""
        numbers = chosen.nonzero().squeeze(1)
        starts, lengths = self.starts[numbers], self.lengths[numbers]
        ends = lengths.cumsum(0)
        if ends.numel() == 0:
            return
        shifts, total = starts - (ends - lengths), int(ends[-1])
        inner = torch.searchsorted(ends, torch.tensor(range(chunk, total, chunk), dtype=torch.int64, device=ends.device))
        edges = sorted({0, ends.numel(), *inner.tolist()})
        bounds = [0, *ends[torch.tensor(edges[1:], device=ends.device) - 1].tolist()]
        for k in range(len(edges) - 1):
            spans, tokens = slice(edges[k], edges[k + 1]), bounds[k + 1] - bounds[k]
            shift = torch.repeat_interleave(shifts[spans], lengths[spans], output_size=tokens)
            yield shift.add_(torch.arange(bounds[k], bounds[k + 1], device=shift.device)), numbers[spans]


def token_spans(batch: PackedBatch, mask: Tensor) -> TokenSpans:
    """The spans of the tokens in the mask [N] bool."""
    versions, tokens = batch.weight_versions, batch.num_tokens
    changes = torch.empty_like(mask)
    changes[:1] = True
    changes[1:] = (versions[1:] ^ versions[:-1]).bool() | (mask[1:] ^ mask[:-1])
    changes[batch.offsets[batch.offsets < tokens]] = True
    bounds = changes.nonzero().squeeze(1)
    lengths = torch.cat([bounds, bounds.new_tensor([tokens])]).diff()
    inside = mask[bounds]
    starts = bounds[inside]
    sampled_by = versions[starts].long()
    return TokenSpans(
        starts=starts,
        lengths=lengths[inside],
        sequences=torch.searchsorted(batch.offsets, starts, right=True) - 1,
        versions=sampled_by,
        staleness=torch.where(sampled_by >= 0, (batch.learner_version - sampled_by).clamp(min=0), 0),
    )


@dataclass(frozen=True, slots=True)
class StalenessCounts:
    """Sampled tokens by staleness; entry k of each tensor is the number of tokens with k updates. Float64, and whole numbers."""

    total: Tensor
    """[K]: updates between sampling a token and this step."""
    in_flight: Tensor
    """[F]: updates between a token and the last token of its sequence, while the sequence was being sampled."""
    in_queue: Tensor
    """[Q]: updates from then to the training step, while the finished sequence waited. in_flight + in_queue = total."""
    sequences: int
    """Sequences with a sampled token."""
    mixed_sequences: int
    """Sequences with tokens of more than one version."""


def count_staleness(spans: TokenSpans, num_sequences: int) -> StalenessCounts | None:
    """The counts; None if there is no sampled token."""
    sampled = spans.versions >= 0
    if not bool(sampled.any()):
        return None
    staleness, sequence, tokens = spans.staleness[sampled], spans.sequences[sampled], spans.lengths[sampled].double()
    missing = torch.full((num_sequences,), torch.iinfo(torch.int64).max, device=staleness.device)
    freshest = missing.scatter_reduce(0, sequence, staleness, "amin")  # a sequence is as fresh as its last token
    in_queue = freshest[sequence]
    is_mixed = torch.zeros_like(missing, dtype=torch.bool)
    versions = spans.versions[sampled]
    newest = torch.full_like(missing, NO_VERSION).scatter_reduce(0, sequence, versions, "amax")
    is_mixed[sequence[versions < newest[sequence]]] = True
    return StalenessCounts(
        total=torch.bincount(staleness, weights=tokens),
        in_flight=torch.bincount(staleness - in_queue, weights=tokens),
        in_queue=torch.bincount(in_queue, weights=tokens),
        sequences=int((freshest < missing).sum()),
        mixed_sequences=int(is_mixed.sum()),
    )
