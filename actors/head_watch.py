"""Ends the run with a message when the head node of a joined Ray cluster is gone, before Ray kills this process without one.

Every process of Ray, the driver too, exits when it has not reached the head's control service (GCS) for a minute. Until then calls that
need the service block, and may block the event loop. So a thread watches the head's port and ends the process. A checkpoint is no longer
possible then: calls to actors need that service.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import ray

from actors import interrupts
from actors.cluster import check_listening
from actors.config import RayConfig

_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's variable: seconds after which its processes exit; 60 if it isn't set."""
_SHARE = 0.5
"""Share of those seconds after which the head counts as gone. A head with GCS fault tolerance may come back before."""
_LOOKS = 6
"""Attempts to connect within that time."""


@contextlib.contextmanager
def ends_with_the_head(settings: RayConfig, run_dir: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """In this context the loss of the head ends this process. Nothing is watched for a private cluster, or one joined by ray://.

    Args: tell: takes the reason, in another thread; the process ends at most two seconds later.
    """
    if settings.address is None or settings.address.startswith("ray://"):
        yield
        return
    over = threading.Event()
    address = ray.get_runtime_context().gcs_address if settings.address == "auto" else settings.address
    threading.Thread(target=_look, args=(address, over, run_dir, tell), name="head watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _look(address: str, over: threading.Event, run_dir: Path, tell: Callable[[str], object]) -> None:
    limit_s = _SHARE * float(os.environ.get(_LIMIT, "60"))
    seen_s = time.monotonic()
    while time.monotonic() - seen_s < limit_s:
        if over.wait(limit_s / _LOOKS):
            return
        with contextlib.suppress(OSError):
            check_listening(address, limit_s / _LOOKS)
            seen_s = time.monotonic()
    text = (
        f"the head of the Ray cluster at {address} is gone: nothing has listened there for {limit_s:.0f} s, and what the cluster knew of "
        f"this run went with it. Start a head again (deploy/README.md), then: evenkeel train --resume {run_dir}, with "
        "ray.address=HOST:PORT if it is another one"
    )
    # Printed first: the run folder's disk may be gone with the head.
    interrupts.end_all(text, interrupts.NO_CLUSTER if interrupts.is_attempt else 1, last=partial(tell, text))
