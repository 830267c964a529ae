"""The head of a joined cluster: when it is gone the run ends with a sentence, before Ray ends this process without one.

Each of Ray's processes ends, the driver too, when it hasn't reached the control service for a minute. Until then any call of Ray's that
needs that service stands still, and the event loop with it, if a worker is lost meanwhile; so a thread looks after the head, and ends the
process itself. Nothing could be saved any more: actors that are asked for it are found through that service.

One that hangs, and listens still, is told, and is waited for.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import ray

from actors import interrupts
from actors.config import RayConfig

_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's variable: those seconds; 60 if it isn't set."""
_SHARE = 0.5
"""Of them: a head that doesn't come back within it, as one that keeps what it knows elsewhere (GCS fault tolerance), counts as gone."""
_LOOKS = 6


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of gRPC says first (RFC 9113, 3.4): a server that runs answers, or hangs up if it speaks TLS. The kernel alone doesn't."""


@contextlib.contextmanager
def ends_with_the_head(
    settings: RayConfig, run_dir: Path, last: Callable[[str], object], tell: Callable[[str, str], object]
) -> Iterator[None]:
    """While this lasts, the loss of the head of the cluster that was joined ends this process. A private one is this process' own.

    Args:
        last: is told the reason, in a thread of its own, for which the end waits two seconds.
        tell: takes level and sentence, in that thread, when the head hangs, and when that is over.
    """
    if settings.address is None or settings.address.startswith("ray://"):
        yield
        return
    over = threading.Event()
    address = ray.get_runtime_context().gcs_address if settings.address == "auto" else settings.address
    threading.Thread(target=_look, args=(address, over, run_dir, last, tell), name="head watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _look(
    address: str, over: threading.Event, run_dir: Path, last: Callable[[str], object], tell: Callable[[str, str], object]
) -> None:
    limit_s = _SHARE * float(os.environ.get(_LIMIT, "60"))
    look_s = limit_s / _LOOKS
    head = f"the head of the Ray cluster at {address}"
    seen_s = answered_s = time.monotonic()
    hangs = False
    while time.monotonic() - seen_s < limit_s:
        if over.wait(look_s):
            return
        try:
            answers = _answers(address, look_s)
        except OSError:
            continue
        seen_s = time.monotonic()
        silent_s = seen_s - answered_s
        if answers:
            answered_s = seen_s
            if hangs:
                tell("warning", f"{head} answers again, after {silent_s:.0f} s")
            hangs = False
        elif silent_s >= limit_s and not hangs:
            hangs = True
            tell(
                "warning",
                f"{head} hangs: it listens, and has answered nothing for {silent_s:.0f} s. The run goes on with what it has; whatever is "
                "to start on the cluster waits until the head answers",
            )
    text = (
        f"{head} is gone: nothing has listened there for {limit_s:.0f} s, and what the cluster knew of "
        f"this run went with it. Start a head again (deploy/README.md), then: evenkeel train --resume {run_dir}, with "
        "ray.address=HOST:PORT if it is another one"
    )
    # The folder may be on a disk that went with the head: the terminal has it first, and the folder if it can.
    interrupts.end_all(text, interrupts.NO_CLUSTER if interrupts.is_attempt else 1, last=partial(last, text))


def _answers(address: str, limit_s: float) -> bool:
    """Whether its process does, and not the kernel alone. Raises: OSError if nothing listens at host:port."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=limit_s) as connection:
        try:
            connection.sendall(_PREFACE)
            connection.recv(1)
        except TimeoutError:
            return False
        except OSError:  # hung up
            return True
    return True
