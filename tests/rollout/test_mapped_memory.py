"""What a scheduler on a GPU asks of CUDA for the memory in which weights come, with CUDA's functions taken down: no GPU is needed.

That memory is mapped once: test_weight_transfer.py. Without a GPU none can be locked: what CUDA is asked for is all that can be seen.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenkeel.engines.weights import WeightBucket
from evenkeel.rollout.engine import weight_transfer
from evenkeel.rollout.sglang_plugin import mapped_memory

GPU = SimpleNamespace(device="cuda")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Calls of CUDA: name, address, bytes."""
    calls: list[tuple[str, int, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append(("lock", address, size))
        return 0

    def unregister(address: int) -> int:
        calls.append(("unlock", address, 0))
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(mapped_memory, "_mapped", deque())
    return calls


def arrives(staging: weight_transfer.SharedStaging, size: int, updater: Any = GPU) -> torch.Tensor:
    half = staging.copy(WeightBucket.of({"layer": torch.ones(size, dtype=torch.uint8)}))
    mapped_memory.keep_mapped(updater, flattened_tensor_bucket_dict={"flattened_tensor": half})
    return half


def test_weights_come_to_a_gpu_through_page_locked_memory_that_is_used_again(asked: list[tuple[str, int, int]]) -> None:
    """From pageable memory CUDA would copy them once more, while the engine is paused. Each half is locked once, and let go before it is
    unmapped: a bucket that is larger than those before needs other memory."""
    staging = weight_transfer.SharedStaging()
    first, second, *_ = [arrives(staging, size).untyped_storage() for size in (4096, 4096, 1000, 4096, 4096, 17)]
    locked = [("lock", first.data_ptr(), 4096), ("lock", second.data_ptr(), 4096)]
    assert asked == locked
    third = arrives(staging, 8192).untyped_storage()
    assert asked[2:] == [("unlock", first.data_ptr(), 0), ("lock", third.data_ptr(), 8192)]


def test_on_a_cpu_nothing_is_locked(asked: list[tuple[str, int, int]]) -> None:
    staging = weight_transfer.SharedStaging()
    for size in (4096, 4096, 8192):
        arrives(staging, size, SimpleNamespace(device="cpu"))
    assert asked == []


def test_memory_that_can_not_be_locked_costs_time_alone(
    asked: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps the error for the next kernel, which would be one of the engine's."""
    told: list[str] = []

    def zeros(*_: Any, device: str) -> None:
        told.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 2)
    monkeypatch.setattr(torch, "zeros", zeros)
    staging = weight_transfer.SharedStaging()
    arrives(staging, 4096)
    assert told == ["cuda"]
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 0)
    arrives(staging, 4096)
    arrives(staging, 8192)
    assert asked == [], "what was not locked is not unlocked, which would be one more error for the next kernel"
    assert [record.getMessage() for record in caplog.records] == [
        "weights come through pageable memory: CUDA locked none of 4096 bytes (error 2)"
    ]
