"""An actor of a test, in a module by a name that Ray's workers can import."""

from __future__ import annotations

import asyncio
import os


class BatchMaker:
    """Stands where the correction service stands: a batch that is lost with it."""

    def pid(self) -> int:
        return os.getpid()

    async def make(self) -> None:
        await asyncio.Event().wait()
