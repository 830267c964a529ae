"""Ends the run with a message when the head node of a joined Ray cluster is gone, before Ray kills this process without one.

Every process of Ray, the driver too, exits when it has not reached the head's control service (GCS) for a minute. Until then calls that
need the service block, and may block the event loop. So a thread watches the head's port and ends the process. A checkpoint is no longer
possible then: calls to actors need that service. A head that hangs, but still listens, is reported and waited for until Ray is about to
give its connections up.
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

from actors.config import RayConfig
from actors.processes import interrupts

_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's variable: seconds after which its processes exit; 60 if it isn't set."""
_SHARE = 0.5
"""Share of those seconds after which the head counts as gone. A head with GCS fault tolerance may come back before."""
_LOOKS = 6
"""Attempts to connect within that time."""
_KEEPALIVE_MS = {"RAY_grpc_client_keepalive_time_ms": "300000", "RAY_grpc_client_keepalive_timeout_ms": "120000"}
"""Ray's variables, and its values if they aren't set: a connection on which nothing comes is probed after the first, and given up after the
second. From then on the head that hangs is unreachable to Ray."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of gRPC says first (RFC 9113, 3.4): a server that runs answers, or hangs up if it speaks TLS. The kernel alone doesn't."""


@contextlib.contextmanager
def ends_with_the_head(
    settings: RayConfig, run_dir: Path, last: Callable[[str], object], notify: Callable[[str, str], object]
) -> Iterator[None]:
    """In this context the loss of the head ends this process. Nothing is watched for a private cluster, or one joined by ray://.

    Args:
        last: takes the reason, in another thread; the process ends at most two seconds later.
        notify: takes level and message, in that thread, when the head hangs and when it answers again.
    """
    if settings.address is None or settings.address.startswith("ray://"):
        yield
        return
    over = threading.Event()
    address = ray.get_runtime_context().gcs_address if settings.address == "auto" else settings.address
    threading.Thread(target=_look, args=(address, over, run_dir, last, notify), name="head watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _look(
    address: str, over: threading.Event, run_dir: Path, last: Callable[[str], object], notify: Callable[[str, str], object]
) -> None:
    limit_s = _SHARE * float(os.environ.get(_LIMIT, "60"))
    look_s = limit_s / _LOOKS
    head = f"the head of the Ray cluster at {address}"
    seen_s = answered_s = time.monotonic()
    hangs_limit_s = limit_s + sum(float(os.environ.get(name, usual)) / 1000 for name, usual in _KEEPALIVE_MS.items())
    hangs = False
    why = f"is gone: nothing has listened there for {limit_s:.0f} s"
    while time.monotonic() - seen_s < limit_s:
        if over.wait(look_s):
            return
        try:
            answers = _answers(address, look_s)
        except OSError as error:
            if not (hangs and isinstance(error, TimeoutError)):  # one that hangs takes no more connections at some time
                continue
            answers = False
        seen_s = time.monotonic()
        silent_s = seen_s - answered_s
        if answers:
            answered_s = seen_s
            if hangs:
                notify("warning", f"{head} answers again, after {silent_s:.0f} s")
            hangs = False
        elif silent_s >= limit_s and not hangs:
            hangs = True
            notify(
                "warning",
                f"{head} hangs: it listens, and has answered nothing for {silent_s:.0f} s. The run goes on with what it has; whatever is "
                f"to start on the cluster waits until the head answers. Ray gives up after some minutes: after {hangs_limit_s:.0f} s this "
                "run ends",
            )
        elif hangs and silent_s >= hangs_limit_s:
            why = f"hangs: it has answered nothing for {silent_s:.0f} s"
            break
    text = (
        f"{head} {why}, and what the cluster knew of this run goes with it. Start a head again (deploy/README.md), then: "
        f"evenkeel train --resume {run_dir}, with ray.address=HOST:PORT if it is another one"
    )
    # Printed first: the run folder's disk may be gone with the head.
    interrupts.end_all(text, interrupts.NO_CLUSTER if interrupts.is_attempt else 1, last=partial(last, text))


def _answers(address: str, limit_s: float) -> bool:
    """Whether the head's process answers, not only the kernel that listens for it. Raises: OSError if nothing listens there, or no more."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=limit_s) as connection:
        try:
            connection.sendall(_PREFACE)
            connection.recv(1)
        except TimeoutError:
            return False
        except OSError:  # hung up, or its process has ended just now
            socket.create_connection((host, int(port)), timeout=limit_s).close()
    return True
