"""A bucket of weights that rank 0 broadcasts counts when the GPU has it, and not before.

Over NCCL torch's call returns when the GPU has been told to receive the bucket. SGLang tells it to copy from there next, and answers: if
torch's watchdog aborted the communicator then, the model would be given memory that nobody has written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from correction.engines.rendezvous import abort_group

_POLL_S = 0.0005
"""Seconds between two checks whether the GPU has a bucket, which takes some ten milliseconds."""


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
        time.sleep(_POLL_S)
    told = getattr(group._get_backend(torch.device("cuda")), "get_error", None)  # NCCL's backend has it, gloo's hasn't
    if told is not None and (error := told()) != ErrorType.SUCCESS:
        raise RuntimeError(f"{not_done}: NCCL's communicator has failed ({error.name})")
