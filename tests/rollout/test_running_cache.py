"""The padded copy of the running batch against the paged cache itself, through the changes that a batch can go through."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evenkeel.rollout.sglang_plugin import running_cache
from evenkeel.rollout.sglang_plugin.running_cache import RunningCache, gather

GROUPS, SIZE, LAYERS, SLOTS, ROWS, CONTEXT = 2, 4, 2, 1000, 6, 200


class PagedCache:
    """A paged cache with a running batch, as SGLang keeps them: the independent side of the comparison."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.buffers = {(kind, layer): self._noise(SLOTS) for kind in ("keys", "values") for layer in range(LAYERS)}
        self.req_to_token = torch.randint(0, SLOTS, (ROWS, CONTEXT), generator=self.random, dtype=torch.int32)  # garbage beyond a length
        self.free = torch.randperm(SLOTS, generator=self.random).tolist()
        self.lengths: dict[int, int] = {}

    def _noise(self, count: int) -> Tensor:
        return torch.randn(count, GROUPS, SIZE, generator=self.random)

    def admit(self, request: int, length: int) -> None:
        for position in range(length):
            self.req_to_token[request, position] = self.free.pop()
        self.lengths[request] = length

    def step_equals(self, cache: RunningCache, requests: list[int]) -> None:
        """One decode step: a token for each request; then every key and value of `cache` must be that of the paged cache."""
        for request in requests:
            self.admit_token(request)
        rows, lengths = torch.tensor(requests), torch.tensor([self.lengths[r] for r in requests])
        cache.begin_step(rows, lengths, self.req_to_token)
        for (kind, layer), buffer in self.buffers.items():
            new = self._noise(len(requests))
            buffer[self.req_to_token[rows, lengths - 1].long()] = new
            padded = cache.extended(kind, layer, new, buffer)
            assert padded.shape == (len(requests), GROUPS, int(lengths.max()), SIZE)
            assert padded.isfinite().all() and padded.dtype == cache.dtype
            for row, request in enumerate(requests):
                expected = buffer[self.req_to_token[request, : self.lengths[request]].long()].to(padded.dtype)
                torch.testing.assert_close(padded[row, :, : self.lengths[request]].transpose(0, 1), expected, rtol=0, atol=0)

    def admit_token(self, request: int) -> None:
        self.req_to_token[request, self.lengths[request]] = self.free.pop()
        self.lengths[request] += 1


@pytest.mark.parametrize("largest_bytes", [1 << 30, 0], ids=["kept from step to step", "gathered at each step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_follows_the_paged_cache(monkeypatch: pytest.MonkeyPatch, largest_bytes: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(running_cache, "LARGEST_BYTES", largest_bytes)
    monkeypatch.setattr(running_cache, "LEAST_ROOM", 4)
    paged, cache = PagedCache(0), RunningCache(LAYERS, multiple=1, dtype=dtype)
    for request, length in ((0, 5), (1, 1), (2, 12)):
        paged.admit(request, length)
    for _ in range(10):  # runs out of room and grows on the way
        paged.step_equals(cache, [0, 1, 2])
    paged.step_equals(cache, [0, 2])  # one has finished
    paged.step_equals(cache, [2, 0])  # another order
    paged.admit(1, 30)  # its row goes to another request, prefilled meanwhile
    cache.forget()
    for _ in range(3):
        paged.step_equals(cache, [2, 0, 1])


def test_row_given_to_another_request_of_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `forget`, which every prefill calls, tells this batch from the one before."""
    paged, cache = PagedCache(1), RunningCache(LAYERS, multiple=1, dtype=torch.float32)
    paged.admit(0, 5)
    paged.step_equals(cache, [0])
    paged.admit(0, 6)
    cache.forget()
    paged.step_equals(cache, [0])


def test_gather_is_indexing() -> None:
    buffer, slots = torch.randn(50, GROUPS, SIZE), torch.randint(0, 50, (3, 7), dtype=torch.int32)
    assert torch.equal(gather(buffer, slots), buffer[slots.long()])
