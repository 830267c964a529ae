"""A batch taken apart into runs of whole sequences, as views: no tensor is copied.

Nearly all of the correction is settled inside a sequence, and what is global is a sum. Going part by part keeps what lies between the
steps in the processor's cache, and its memory from growing with the batch. An accelerator takes the batch as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from correction.batch import CorrectedBatch, PackedBatch

CPU_TOKENS = 2**19
"""Tokens of a part on a CPU, more or less: smaller parts cost more in calls than they save in cache misses."""
_PER_SEQUENCE = ("offsets", "group_ids")


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences first to last, exclusive, of a batch."""

    sequences: slice
    tokens: slice

    def of_batch(self, batch: PackedBatch) -> PackedBatch:
        """The part's own batch, its offsets counted from its first token."""
        changes: dict[str, Tensor] = {}
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor) and field.name not in _PER_SEQUENCE:
                changes[field.name] = value[self.tokens]
        bounds = batch.offsets[self.sequences.start : self.sequences.stop + 1]
        changes |= {"offsets": bounds - self.tokens.start, "group_ids": batch.group_ids[self.sequences]}
        return replace(batch, **changes)  # type: ignore[arg-type]

    def of_corrected(self, corrected: CorrectedBatch) -> CorrectedBatch:
        """The same of a corrected batch."""
        return replace(
            corrected,
            batch=self.of_batch(corrected.batch),
            importance_weights=corrected.importance_weights[self.tokens],
            keep_mask=corrected.keep_mask[self.tokens],
            token_scale=corrected.token_scale[self.tokens],
        )

    def of_tokens(self, values: Tensor | None) -> Tensor | None:
        """The part's share of per-token values [N]."""
        return None if values is None else values[self.tokens]


def parts(batch: PackedBatch, *, is_divisible: bool = True) -> Iterator[Part]:
    """The parts of a batch, at least one, in order.

    Args:
        is_divisible: False gives the batch as one part, for what looks at all tokens together.
    """
    inner: list[int] = []
    if is_divisible and batch.offsets.device.type == "cpu" and batch.num_tokens > CPU_TOKENS:
        wanted = torch.arange(CPU_TOKENS, batch.num_tokens, CPU_TOKENS)
        inner = sorted(set(torch.searchsorted(batch.offsets, wanted).tolist()) - {0, batch.num_sequences})
    edges = [0, *inner, batch.num_sequences]
    tokens = batch.offsets[torch.tensor(edges, device=batch.offsets.device)].tolist()
    for k in range(len(edges) - 1):
        yield Part(slice(edges[k], edges[k + 1]), slice(tokens[k], tokens[k + 1]))
