"""Weights by torch.distributed broadcast: the learner is rank 0 of a group of its own with the engines.

SGLang joins such a group with a store at tcp://host:port and a group name; the learner must build its side the same way, in addition to its
own default group. A bucket is one broadcast, of bytes: of 18,867 tensors of a mixture of experts each would be a call otherwise.

A broadcast runs in a thread with a deadline: a collective that never ends must not take the learner with it. Gloo's call returns when the
bucket is sent. NCCL's returns when the GPU has been told to send it, so that what has become of it is asked until it is done, and a group
in which it is late is aborted: its kernel would keep the GPU busy.

A group may be joined and left in another thread than the one that trains. Over gloo the members are connected then; NCCL connects them with
the first broadcast.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

from correction.engines.rendezvous import gloo_interface_towards, rendezvous_store
from correction.engines.weight_spec import WeightSpec, goes_whole, widest_first
from correction.errors import SyncError

_POLL_S = 0.0005
"""Between two looks at what the GPU has sent; a bucket takes some ten milliseconds."""


class WeightBroadcaster:
    """Rank 0 of a weight group."""

    def __init__(self, host: str, port: int, world_size: int, name: str, timeout_s: float, device: torch.device) -> None:
        """Wait for all members.

        Args: device: where the weights lie: NCCL takes tensors of a GPU alone.
        Raises: SyncError if they are not there in timeout_s.
        """
        self._name, self._timeout_s, self._device = name, timeout_s, device
        self._group: dist.ProcessGroup | None = None
        self._sending = threading.Lock()
        self._run(lambda: self._join(host, port, world_size), "group was not built")

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        """Broadcast the tensors at once, by a copy on their device (`end_to_end`).

        Raises: SyncError, before anything is sent, for a tensor on another device; or if it fails, and the group is of no use then.
        """
        for name, tensor in bucket.items():
            if tensor.device.type != self._device.type:
                raise SyncError(
                    f"weight group {self._name}: {name} lies on device {tensor.device}, and the group's backend takes tensors on "
                    f"{self._device.type} alone. Set weight_sync.transport: object_store"
                )

        with self._sending:
            if (group := self._group) is None:  # torch would take the learner's own default group
                raise SyncError(f"weight group {self._name}: the learner has left it")

            def broadcast() -> None:
                flat = end_to_end(bucket)  # kept until it is sent
                if self._device.type == "cpu":
                    dist.broadcast(flat, src=0, group=group)
                elif (work := dist.broadcast(flat, src=0, group=group, async_op=True)) is not None:
                    until_done(work, self._timeout_s)

            try:
                self._run(broadcast, "broadcast failed")
            except SyncError:
                if self._device.type != "cpu":
                    threading.Thread(target=_abort, args=(group,), daemon=True).start()
                raise

    def close(self) -> None:
        """Leave the group, when a bucket that is being sent is out. Errors of a broken one are not raised: that is why it is closed."""
        threading.Thread(target=self._leave, daemon=True).start()

    def _leave(self) -> None:
        with self._sending:
            group, self._group = self._group, None
        if group is not None:
            _destroy(group)

    def _join(self, host: str, port: int, world_size: int) -> None:
        backend = Backend("nccl" if self._device.type == "cuda" else "gloo")
        timeout = timedelta(seconds=self._timeout_s)
        store = rendezvous_store(host, port, rank=0, world_size=world_size, timeout=timeout)
        towards = gloo_interface_towards(host, psutil.net_if_addrs()) if backend == "gloo" else contextlib.nullcontext()
        with towards:
            self._group, _ = _new_process_group_helper(
                world_size, 0, [], backend, PrefixStore(self._name, store), group_name=GroupName(self._name), timeout=timeout
            )
        _world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}

    def _run(self, work: Callable[[], None], what: str) -> None:
        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise SyncError(f"weight group {self._name}: {what} in {self._timeout_s:.0f} s; a member may be gone")
        if errors:
            raise SyncError(f"weight group {self._name}: {what}: {errors[0]}") from errors[0]


def end_to_end(bucket: Mapping[str, Tensor]) -> Tensor:
    """[bytes] uint8: the tensors' bytes without gaps, as SGLang's FlattenedTensorBucket reads them, in the order of `widest_first`.

    A tensor that goes by itself (`goes_whole`) is sent as it is, from where it lies.
    """
    specs = widest_first(WeightSpec.of(name, tensor) for name, tensor in bucket.items())
    if goes_whole(specs):
        return bucket[specs[0].name].detach().contiguous()
    return torch.cat([bucket[spec.name].detach().reshape(-1).view(torch.uint8) for spec in specs])


def until_done(work: dist.Work, timeout_s: float) -> None:
    """Wait on the host for what the GPU does. (A work's own `wait` has the GPU's next kernels wait, and returns at once.)

    Raises: TimeoutError; what has become of a work that failed.
    """
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():  # also when it has failed, or its communicator was aborted
        if time.monotonic() > deadline:
            raise TimeoutError(f"a bucket was not sent in {timeout_s:.0f} s; a member may be gone")
        time.sleep(_POLL_S)
    if (error := work.exception()) is not None:
        raise RuntimeError(str(error))


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # the watchdog may have done it
        group.abort()


def _destroy(group: dist.ProcessGroup) -> None:
    try:
        dist.destroy_process_group(group)
    except Exception:  # the group was broken, that is why it is closed
        return
