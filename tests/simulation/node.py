"""Machines with their part of the object store, and what goes with one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray.exceptions

from tests.simulation.ref import Ref


class Node:
    """A machine: workers, and the store with what their calls have returned in addition to the answers."""

    def __init__(self, cluster: Any, name: str) -> None:
        self._cluster, self.name = cluster, name
        self.is_leaving = self.is_gone = self.hangs = False
        """Its store is; a read from it is never answered, then."""
        self.gone_at = 0.0
        self.on_stored: Callable[[], object] | None = None
        self.on_read: Callable[[], object] | None = None
        """Are told once: of the next value that is stored here, and of the next that is read."""

    def stores(self, ref: Ref) -> None:
        ref.place = self
        told, self.on_stored = self.on_stored, None
        if told is not None:
            told()

    async def read(self) -> None:
        """A value comes from here. Raises: ObjectLostError if it is gone."""
        told, self.on_read = self.on_read, None
        if told is not None:
            told()
        await asyncio.sleep(self._cluster.delay(f"read from {self.name[-4:]}", 0.001, 0.3))
        if self.is_gone and self.hangs:
            await self._cluster.loop.create_future()
        if self.is_gone:
            raise ray.exceptions.ObjectLostError("0" * 56, b"", "")  # type: ignore[no-untyped-call]
