"""How a scheduler joins and leaves the learner's weight group: it waits where it can be told to go on.

SGLang joins in the scheduler's own thread, by a call of gloo's that ends when all members are connected, or at the group's time-out. NCCL
would connect with the first broadcast, by a call without a deadline, while the engine stands still for its weights. Here the members first
meet at rank 0's store (Rendezvous, engines/rendezvous.py), and then connect at once, over NCCL by a broadcast of one byte: in a
thread beside the scheduler's. If the learner gives the group up, because a member is gone, the engine samples again within moments.

It leaves in a thread, too: torch lets NCCL end what is under way first, and NCCL may wait there for members that failed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from evenkeel.engines.rendezvous import Rendezvous, abort_group

# ----------------------------------------------------------------------------------------------------------------------
# A bucket of weights that rank 0 broadcasts counts when the GPU has it, and not before.
#
# Over NCCL torch's call returns when the GPU has been told to receive the bucket. SGLang tells it to copy from there next, and answers: if
# torch's watchdog aborted the communicator then, the model would be given memory that nobody has written.

# Seconds between two checks whether the GPU has a bucket, which takes some ten milliseconds.
_LOOK_S = 0.0005


def received_in(timeout_s: float) -> Callable[..., Any]:
    """A hook around SGLang's receiving of a bucket, before it is loaded. What the hook raises SGLang answers as a failed update.

    Args: timeout_s: longest time for one bucket, seconds.
    """

    def receive(original: Callable[..., Any], updater: Any, *, group_name: str, **bucket: Any) -> Any:
        weights = original(updater, group_name=group_name, **bucket)
        if updater.device != "cpu":  # gloo's call returns when the bucket is there
            group = updater._model_update_group[group_name]
            try:
                wait_for_gpu(group, timeout_s, "a bucket was not received")
            except Exception as error:
                threading.Thread(target=abort_group, args=(group,), daemon=True).start()  # its kernel would keep the GPU busy
                raise RuntimeError(f"weight group {group_name}: {error}") from error
        return weights

    return receive


def wait_for_gpu(group: dist.ProcessGroup, timeout_s: float, not_done: str) -> None:
    """Wait on the host until all is done that the present stream was told. (A work's own `wait` has the stream wait, and returns at once.)

    Args: not_done: what hasn't happened otherwise, in words.
    Raises: TimeoutError; RuntimeError with what torch's watchdog says of the group.
    """
    received: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    received.record()
    deadline = time.monotonic() + timeout_s
    while not received.query():  # also when the communicator was aborted: the watchdog notes why before that
        if time.monotonic() > deadline:
            raise TimeoutError(f"{not_done} in {timeout_s:.0f} s; a member may be gone")
        time.sleep(_LOOK_S)
    told = getattr(group._get_backend(torch.device("cuda")), "get_error", None)  # NCCL's backend has it, gloo's hasn't
    if told is not None and (error := told()) != ErrorType.SUCCESS:
        raise RuntimeError(f"{not_done}: NCCL's communicator has failed ({error.name})")


# Seconds between two looks at rank 0's store.
_POLL_S = 0.02
# Longest time to reach that store, seconds. It is there before members are asked: if nobody serves it, the group is over.
_CONTACT_S = 5.0
SglangAnswer = tuple[bool, str]
"""SGLang's: success, and a sentence."""


def joined_in(timeout_s: float) -> Callable[..., Any]:
    """A hook around SGLang's joining of a weight group. Args: timeout_s: longest time for it, seconds."""

    def join(
        original: Callable[..., SglangAnswer],
        updater: Any,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
    ) -> SglangAnswer:
        began, end = time.monotonic(), _FirstAnswer()

        def connect() -> SglangAnswer:
            if updater.device == "cuda":
                torch.cuda.set_device(updater.gpu_id)  # of this thread
            answer = original(updater, master_address, master_port, rank_offset, world_size, group_name, backend)
            if answer[0] and updater.device != "cpu":
                _connect(updater, group_name, timeout_s - (time.monotonic() - began))
            return answer

        def work() -> None:
            try:
                meeting = Rendezvous(master_address, master_port, group_name, timeout=timedelta(seconds=min(timeout_s, _CONTACT_S)))
                meeting.arrive()
                while not meeting.has_begun():
                    if meeting.is_given_up() or end.is_there:
                        end.give((False, "the group was given up before all members had come"))
                        return
                    time.sleep(_POLL_S)
                threading.Thread(target=_watch, args=(meeting, end), daemon=True).start()
                answer = connect()
            except Exception as error:
                answer = False, f"{type(error).__name__}: {error}"
            if not end.give(answer) and answer[0]:
                updater.destroy_weights_update_group(group_name)  # nobody waits for it any more

        threading.Thread(target=work, daemon=True).start()
        return end.within(timeout_s)

    return join


def leave(original: Callable[..., SglangAnswer], updater: Any, group_name: str) -> SglangAnswer:
    """A hook around SGLang's leaving of a weight group. Nobody waits for the group's end."""
    group = updater._model_update_group.pop(group_name, None)
    if group is None:
        return original(updater, group_name)  # SGLang says that there is no such group
    threading.Thread(target=_end, args=(group,), daemon=True).start()
    return True, "left"


def _end(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # it had failed, that is why it is left
        dist.destroy_process_group(group)


class _FirstAnswer:
    """The first of several answers counts."""

    def __init__(self) -> None:
        self._lock, self._there = threading.Lock(), threading.Event()
        self._answer: SglangAnswer = False, ""

    @property
    def is_there(self) -> bool:
        return self._there.is_set()

    def give(self, answer: SglangAnswer) -> bool:
        """Returns: whether it is the first."""
        with self._lock:
            if self.is_there:
                return False
            self._answer = answer
            self._there.set()
            return True

    def within(self, seconds: float) -> SglangAnswer:
        if not self._there.wait(seconds):
            self.give((False, f"the group was not connected in {seconds:.0f} s; a member may be gone"))
        return self._answer


def _watch(meeting: Rendezvous, end: _FirstAnswer) -> None:
    """Answer for the call that connects the members, which nobody can end, if the group is given up meanwhile."""
    while not end.is_there:
        try:
            if meeting.is_given_up():
                end.give((False, "the group was given up before all members were connected"))
        except Exception as error:
            end.give((False, f"the learner has left the group ({type(error).__name__})"))
        time.sleep(_POLL_S)


def _connect(updater: Any, name: str, timeout_s: float) -> None:
    """Have NCCL connect the members: rank 0 broadcasts one byte. Raises: as wait_for_gpu; the group is gone then."""
    group = updater._model_update_group[name]
    try:
        dist.broadcast(torch.zeros(1, dtype=torch.uint8, device=updater.device), src=0, group=group)
        wait_for_gpu(group, timeout_s, "the members were not connected")
    except Exception:
        del updater._model_update_group[name]
        threading.Thread(target=abort_group, args=(group,), daemon=True).start()
        raise
