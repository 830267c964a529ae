"""Stacks of real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid

from actors.stacks import collect, of_tasks

HANGS = """
import sys, time
from actors.stacks import listen
def waits_for_a_lock_that_nobody_gives_back():
    print("up", flush=True)
    time.sleep(300)
listen("rollout 3", sys.argv[1])
waits_for_a_lock_that_nobody_gives_back()
"""


def test_a_process_that_hangs_says_where_and_one_that_ended_is_left_out() -> None:
    run = uuid.uuid4().hex
    processes = [subprocess.Popen([sys.executable, "-c", HANGS, run], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
        first = collect(run)
        assert len(first) == 2 and all("waits_for_a_lock_that_nobody_gives_back" in text for text in first.values())
        processes[0].kill()
        processes[0].wait()
        (second,) = collect(run).values()
        assert second.count("waits_for_a_lock_that_nobody_gives_back") == 1, "the dump of this time alone"
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert collect(run) == {}


def test_tasks_of_the_loop() -> None:
    async def waits_for_the_queue() -> None:
        await asyncio.sleep(300)

    async def main() -> str:
        task = asyncio.create_task(waits_for_the_queue())
        await asyncio.sleep(0)
        text = of_tasks()
        task.cancel()
        return text

    assert "waits_for_the_queue" in asyncio.run(main())
