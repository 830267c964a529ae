"""A wait that is half over has the stacks collected, once; and what the doctor makes of them."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.processes.supervision import HALF_OVER, LongWait, wait_for
from evenkeel.actors.record import stack_collector
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.stack_collector import StackCollector
from evenkeel.actors.record.stack_summary import newest_stack_summary
from evenkeel.correction.errors import DeadlineExceeded
from evenkeel.rollout.stacks import register_stack_dump
from tests.actors.simulated_time import simulate

TEXT = """half of the time for learner step 3 <- rank 0 is over

=== ray::LearnerRankActor.step (process 12)
Thread 0x00007fc1 (most recent call first):
  File "/lib/threading.py", line 982 in run

Current thread 0x00007fc2 (most recent call first):
  File "/lib/torch/distributed/c10d.py", line 5 in all_reduce
  File "/repo/learner/training/step.py", line 300 in _gather

=== sglang::scheduler (process 13)
says nothing; state T (stopped)
"""


def test_the_gist_names_the_functions_in_which_each_process_stood(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks/01.txt").write_text("of another wait\n")
    (tmp_path / "stacks/02.txt").write_text(TEXT)
    assert newest_stack_summary(tmp_path) == (
        "02.txt (half of the time for learner step 3 <- rank 0 is over):",
        "ray::LearnerRankActor.step (process 12): c10d:5 all_reduce < step:300 _gather",
        "sglang::scheduler (process 13): says nothing; state T (stopped)",
    )
    (tmp_path / "stacks/03.txt").write_text("the first rollout worker (no deadline)\n")  # as earlier versions wrote
    assert newest_stack_summary(tmp_path) == ("03.txt (the first rollout worker (no deadline)):",)
    assert newest_stack_summary(tmp_path / "none") == ()


def test_an_actor_of_coroutines_stands_where_its_event_loop_stands(tmp_path: Path) -> None:
    """Its main thread waits for calls all the time."""
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks/01.txt").write_text(
        "a batch\n\n=== ray::CorrectionService (process 7)\n"
        'Thread 0x1 (most recent call first):\n  File "/repo/correction/correct.py", line 9 in correct\n'
        '  File "/lib/asyncio/base_events.py", line 600 in run_forever\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/lib/ray/_private/worker.py", line 900 in main_loop\n'
    )
    assert newest_stack_summary(tmp_path)[1] == "ray::CorrectionService (process 7): correct:9 correct < base_events:600 run_forever"


def test_an_actor_with_a_heartbeat_stands_where_its_call_stands(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks/01.txt").write_text(
        "a step\n\n=== ray::LearnerRankActor.step (process 7)\n"
        'Thread 0x0 (most recent call first):\n  File "/lib/threading.py", line 9 in wait\n\n'
        'Thread 0x1 (most recent call first):\n  File "/repo/learner/training/step.py", line 9 in step\n'
        '  File "/lib/ray/_private/function_manager.py", line 700 in actor_method_executor\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/lib/ray/_private/worker.py", line 900 in main_loop\n'
    )
    _, line = newest_stack_summary(tmp_path)
    assert line == "ray::LearnerRankActor.step (process 7): step:9 step < function_manager:700 actor_method_executor"


def test_a_long_wait_is_told_once_when_half_of_its_deadline_is_over() -> None:
    """Neither one that ends before, nor a short one, nor one that was asked for elsewhere."""
    told: list[tuple[LongWait, float]] = []

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        with pytest.raises(DeadlineExceeded):
            await wait_for(asyncio.sleep(1000), "elsewhere", deadline_s=100.0)
        HALF_OVER.set(lambda wait: told.append((wait, clock() - began)))
        began = clock()
        await wait_for(asyncio.sleep(40), "quick", deadline_s=100.0)
        with pytest.raises(DeadlineExceeded):
            await wait_for(asyncio.sleep(1000), "short", deadline_s=59.0)
        began = clock()
        with pytest.raises(DeadlineExceeded):
            await wait_for(asyncio.sleep(1000), "long", deadline_s=100.0, notice_s=7.0, notice=lambda _: None)

    simulate(scenario)
    assert told == [(LongWait("long"), pytest.approx(50.0, abs=0.01))]


def test_collections_are_few_and_in_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process and of each living node's. Waits of one kind within two minutes are one collection, and so are any two at the same
    time; each pause of a kind is twice the last: a run of weeks that is slow each hour has its stacks each hour, and the newest twenty."""
    now = [1000.0]
    events: list[str] = []
    folder: Any = SimpleNamespace(path=tmp_path, write_text=lambda name, text: wrote(name, text))

    def wrote(name: str, text: str) -> Path:
        (tmp_path / "stacks").mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    async def of_node(_: StackCollector, node: str) -> list[str]:
        return [f"=== a process of {node}\nstands\n"]

    monkeypatch.setattr(stack_collector.ray, "nodes", lambda: [{"NodeID": "n1", "Alive": True}, {"NodeID": "n2", "Alive": False}])
    monkeypatch.setattr(StackCollector, "_of_node", of_node)
    monkeypatch.setattr(stack_collector.time, "monotonic", lambda: now[0])

    async def scenario() -> None:
        collector = StackCollector(folder, lambda _, text: events.append(text))
        for number in range(26):
            waits = LongWait(f"wait {number}", number != 1), LongWait(f"wait {number} again"), LongWait("another one at the same time")
            for wait in waits:
                collector.half_over(wait)
                assert collector._collecting is not None
                await collector._collecting
            now[0] += min(130.0 * 2**number, 3700.0)
        now[0] = 1e6
        for what in ("learner step 7", "heartbeat of worker 3", "learner step 8"):
            collector.half_over(LongWait(what))
            await collector._collecting
            now[0] += 20.0
        assert collector._number == 28, "another kind need not wait for the first one's pause"

    asyncio.run(scenario())
    files = sorted(path.name for path in (tmp_path / "stacks").iterdir())
    assert files == [f"{number:02d}.txt" for number in range(9, 29)] and len(events) == 28
    text = (tmp_path / "stacks/09.txt").read_text()
    assert text.startswith("half of the time for wait 8 is over\n\n") and "=== a process of n1\nstands" in text
    assert StackCollector(folder, print)._number == 28, "a resume goes on counting"


def test_a_head_that_hangs_leaves_the_drivers_own_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped control service answers no list of nodes, and a driver that waits for it is what one wants to see."""
    wakes = threading.Event()
    monkeypatch.setattr(stack_collector.ray, "nodes", wakes.wait)
    monkeypatch.setattr(stack_collector, "_NODE_S", 0.2)
    folder = RunFolder.create(tmp_path / "run", "run")
    register_stack_dump()

    async def scenario() -> None:
        collector = StackCollector(folder, folder.event)
        collector.half_over(LongWait("a batch <- rollout workers"))
        assert collector._collecting is not None
        try:
            async with asyncio.timeout(60.0):
                await collector._collecting
        finally:
            wakes.set()

    asyncio.run(scenario())
    text = (folder.path / "stacks/01.txt").read_text()
    assert text.startswith("half of the time for a batch <- rollout workers is over\n") and f"(process {os.getpid()})\n" in text
    assert "=== other processes: list of nodes <- head of the Ray cluster: not done in 0 s" in text
    folder.close()
