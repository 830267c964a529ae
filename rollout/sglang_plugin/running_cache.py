"""Keys and values of the running batch, one padded row a sequence, kept from one decode step to the next, for the batch-invariant
attention.

The engine's paged cache stays the original, and SGLang writes to it at every step as usual. While the batch is that of the step before,
each sequence one token longer, only that token is added to the padded copy; otherwise the copy is gathered anew. Torch only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_ROOM = 8
"""Tokens that a new copy has room for at least beyond its longest sequence, and a quarter of that sequence: it is made anew that often at
most. All of it is copied and none of it read, and short answers end so often that a copy serves a few steps only."""
LARGEST_BYTES = 1 << 30
"""Bytes of the copies of all layers; beyond it each step gathers them into one layer's memory. A nano model's take some tens of MB."""


def gather(buffer: Tensor, slots: Tensor) -> Tensor:
    """buffer[slots]: [*slots.shape, G, D] for a buffer [cache size, G, D]; index_select copies whole rows, on a CPU seven times as fast."""
    return torch.index_select(buffer.flatten(1), 0, slots.flatten()).view(*slots.shape, *buffer.shape[1:])


class RunningCache:
    """Life: forget -> (begin_step -> `extended` for each layer's keys and values) for each decode step.

    B sequences, L longest of them, C >= L tokens that there is room for, G key heads, D head size.
    """

    def __init__(self, layers: int, multiple: int, dtype: torch.dtype) -> None:
        """
        Args:
            multiple: L is rounded up to a multiple of it.
            dtype: of the copy.
        """
        self._layers, self._multiple, self.dtype = layers, multiple, dtype
        # [B], of the last step; None when the next one can't go on from it.
        self._requests: Tensor | None = None
        # [B], with the token of this step.
        self._lengths = torch.empty(0)
        # [B, C], in the paged cache; padding repeats the sequence's first.
        self._slots = torch.empty(0)
        # Tokens of the longest sequence, rounded up.
        self._longest = 0
        self._capacity = 0
        self._is_append = False
        self._memory: dict[tuple[str, int], Tensor] = {}

    def forget(self) -> None:
        """Something else than a decode step came between: the next one gathers."""
        self._requests = None

    def begin_step(self, requests: Tensor, lengths: Tensor, req_to_token: Tensor) -> None:
        """Decide whether this step goes on from the one before.

        Args:
            requests: [B], rows of req_to_token.
            lengths: [B], with the token of this step.
            req_to_token: [requests, positions] int32, the slot of each position in the paged cache.
        """
        self._longest = self._rounded(int(lengths.max()))
        self._is_append = (
            self._requests is not None
            and self._longest <= self._capacity
            and torch.equal(requests, self._requests)
            and torch.equal(lengths, self._lengths + 1)
        )
        self._requests, self._lengths = requests.clone(), lengths.clone()
        self._rows = torch.arange(len(lengths), device=lengths.device)
        if not self._is_append:
            self._capacity = self._rounded(min(self._longest + max(LEAST_ROOM, self._longest // 4), req_to_token.shape[1]))
            positions = torch.arange(self._capacity, device=lengths.device)
            slots = req_to_token[requests[:, None], positions.clamp(max=req_to_token.shape[1] - 1)]
            self._slots = torch.where(positions < lengths[:, None], slots, slots[:, :1])

    def _rounded(self, length: int) -> int:
        return -(-length // self._multiple) * self._multiple

    def extended(self, kind: str, layer: int, new: Tensor, buffer: Tensor) -> Tensor:
        """One layer's keys or values of all sequences, this step's token included; valid until the next call for this layer and kind.

        Args:
            kind: "keys" or "values".
            new: [B, G, D], of this step's token, which is in the paged cache already.
            buffer: [cache size, G, D], the paged cache.
        Returns: [B, G, L, D]; what lies beyond a sequence's length is finite, and of no meaning.
        """
        if self._is_kept(buffer):
            padded = self._room(kind, layer, self._capacity, buffer)
            if self._is_append:
                padded[self._rows, :, self._lengths - 1] = new.to(padded.dtype)
            else:
                self._fill(padded, buffer)
        else:
            padded = self._room(kind, 0, self._longest, buffer)
            self._fill(padded, buffer)
        return padded[:, :, : self._longest]

    def _fill(self, padded: Tensor, buffer: Tensor) -> None:
        """Copy from the paged cache, a key head's row at a time: each head's keys then lie together, which the attention reads fastest."""
        groups, size = buffer.shape[1:]
        heads = torch.arange(groups, device=buffer.device, dtype=self._slots.dtype)[None, :, None]
        rows = self._slots[:, None, : padded.shape[2]] * groups + heads  # [B, G, tokens]
        if padded.dtype == buffer.dtype:
            torch.index_select(buffer.view(-1, size), 0, rows.flatten(), out=padded.view(-1, size))
        else:
            padded.copy_(torch.index_select(buffer.view(-1, size), 0, rows.flatten()).view(padded.shape))

    def _is_kept(self, buffer: Tensor) -> bool:
        """Whether the copies of all layers fit into LARGEST_BYTES."""
        row_bytes = buffer[0].numel() * self.dtype.itemsize
        fits = 2 * self._layers * len(self._lengths) * self._capacity * row_bytes <= LARGEST_BYTES
        if not fits:
            self.forget()
        return fits

    def _room(self, kind: str, layer: int, tokens: int, buffer: Tensor) -> Tensor:
        """[B, G, tokens, D] of memory that is the same at each call that fits into it.

        Megabytes of fresh memory would be mapped, zeroed and given back at each call, which takes longer than the attention.
        """
        shape = (len(self._lengths), buffer.shape[1], tokens, buffer.shape[2])
        count = math.prod(shape)
        memory = self._memory.get((kind, layer))
        if memory is None or len(memory) < count:
            memory = self._memory[kind, layer] = buffer.new_empty(count + count // 2, dtype=self.dtype)
        return memory[:count].view(shape)
