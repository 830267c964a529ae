"""What a run does in threads while its event loop goes on, and how the loop ends with them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenkeel.actors.processes.disk import DaemonThreads

ROOT = Path(__file__).parents[3]
HANGS = """
import asyncio, time
from types import SimpleNamespace
from evenkeel.actors.driver.controller import run_controller

async def run():
    reading = asyncio.ensure_future(asyncio.to_thread(time.sleep, 1000))
    await asyncio.sleep(0.1)
    raise SystemExit("the disk hangs")

run_controller(SimpleNamespace(run=run), silence_s=600.0)
"""


def test_a_thread_that_hangs_does_not_keep_a_run_from_its_end() -> None:
    """Neither the loop's end waits for it, nor the interpreter's."""
    done = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (1, "the disk hangs\n")


def test_calls_run_side_by_side_and_what_is_short_is_done_at_the_end() -> None:
    done = list[int]()

    def fails() -> None:
        raise OSError("no space left")

    def short() -> None:
        time.sleep(0.2)
        done.append(1)

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        assert sorted(await asyncio.gather(*(asyncio.to_thread(pow, base, 2) for base in range(50)))) == [base**2 for base in range(50)]
        with pytest.raises(OSError, match="no space left"):
            await asyncio.to_thread(fails)
        in_thread = asyncio.ensure_future(asyncio.to_thread(short))
        await asyncio.sleep(0.05)
        in_thread.cancel()

    asyncio.run(scenario())
    assert done == [1]
