"""Ends the run with a message when the Ray that it runs on is gone, before Ray ends this process without one.

Of a joined cluster that is its head. Every process of Ray, the driver too, exits when it has not reached the head's control service (GCS)
for a minute. Until then calls that need the service block, and may block the event loop. So a thread watches the head's port and ends the
process. A checkpoint is no longer possible then: calls to actors need that service. A head that hangs, but still listens, is reported and
waited for until Ray is about to give its connections up.

Of a private cluster it is the same service, and the raylet, without which no actor lives. Both are children of this process and never come
back: the death of one ends the run at once. One that hangs is reported, too; the service gives a raylet up within a minute, and all actors
with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from evenkeel.actors.carriers import Notify
from evenkeel.actors.processes import signals
from evenkeel.actors.processes.children import descendants
from evenkeel.correction.errors import signal_name

# Ray's variable: seconds after which its processes exit; 60 if it isn't set.
_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
# Share of those seconds after which the head counts as gone. A head with GCS fault tolerance may come back before.
_SHARE = 0.5
# Number of attempts to connect within that time.
_LOOKS = 6
# Ray's variables, with its defaults: a silent connection is probed after the first time, and given up when the probe has had no answer for
# the second. From then on a head that hangs is unreachable for Ray.
_KEEPALIVE_MS = {"RAY_grpc_client_keepalive_time_ms": "300000", "RAY_grpc_client_keepalive_timeout_ms": "120000"}
_PROBE_MS = {"RAY_health_check_period_ms": "3000", "RAY_health_check_timeout_ms": "10000"}
# Ray's variables, with their defaults: the control service gives a raylet up after this many probes without an answer; the first variable
# is the pause before each, the second its limit.
_PROBES = "RAY_health_check_failure_threshold", "5"

_GOES_ON = "The run goes on with what it has; whatever is to start waits until it answers"
# What becomes of the run while a head hangs, or a raylet.
_STANDS_STILL = "The run stands still where it needs the object store, which is in that process, until it answers"

# The first bytes of a gRPC client (RFC 9113, 3.4). A running server answers, or hangs up if it speaks TLS; the kernel alone would only
# accept the connection.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class OwnDaemon:
    """A process of a private cluster, which is a child of this one."""

    process: subprocess.Popen[bytes]
    address: str
    """host:port at which it listens."""


@contextlib.contextmanager
def ends_with_the_head(address: str | None, run_dir: Path, last: Callable[[str], object], notify: Notify) -> Iterator[None]:
    """In this context the loss of a joined cluster's head ends this process.

    Args:
        address: host:port of the head's control service; None: there is none to watch.
        last: takes the reason, in another thread; the process ends at most two seconds later.
        notify: takes level and message, in that thread, when the head hangs and when it answers again.
    """
    if address is None:
        yield
        return
    remedy = (
        "and what the cluster knew of this run goes with it. Start a head again (deploy/README.md), then: "
        f"evenkeel train --resume {run_dir}, with ray.address=HOST:PORT if it is another one"
    )
    with _threads(partial(_look, address, f"the head of the Ray cluster at {address}", _GOES_ON, _head_hangs_s(), remedy, last, notify)):
        yield


@contextlib.contextmanager
def ends_with_own_ray(own: Mapping[str, OwnDaemon], run_dir: Path, last: Callable[[str], object], notify: Notify) -> Iterator[None]:
    """In this context the death of a private cluster's control service or raylet ends this process. To be left before the cluster ends.

    Args:
        own: these two, "gcs_server" and "raylet"; none: the cluster is a joined one, and not watched here.
        last, notify: as for ends_with_the_head.
    """
    if not own:
        yield
        return
    service_at, raylet_at = own["gcs_server"].address, own["raylet"].address
    service = f"the control service of this run's own Ray (gcs_server, at {service_at})"
    remedy = f"and the run ends with it. To go on: evenkeel train --resume {run_dir}; with --retries N a run does so by itself"
    # A raylet's agents would look for it for a minute; actors end by themselves.
    left = [below for daemon in own.values() for below in descendants(psutil.Process(daemon.process.pid))]
    ends = [partial(_wait_for_the_end, name, daemon.process, left, remedy, last) for name, daemon in own.items()]
    raylet = f"the raylet of this run's own Ray (process {own['raylet'].process.pid}, at {raylet_at})"
    looks = (
        partial(_look, service_at, service, _GOES_ON, _head_hangs_s(), remedy, last, notify),
        partial(_look, raylet_at, raylet, _STANDS_STILL, _raylet_hangs_s(), remedy, last, notify),
    )
    with _threads(*looks, *ends):
        yield


def _head_hangs_s() -> float:
    """Seconds after which Ray is about to give up a head that hangs."""
    return _limit_s() + _variables_s(_KEEPALIVE_MS)


def _raylet_hangs_s() -> float:
    """Seconds after which Ray's control service has given up a raylet that hangs."""
    return max(_limit_s(), int(os.environ.get(*_PROBES)) * _variables_s(_PROBE_MS))


def _limit_s() -> float:
    return _SHARE * float(os.environ.get(_LIMIT, "60"))


def _variables_s(milliseconds: Mapping[str, str]) -> float:
    """Sum of Ray's variables. Args: milliseconds: name -> Ray's value."""
    return sum(float(os.environ.get(name, usual)) / 1000 for name, usual in milliseconds.items())


@contextlib.contextmanager
def _threads(*watches: Callable[[threading.Event], None]) -> Iterator[None]:
    over = threading.Event()
    for watch in watches:
        threading.Thread(target=watch, args=(over,), name="Ray watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _wait_for_the_end(
    name: str,
    process: subprocess.Popen[bytes],
    left: Sequence[psutil.Process],
    remedy: str,
    last: Callable[[str], object],
    over: threading.Event,
) -> None:
    """Wait until one of Ray's processes ends, and then end this one with a reason, before Ray aborts it at its next call."""
    with contextlib.suppress(ChildProcessError):  # Ray has waited for it
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if over.is_set():
        return
    code = process.wait()
    how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
    _end(f"this run's own Ray is gone: its {name} (process {process.pid}) {how}, {remedy}", last, over, left)


def _look(
    address: str,
    head: str,
    meanwhile: str,
    hangs_limit_s: float,
    remedy: str,
    last: Callable[[str], object],
    notify: Notify,
    over: threading.Event,
) -> None:
    """Args:
    head: what listens at the address, for sentences.
    meanwhile: what becomes of the run while it hangs, likewise.
    hangs_limit_s: the run ends when it has hung for so long.
    """
    limit_s = _limit_s()
    look_s = limit_s / _LOOKS
    seen_s = answered_s = time.monotonic()
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
                f"{head} hangs: it listens, and has answered nothing for {silent_s:.0f} s. {meanwhile}. Ray gives up in the end: after "
                f"{hangs_limit_s:.0f} s this run ends",
            )
        elif hangs and silent_s >= hangs_limit_s:
            why = f"hangs: it has answered nothing for {silent_s:.0f} s"
            break
    _end(f"{head} {why}, {remedy}", last, over)


def _end(text: str, last: Callable[[str], object], over: threading.Event, left: Sequence[psutil.Process] = ()) -> None:
    """Args: left: processes to be ended that may no longer be below this one."""
    over.set()  # the other watches must not report what ends together with this process
    # Printed first: the run folder's disk may be gone with the head.
    signals.end_all(text, 1, last=partial(_last, text, last, left))


def _last(text: str, last: Callable[[str], object], left: Sequence[psutil.Process]) -> None:
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    last(text)


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
