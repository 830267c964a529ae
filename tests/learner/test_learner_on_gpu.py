"""What a rank asks of CUDA where it has a GPU, with CUDA's own functions taken down: no GPU is needed."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evenkeel.correction.errors import SyncError
from evenkeel.engines.machine import CONTEXT
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.model import parallel
from evenkeel.learner.weights.broadcast import WeightBroadcaster
from evenkeel.learner.weights.export import Staging


def test_a_rank_with_a_share_of_a_gpu_holds_no_more_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CUDA context has a place in the share, too, so that the engine on the same GPU gets all of its own. CUDA keeps the limit:
    without a GPU all that can be seen is what it is told."""
    asked: list[tuple[float, torch.device]] = []
    total = 24 << 30
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: asked.append((share, device)))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(parallel.parallel_state, "initialize_model_parallel", lambda **_: None)
    device = torch.device("cuda", 0)
    for share in (0.65, 1.0):
        parallel._initialize(LearnerConfig(gpus_per_rank=share), device, 0, 1, "", 0)
    assert asked == [(0.65 - CONTEXT / total, device), (1.0, device)]


def test_weights_of_a_gpu_leave_through_page_locked_memory_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From pageable memory they would be copied twice. A CPU tensor that isn't contiguous stands for one of a GPU. Without one no memory
    can be locked: what torch is asked for is all that can be seen of that."""
    made: list[dict[str, Any]] = []
    empty = torch.empty

    def recorded(*size: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        made.append({"bytes": size[0], "pin_memory": pin_memory})
        return empty(*size, **how)

    weights = {"a": torch.arange(12.0).view(3, 4).t()}
    staging = Staging()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", recorded)
    first = staging.bucket(weights)
    assert made == [{"bytes": 48, "pin_memory": True}]
    second = staging.bucket(weights)
    assert len(made) == 1 and torch.equal(second.tensors()["a"], weights["a"])
    assert second.tensors()["a"].data_ptr() == first.tensors()["a"].data_ptr()


class Sent:
    """What NCCL's asynchronous broadcast returns. `takes` asks until it is done; None: never."""

    def __init__(self, takes: int | None, error: str = "") -> None:
        self.left, self.error = takes, error
        self.dtype: torch.dtype | None = None

    def is_completed(self) -> bool:
        if self.left:
            self.left -= 1
        return self.left == 0

    def exception(self) -> RuntimeError | None:
        return RuntimeError(self.error) if self.error else None


class WatchedGroup:
    def __init__(self) -> None:
        self.aborted, self.aborts = threading.Event(), 0

    def abort(self) -> None:
        self.aborts += 1
        self.aborted.set()


def broadcaster(monkeypatch: pytest.MonkeyPatch, works: list[Sent], bucket_s: float = 0.2) -> tuple[WeightBroadcaster, WatchedGroup]:
    """Of a group whose calls return at once, as NCCL's do, in which the broadcasts of buckets become of what is told. Torch's meta device
    stands for a GPU's."""
    group, waiting = WatchedGroup(), iter(works)
    monkeypatch.setattr(WeightBroadcaster, "_join", lambda self, *_: setattr(self, "_group", group))

    def enqueue(tensor: Any, *, src: int, group: Any, async_op: bool) -> Sent:
        assert async_op, "the call would return at once and tell nothing"
        assert tensor.device.type == "meta", "on the device"
        sent = next(waiting)
        sent.dtype = tensor.dtype
        return sent

    monkeypatch.setattr(dist, "broadcast", enqueue)
    return WeightBroadcaster("", 0, 2, "weights-1", 300.0, torch.device("meta"), bucket_s=bucket_s), group


def bucket(count: int) -> dict[str, torch.Tensor]:
    return {str(i): torch.empty(3, 2 + i, dtype=torch.bfloat16, device="meta") for i in range(count)}


def test_a_broadcast_over_nccl_is_done_when_the_gpu_has_sent_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is one call, however many tensors it has; of one alone it isn't made bytes."""
    works = [Sent(3), Sent(20)]
    sender, group = broadcaster(monkeypatch, works, bucket_s=20.0)
    sender.send(bucket(3))
    assert [work.left for work in works] == [0, 20]
    sender.send(bucket(1))
    assert [work.left for work in works] == [0, 0] and not group.aborted.is_set()
    assert [work.dtype for work in works] == [torch.uint8, torch.bfloat16]


def test_a_dead_engine_is_told_within_the_deadline_over_nccl_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's call has returned long before; the group is aborted, as its kernel waits on the GPU for the member that is gone. The
    deadline is a bucket's, not the five minutes that members have to join."""
    sender, group = broadcaster(monkeypatch, [Sent(0), Sent(None)])
    sender.send(bucket(1))
    began = time.monotonic()
    with pytest.raises(SyncError, match="weight group weights-1: broadcast failed"):
        sender.send(bucket(2))
    assert time.monotonic() - began < 10 and group.aborted.wait(10)
    threads = threading.active_count()
    with pytest.raises(SyncError, match="weight group weights-1: broadcast failed"):
        sender.begin(bucket(1))  # the group is of no use any more, and is aborted once
    assert threading.active_count() <= threads and group.aborts == 1


def test_a_broadcast_that_nccl_gives_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, group = broadcaster(monkeypatch, [Sent(1, "NCCL communicator was aborted on rank 0")], bucket_s=20.0)
    with pytest.raises(SyncError, match="broadcast failed: NCCL communicator was aborted on rank 0"):
        sender.send(bucket(1))
    assert group.aborted.wait(10)


@pytest.mark.parametrize("comes", [True, False])
def test_nccl_connects_the_members_of_a_weight_group_at_once(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a broadcast of one byte, and not by the first bucket, for which engines stand still."""
    sent = Sent(5 if comes else None)
    aborted: list[object] = []

    def enqueue(tensor: torch.Tensor, *, src: int, group: Any, async_op: bool) -> Sent:
        assert (tensor.numel(), tensor.dtype, tensor.device.type, src, async_op) == (1, torch.uint8, "meta", 0, True)
        return sent

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(dist, "broadcast", enqueue)
    monkeypatch.setattr("evenkeel.learner.weights.broadcast.abort_group", aborted.append)
    if comes:
        WeightBroadcaster("127.0.0.1", port, 1, "weights-1", 60.0, torch.device("meta")).close()
        assert sent.left == 0 and aborted == []
        return
    with pytest.raises(SyncError, match="weights-1: group was not built"):
        WeightBroadcaster("127.0.0.1", port, 1, "weights-1", 1.0, torch.device("meta"))
    ends = time.monotonic() + 20.0
    while not aborted:
        assert time.monotonic() < ends, "its kernel waits on the GPU for a member that is gone"
        time.sleep(0.01)
