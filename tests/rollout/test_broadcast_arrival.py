"""A bucket that comes over NCCL is handed on when the GPU has it. No GPU is needed: CUDA's and NCCL's functions are taken down.

NCCL itself doesn't run here. Through SGLang's own functions: tests/rollout/test_engine_buckets.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import ErrorType

from evenkeel.rollout.sglang_plugin import hooks

TARGET = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.receive_weights_from_distributed"
BUCKET = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[3, 2]], "load_format": None}


class Arriving:
    """The event behind NCCL's broadcast on the stream. `takes` asks until the GPU has the bucket; None: it never has."""

    def __init__(self, takes: int | None) -> None:
        self.left, self.is_recorded = takes, False

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        assert self.is_recorded
        if self.left:
            self.left -= 1
        return self.left == 0


class WatchedGroup:
    """Of NCCL's. Args: error: what torch's watchdog has found."""

    def __init__(self, error: ErrorType = ErrorType.SUCCESS) -> None:
        self.aborted = threading.Event()
        self.get_error = lambda: error

    def _get_backend(self, device: torch.device) -> WatchedGroup:
        assert device.type == "cuda"
        return self

    def abort(self) -> None:
        self.aborted.set()


def hooked(monkeypatch: pytest.MonkeyPatch, arriving: Arriving, group: Any, *, device: str = "cuda", timeout_s: float) -> Callable[[], Any]:
    """SGLang's receiving of BUCKET as the plugin registers it, over a stand-in that returns as soon as NCCL's kernel is enqueued."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    registered: dict[str, tuple[Callable[..., Any], HookType]] = {}
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: registered.__setitem__(target, (hook, kind)))
    hooks.register(timeout_s)
    hook, kind = registered[TARGET]
    assert kind is HookType.AROUND
    monkeypatch.setattr(torch.cuda, "Event", lambda: arriving)

    def enqueued(updater: Any, *, group_name: str, **bucket: Any) -> str:
        assert (group_name, bucket) == ("weights-1", BUCKET) and not arriving.is_recorded, "before there is anything to wait for"
        return "weights"

    updater = SimpleNamespace(device=device, _model_update_group={"weights-1": group})
    return lambda: hook(enqueued, updater, group_name="weights-1", **BUCKET)


def test_a_bucket_over_nccl_is_handed_on_when_the_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when torch's call returns: receipt, version and the end of the pause would come before the bytes."""
    arriving, group = Arriving(20), WatchedGroup()
    assert hooked(monkeypatch, arriving, group, timeout_s=20.0)() == "weights"
    assert arriving.left == 0 and not group.aborted.is_set()


def test_a_bucket_that_never_comes_over_nccl_is_told_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is aborted, as its kernel waits on the GPU for a member that may be gone."""
    group, began = WatchedGroup(), time.monotonic()
    said = "weight group weights-1: a bucket was not received in 0 s; a member may be gone"
    with pytest.raises(RuntimeError, match=said):
        hooked(monkeypatch, Arriving(None), group, timeout_s=0.2)()
    assert 0.2 <= time.monotonic() - began < 10 and group.aborted.wait(10)


@pytest.mark.parametrize("error", [ErrorType.TIMEOUT, ErrorType.COMM_ERROR])
def test_what_an_aborted_communicator_leaves_is_no_bucket(error: ErrorType, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's watchdog aborts it, which ends its kernel: the stream goes on as if the bucket were there."""
    group = WatchedGroup(error)
    said = rf"weight group weights-1: a bucket was not received: NCCL's communicator has failed \({error.name}\)"
    with pytest.raises(RuntimeError, match=said):
        hooked(monkeypatch, Arriving(3), group, timeout_s=20.0)()
    assert group.aborted.wait(10)


def test_a_backend_that_tells_no_errors_is_waited_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    arriving = Arriving(3)
    assert hooked(monkeypatch, arriving, SimpleNamespace(_get_backend=lambda _: object()), timeout_s=20.0)() == "weights"
    assert arriving.left == 0


def test_on_a_cpu_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's call returns when the bucket is there, or raises."""
    arriving = Arriving(None)
    assert hooked(monkeypatch, arriving, object(), device="cpu", timeout_s=0.0)() == "weights" and not arriving.is_recorded
