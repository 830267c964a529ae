"""Weights by torch.distributed broadcast: the learner is rank 0 of a group of its own with the engines.

SGLang joins such a group with a store at tcp://host:port and a group name; the learner must build its side the same way, in addition to its
own default group. A bucket is one broadcast, of bytes: of 18,867 tensors of a mixture of experts each would be a call otherwise.

A broadcast runs in a thread with a deadline: a collective that never ends must not take the learner with it. One bucket is on its way while
the next is gathered. Gloo's call returns when the bucket is sent. NCCL's returns when the GPU has been told to send it: the thread then
polls until it is sent. A group in which a bucket is late is aborted, because its kernel would keep the GPU busy.

A group may be joined and left in another thread than the one that trains. Its members first meet at the store, so that none waits in a
call of gloo's or NCCL's for one that is gone; then they are connected. NCCL connects with the first broadcast: of one byte, therefore, at
once, and not when engines stand still for new weights.
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
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _set_pg_timeout, _world

from evenkeel.correction.errors import SyncError
from evenkeel.engines.rendezvous import Rendezvous, abort_group, gloo_towards, rendezvous_store
from evenkeel.engines.weights import WeightSpec, goes_whole, widest_first

# Seconds between two checks whether the GPU has sent a bucket, which takes some ten milliseconds.
_POLL_S = 0.0005
# Seconds between two checks whether all members are there, or nobody waits for them any more.
_MEETING_POLL_S = 0.02
# Seconds in which members look at the store again, many times.
_TOLD_S = 1.0
_LEFT = "the learner has left it meanwhile"
# Part of the time to join in which members have to come; the rest is for connecting them.
_TO_COME = 0.9


class WeightBroadcaster:
    """Sends weights as rank 0 of a weight group."""

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int,
        name: str,
        join_s: float,
        device: torch.device,
        *,
        bucket_s: float | None = None,
        given_up: threading.Event | None = None,
        store: TCPStore | None = None,
    ) -> None:
        """Wait for all members.

        Args:
            device: where the weights lie: NCCL takes tensors of a GPU alone.
            bucket_s: longest time for one bucket, seconds; None: join_s.
            given_up: set by another thread when the group is not wanted any more: nobody waits then, the members neither.
            store: the one at host:port; None: it is served from now on.
        Raises: SyncError if they are not there in join_s, or the group is given up.
        """
        self._name, self._bucket_s, self._device = name, join_s if bucket_s is None else bucket_s, device
        self._group: dist.ProcessGroup | None = None
        self._changing = threading.Lock()
        self._on_its_way: _InThread | None = None
        self._is_aborted = False
        self._store = store
        self._meeting: Rendezvous | None = None
        self._given_up = given_up or threading.Event()
        joining = _InThread(lambda: self._join(host, port, world_size, join_s), join_s, self._given_up)
        try:
            self._wait(joining, "group was not built")
        except SyncError:
            with self._changing:
                self._given_up.set()
            threading.Thread(target=self._call_off, daemon=True).start()
            raise
        self._store = self._meeting = None

    def send(self, bucket: Mapping[str, Tensor]) -> None:
        """Broadcast the tensors, and wait until they are sent. Raises: as `begin` and `finish`."""
        self.begin(bucket)
        self.finish()

    def begin(self, bucket: Mapping[str, Tensor]) -> None:
        """Begin to broadcast the tensors at once, by a copy on their device (`end_to_end`), when the bucket before is sent.

        They have to stay as they are until the next call: one that goes whole is sent from where it lies.
        Raises: SyncError, before anything of it is sent, for a tensor on another device; as `finish` for the bucket before.
        """
        for name, tensor in bucket.items():
            if tensor.device.type != self._device.type:
                raise SyncError(
                    f"weight group {self._name}: {name} lies on device {tensor.device}, and the group's backend takes tensors on "
                    f"{self._device.type} alone. Set weight_sync.transport: object_store"
                )

        self.finish()
        with self._changing:
            if (group := self._group) is None:  # torch would take the learner's own default group
                raise SyncError(f"weight group {self._name}: the learner has left it")

            def broadcast() -> None:
                flat = end_to_end(bucket)  # kept until it is sent
                if self._device.type == "cpu":
                    dist.broadcast(flat, src=0, group=group)
                elif (work := dist.broadcast(flat, src=0, group=group, async_op=True)) is not None:
                    until_done(work, self._bucket_s)

            self._on_its_way = _InThread(broadcast, self._bucket_s)

    def finish(self) -> None:
        """Wait until the last bucket is sent, if it isn't yet. Raises: SyncError if that fails, and the group is of no use then."""
        call, group = self._on_its_way, self._group
        if call is None:
            return
        try:
            self._wait(call, "broadcast failed")
        except SyncError:
            if self._device.type != "cpu" and group is not None and not self._is_aborted:  # once: each later call fails here, too
                self._is_aborted = True
                threading.Thread(target=abort_group, args=(group,), daemon=True).start()
            raise
        self._on_its_way = None

    def close(self) -> None:
        """Leave the group. A bucket that is on its way fails: a member may be gone, and nobody waits for the others any more. Errors of a
        broken group are not raised: that is why it is closed."""
        with self._changing:
            group, self._group = self._group, None
            call = self._on_its_way
        if call is not None:
            call.give_up()
        if group is not None:
            threading.Thread(target=_leave, args=(group, call), daemon=True).start()

    def _join(self, host: str, port: int, world_size: int, join_s: float) -> None:
        timeout, began = timedelta(seconds=join_s), time.monotonic()
        if (store := self._store) is None:
            store = self._store = rendezvous_store(host, port, rank=0, world_size=world_size, timeout=timeout, waits=False)
        self._meeting = Rendezvous(host, port, self._name, timeout=timeout)
        self._meet(self._meeting, world_size - 1, began + _TO_COME * join_s)
        backend, options = ("nccl", None) if self._device.type == "cuda" else gloo_towards(host, psutil.net_if_addrs())
        board, name = PrefixStore(self._name, store), GroupName(self._name)
        group, _ = _new_process_group_helper(
            world_size, 0, [], Backend(backend), board, group_name=name, backend_options=options, timeout=timeout
        )
        _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        self._connect(group, began + join_s)
        _set_pg_timeout(timedelta(seconds=self._bucket_s), group)
        with self._changing:
            if not self._given_up.is_set():
                self._group = group
                return
        _destroy(group)

    def _meet(self, meeting: Rendezvous, members: int, until: float) -> None:
        """Wait until all members are there; if not, tell those who are. Raises: TimeoutError."""
        while (came := meeting.came()) < members:
            if self._given_up.wait(_MEETING_POLL_S) or time.monotonic() > until:
                meeting.give_up()
                raise TimeoutError(_LEFT if self._given_up.is_set() else f"{came} of {members} members came")
        meeting.begin()

    def _connect(self, group: dist.ProcessGroup, until: float) -> None:
        if self._device.type == "cpu":
            return
        try:
            work = dist.broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device), src=0, group=group, async_op=True)
            if work is not None:
                until_done(work, until - time.monotonic(), "the members were not connected")
        except BaseException:
            threading.Thread(target=abort_group, args=(group,), daemon=True).start()
            raise

    def _call_off(self) -> None:
        """Let the members that came, and may wait for one another, go on."""
        with contextlib.suppress(Exception):  # there is no store, or no member left
            if self._meeting is not None:
                self._meeting.give_up()
        time.sleep(_TOLD_S)  # the store ends with this object, and a member that hears nothing any more can't say why

    def _wait(self, call: _InThread, what: str) -> None:
        call.join()
        if call.is_given_up:
            raise SyncError(f"weight group {self._name}: {what}: {_LEFT}")
        if call.is_running:
            raise SyncError(f"weight group {self._name}: {what} in {call.limit_s:.0f} s; a member may be gone")
        if call.error is not None:
            raise SyncError(f"weight group {self._name}: {what}: {call.error}") from call.error


class _InThread:
    """Work in a thread of its own, which begins at once."""

    def __init__(self, work: Callable[[], None], limit_s: float, given_up: threading.Event | None = None) -> None:
        """Args: given_up: set by another thread in place of calling `give_up`."""
        self.limit_s, self._given_up_elsewhere = limit_s, given_up
        self.error: BaseException | None = None
        self._work, self._until = work, time.monotonic() + limit_s
        self.is_given_up = False
        self._ended, self._waits_no_more = threading.Event(), threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    def join(self) -> None:
        """Wait until it has ended, its time is over, or it is given up."""
        while (left := self._until - time.monotonic()) > 0:
            if self._waits_no_more.wait(left if self._given_up_elsewhere is None else min(left, _MEETING_POLL_S)):
                return
            if self._given_up_elsewhere is not None and self._given_up_elsewhere.is_set():
                self.give_up()

    def give_up(self) -> None:
        """Let its waiters go, if it has not ended. A call of gloo's runs on until its own deadline, even if its group is destroyed."""
        self.is_given_up = self.is_running
        self._waits_no_more.set()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self._ended.set()
        self._waits_no_more.set()


def end_to_end(bucket: Mapping[str, Tensor]) -> Tensor:
    """[bytes] uint8: the tensors' bytes without gaps, as SGLang's FlattenedTensorBucket reads them, in the order of `widest_first`.

    A tensor that goes by itself (`goes_whole`) is sent as it is, from where it lies.
    """
    specs = widest_first(WeightSpec.of(name, tensor) for name, tensor in bucket.items())
    if goes_whole(specs):
        return bucket[specs[0].name].detach().contiguous()
    return torch.cat([bucket[spec.name].detach().reshape(-1).view(torch.uint8) for spec in specs])


def until_done(work: dist.Work, timeout_s: float, late: str = "a bucket was not sent") -> None:
    """Wait on the host for what the GPU does. (A work's own `wait` has the GPU's next kernels wait, and returns at once.)

    Args: late: what didn't happen in time, in words.
    Raises: TimeoutError; what has become of a work that failed.
    """
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():  # also when it has failed, or its communicator was aborted
        if time.monotonic() > deadline:
            raise TimeoutError(f"{late} in {timeout_s:.0f} s; a member may be gone")
        time.sleep(_POLL_S)
    if (error := work.exception()) is not None:
        raise RuntimeError(str(error))


def _leave(group: dist.ProcessGroup, call: _InThread | None) -> None:
    if call is not None and call.is_running:
        abort_group(group)
    _destroy(group)


def _destroy(group: dist.ProcessGroup) -> None:
    try:
        dist.destroy_process_group(group)
    except Exception:  # the group was broken, that is why it is closed
        return
