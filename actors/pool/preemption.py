"""Notices that a rollout worker will be taken away: of its node, which Ray drains, or of its process, which gets a SIGTERM.

Ray drains a node when its machine is reclaimed (the cloud's notice, passed on by the autoscaler), when `ray start --block` gets a SIGTERM,
as it does in a pod that is ended, or when somebody asks for it (`ray drain-node`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray

log = logging.getLogger("evenkeel.pool")
_POLL_S = 1.0
_RPC_S = 5.0


async def watch_nodes(on_drain: Callable[[str, float | None], None], on_gone: Callable[[str], None] = lambda node: None) -> None:
    """Report each node that Ray drains, once; never returns.

    Args:
        on_drain: takes the node's id and the seconds until it goes; None: nobody says when.
        on_gone: takes the id of a node that Ray drains no more: it is gone. Spot nodes come and go for weeks.
    """
    reported: set[str] = set()
    while True:
        try:
            draining = await asyncio.to_thread(_draining_nodes)
        except Exception as error:  # the head may be busy, or restarting: the next answer is as good
            log.debug("nodes that Ray drains: %s", error)
        else:
            for node in draining.keys() - reported:
                deadline_ms = draining[node]
                on_drain(node, max(0.0, deadline_ms / 1000 - time.time()) if deadline_ms else None)
            for node in reported - draining.keys():
                on_gone(node)
            reported = set(draining)
        await asyncio.sleep(_POLL_S)


def _draining_nodes() -> dict[str, int]:
    """Node id -> when it goes, milliseconds since 1970; 0: not known."""
    worker: Any = ray._private.worker.global_worker
    found: dict[str, int] = worker.gcs_client.get_draining_nodes(timeout=_RPC_S)
    return found


class EndNotice:
    """Has a SIGTERM to an actor's process set `received`, instead of ending the process at once. The sender may kill it later.

    Signal handlers run in the main thread, where an async actor runs nothing. Ray has a handler there, which looks up a function in Ray's
    module when the signal comes: this replaces that function.
    """

    def __init__(self) -> None:
        self.received = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        module: Any = ray._private.worker
        module.raise_sys_exit_with_custom_error_message = self._note

    def _note(self, *_: Any, **__: Any) -> None:
        self._loop.call_soon_threadsafe(self.received.set)
