"""Runs the controller in an event loop: with threads that can't keep the process alive, and signs of life for whoever watches it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from actors.processes import interrupts
from actors.processes.daemon_threads import DaemonThreads
from actors.processes.driver_heartbeat import beating

if TYPE_CHECKING:  # imports for seconds
    from actors.driver.controller import Controller
    from actors.driver.run_summary import RunSummary


def run_controller(controller: Controller, *, silence_s: float) -> RunSummary:
    """The run, to its end. Args: silence_s: after so long without a sign of life it counts as hung.

    Raises: Interrupted if a signal has ended it at once.
    """
    try:
        return asyncio.run(_run_with_daemon_threads(controller, silence_s))
    except asyncio.CancelledError:
        if controller.ended_by is None:
            raise
        raise interrupts.Interrupted(controller.ended_by) from None


async def _run_with_daemon_threads(controller: Controller, silence_s: float) -> RunSummary:
    """Run with threads that don't keep the process alive if they hang, on its disk above all."""
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    with beating(silence_s):
        return await controller.run()
