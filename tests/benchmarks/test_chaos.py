"""What chaos.py and soak.py do from outside, and what they conclude, without a run."""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
from collections.abc import Iterator
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest

from benchmarks import chaos_books, soak
from benchmarks.chaos import ChaosRun, summary
from benchmarks.chaos_books import HeldOut, RunBooks
from benchmarks.chaos_strikes import KILLED, LATE, Blow, Strike, Strikes, table
from benchmarks.late_calls import LateCalls
from benchmarks.sides import put_between
from benchmarks.soak import Grown, Look, ProcessWatch, Slope, conclusions, memory_of

_TWO_THREADS = """
import ctypes, sys, threading, time

def says(name, word):
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME, of this thread
    while True:
        sys.stdout.write(word)
        sys.stdout.flush()
        time.sleep(0.02)

threading.Thread(target=says, args=(b"server.poll0", "c"), daemon=True).start()
says(b"others", "w")
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", _TWO_THREADS], stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def heard(process: subprocess.Popen[bytes], words: int) -> set[str]:
    """Which threads have said the next so many words."""
    assert process.stdout is not None
    said = b""
    while len(said) < words:
        assert select.select([process.stdout], [], [], 30.0)[0], "silence"
        said += os.read(process.stdout.fileno(), words - len(said))
    return set(said.decode())


def late(process: subprocess.Popen[bytes]) -> LateCalls:
    try:
        return LateCalls(process.pid)
    except PermissionError:
        pytest.skip("the kernel lets nobody stop a thread here")


def test_calls_come_late_while_the_process_goes_on(process: subprocess.Popen[bytes]) -> None:
    assert heard(process, 50) == {"c", "w"}
    calls = late(process)
    heard(process, 20)  # what was in the pipe
    assert heard(process, 50) == {"w"}, "the thread that takes calls stands still, the other doesn't"
    calls.end()
    assert heard(process, 50) == {"c", "w"}


def test_a_process_that_is_called_late_can_be_killed(process: subprocess.Popen[bytes]) -> None:
    """Its parent hears of it when the one that has stopped its thread looks: else a killed actor would stay undead."""
    heard(process, 10)
    calls = late(process)
    process.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    calls.look()
    assert process.wait(30.0) == -9
    calls.end()


def test_a_process_without_calls_is_no_actor() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        with pytest.raises(OSError, match=r"has no thread server\.poll"):
            LateCalls(process.pid)
        process.kill()


def test_a_seed_gives_the_same_blows_with_every_deed() -> None:
    def blows(seed: int) -> list[Blow]:
        chance = random.Random(seed)
        return [Blow.of(chance) for _ in range(300)]

    assert blows(1) == blows(1) != blows(2)
    assert {blow.deed for blow in blows(1)} == {KILLED, "stopped", LATE}
    assert not any(blow.deed == LATE for blow in blows(1) if blow.role in ("scheduler", "scoring process", "driver"))
    kills = [blow for blow in blows(1) if blow.deed == KILLED and blow.role == "learner rank"]
    assert 0 < sum(blow.held_s > 0 for blow in kills) < len(kills), "some of them inside a weight update"


def test_a_fault_is_over_when_the_run_is_further_and_alone_if_nothing_else_came() -> None:
    strikes = Strikes(random.Random(0), every_s=1e9)
    first, second, third = (Strike(at, "driver", "driver killed", "driver killed", step) for at, step in ((10.0, 5), (12.0, 5), (40.0, 7)))
    strikes.told, second.is_alone, first.is_alone = [first, second], False, False
    strikes.watch(lambda: 20.0, lambda: 5)
    assert first.recovered_s is None
    strikes.watch(lambda: 25.0, lambda: 7)
    strikes.told.append(third)
    strikes.watch(lambda: 46.0, lambda: 8)
    assert [one.recovered_s for one in strikes.told] == [15.0, 13.0, 6.0]
    assert table(strikes.told).splitlines()[-1] == "| driver killed | 3 | 1 | 6.0 | 15.0 | 0 |"


def test_the_useful_share_is_told_with_the_faults_a_step(tmp_path: Path) -> None:
    def played(name: str, training_s: float, faults: list[Strike]) -> ChaosRun:
        return ChaosRun(name, tmp_path, 128, 0, training_s, [], faults, RunBooks(40, 40, (128,) * 40, 0, 0, 5120, ()))

    faults = [Strike(float(at), "driver", "driver killed", "driver killed", 5) for at in (10, 20, 30, 40)]
    lines = summary(played("undisturbed", 90.0, []), [played("seed-1", 100.0, faults)]).splitlines()
    assert lines[0].startswith("| run | faults | s of training | useful share | faults a step | ")
    assert lines[2].startswith("| undisturbed | 0 | 90 | 1.00 | 0.00 | ") and lines[3].startswith("| seed-1 | 4 | 100 | 0.90 | 0.10 | ")
    assert lines[-1].startswith("A fault costs 2.5 s in the mean") and "one in 25 s 0.9 of the time is useful" in lines[-1]


def test_a_blow_that_is_never_dealt_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its process a while; a run that nothing befell has shown nothing."""
    monkeypatch.setattr("benchmarks.chaos_strikes.processes_of", lambda _: [])
    strikes, seconds = Strikes(random.Random(3), every_s=10.0), [0.0]
    assert strikes.wrong() == ["nothing befell it"]
    while not strikes.missed:
        strikes.watch(lambda: seconds[0], lambda: 1)
        seconds[0] += 5.0
    assert 60.0 < seconds[0] < 100.0 and len(strikes.wrong()) == 2 and strikes.missed[0][0] in strikes.wrong()[0]
    strikes.told = [Strike(1.0, strikes.missed[0][0], "killed", "killed", 1)]
    assert strikes.wrong() == [], "of its role something was done another time"


def test_the_difference_of_two_shares_has_newcombes_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """His example: 56 of 70 and 48 of 80, 95 %, method 10: 0.0524 to 0.3339."""
    monkeypatch.setattr(chaos_books, "_CONFIDENCE", 0.95)
    assert HeldOut(56 / 70, 70).less(HeldOut(48 / 80, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_books_that_differ_are_named() -> None:
    calm = RunBooks(2, 2, (4, 4), 0, 4, 12, ())
    assert RunBooks(2, 2, (4, 4), 3, 2, 13, ()).differs_from(calm) == [], "what was discarded, and what is under way, may differ"
    assert RunBooks(2, 2, (4, 3), 0, 4, 11, ()).differs_from(calm) == [
        "groups trained: 7 instead of the undisturbed run's 8",
        "groups by step: (4, 3) instead of the undisturbed run's (4, 4)",
    ]


def test_a_slope_is_that_of_least_squares_with_its_error() -> None:
    seconds, noise = np.arange(0.0, 900.0, 10.0), np.random.default_rng(3).normal(0.0, 2.0, 90)
    values = 300.0 + 100.0 / 3600.0 * seconds + noise
    slope = Slope.of(list(seconds), list(values))
    (expected, _), covariance = np.polyfit(seconds, values, 1, cov=True)
    assert slope.an_hour == pytest.approx(3600 * expected) and slope.error == pytest.approx(3600 * np.sqrt(covariance[0, 0]))
    assert slope.is_above(60.0) and not slope.is_above(100.0)


def test_what_grows_is_named() -> None:
    def looks(grows: float) -> list[Look]:
        return [Look(10.0 * i, 200.0 + grows * i + (-1) ** i, 5.0, 30, 12 + (i > 20)) for i in range(90)]

    assert Grown.of("CorrectionService", looks(0.0)).wrong(60.0) == []
    (said,) = Grown.of("CorrectionService", looks(0.5)).wrong(60.0)
    assert said == "its memory grows by +180.0 ± 0.0 MiB an hour, more than 60"


@pytest.mark.parametrize("period_s", [29.0, 30.3, 33.0, 41.0])
def test_what_is_taken_between_two_givings_back_is_no_growth(period_s: float) -> None:
    """A heap that goes up by ever more until it is given back, by 50 and by 250 MiB here; a line through all looks would rise."""

    def looks(an_hour: float) -> list[Look]:
        seconds = [900.0 + 2.06 * i for i in range(437)] + [1800.05]  # the last one alone behind the last window
        teeth = [(50.0 + 200.0 * (s - 900) / 900) * (s % period_s) / period_s for s in seconds]
        return [Look(s, 800.0 + tooth + an_hour * s / 3600, 5.0, 30, 12) for s, tooth in zip(seconds, teeth, strict=True)]

    assert Grown.of("sglang::scheduler", looks(0.0)).wrong(60.0) == []
    (said,) = Grown.of("sglang::scheduler", looks(150.0)).wrong(60.0)
    assert "memory grows" in said


@pytest.mark.parametrize(("an_hour", "is_growth"), [(0.0, False), (150.0, True)])
def test_a_trough_that_no_look_meets_is_no_growth(an_hour: float, is_growth: bool) -> None:
    """A heap that is full again within a second of its giving-back: looks meet a trough in the first five windows, and none after them."""
    seconds = [1800.0 + 2.0 * i for i in range(901)]
    heights = [580.0 if i % 90 == 45 and i < 450 else 880.0 + (-1) ** i for i in range(901)]
    looks = [Look(s, height + an_hour * s / 3600, 5.0, 30, 12) for s, height in zip(seconds, heights, strict=True)]
    assert bool(Grown.of("LearnerRankActor", looks).wrong(60.0)) is is_growth


@pytest.mark.parametrize(("an_hour", "is_growth"), [(0.0, False), (300.0, True)])
def test_growth_is_found_where_troughs_are_chance(an_hour: float, is_growth: bool) -> None:
    """One look in fifty meets a trough of some depth: the line through the least could hide any growth in its error."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        is_trough, seconds = random.random(451) < 0.02, 2.0 * np.arange(451)
        heights = np.where(is_trough, random.uniform(530.0, 800.0, 451), random.normal(900.0, 30.0, 451)) + an_hour * seconds / 3600
        looks = [Look(float(s), float(height), 5.0, 30, 12) for s, height in zip(seconds, heights, strict=True)]
        assert bool(Grown.of("LearnerRankActor", looks).wrong(60.0)) is is_growth, seed


def test_a_table_without_a_part_of_the_run_shows_nothing() -> None:
    flat = [Look(10.0 * i, 200.0 + (-1) ** i, 5.0, 30, 12) for i in range(90)]
    actors = ("RolloutWorker", "CorrectionService", "LearnerRankActor")
    grown = [Grown.of(name, flat) for name in (*actors, "sglang::scheduler", "evenkeel.cli")]
    assert conclusions(grown, Slope(0.0, 1.0), 60.0) == []
    assert conclusions(grown[:2] + grown[3:], Slope(0.0, 1.0), 60.0) == ["learner rank: it was not looked at often enough"]
    assert len(conclusions([], None, 60.0)) == 6
    assert conclusions(grown, Slope(100.0, 1.0), 60.0) == ["shared memory of all processes grows by +100.0 ± 1.0 MiB an hour, more than 60"]


def test_shared_memory_is_that_of_all_processes_together() -> None:
    watch = ProcessWatch()
    first, second = (object(), object())
    watch.looks = {p: [Look(float(i), 1.0, share + i, 1, 1) for i in range(4)] for p, share in ((first, 10.0), (second, 20.0))}  # type: ignore[assignment,misc]
    assert watch.shared(2.0) == ([2.0, 3.0], [34.0, 36.0])


def test_a_process_is_judged_by_the_looks_that_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a look each 2 s came each 2.9 s: what was there at all of them was seen often enough; what came and went, not."""

    class Process:
        def __init__(self, pid: int) -> None:
            self.pid = pid

        def num_fds(self) -> int:
            return 5

        num_threads = num_fds

    always, seldom = Process(1), Process(2)
    present = [always]
    monkeypatch.setattr(soak, "descendants", lambda: present)
    monkeypatch.setattr(soak, "command_of", lambda process: f"python -m process{process.pid}")
    monkeypatch.setattr(soak, "memory_of", lambda pid: (1 << 20, 0))
    watch = ProcessWatch()
    for i in range(200):
        present[1:] = [seldom] if i % 2 else []
        watch.look(2.9 * i)
    assert [one.name for one in watch.grown(0.0)] == ["process1"]


@pytest.mark.skipif(sys.platform != "linux", reason="as the kernel of Linux tells it")
def test_memory_of_ones_own_is_what_was_touched() -> None:
    own, shared = memory_of(os.getpid())
    block = mmap(-1, 64 << 20, MAP_PRIVATE | MAP_ANONYMOUS)  # fresh pages, whatever the allocator keeps
    for offset in range(0, len(block), PAGESIZE):
        block[offset] = 1
    memory = SharedMemory(create=True, size=32 << 20)
    try:
        for offset in range(0, memory.size, PAGESIZE):  # 32 MiB of bytes at once might stay in the heap, and count as our own
            memory.buf[offset] = 1
        now_own, now_shared = memory_of(os.getpid())
    finally:
        memory.close()
        memory.unlink()
    assert now_own - own == pytest.approx(len(block), rel=0.1)
    assert now_shared - shared == pytest.approx(32 << 20, rel=0.1)


def test_a_part_of_a_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- soak -->\nold\n<!-- /soak -->\nafter\n")
    put_between(page, "soak", "new")
    assert page.read_text() == "before\n<!-- soak -->\nnew\n<!-- /soak -->\nafter\n"
    with pytest.raises(ValueError, match="has no <!-- chaos -->"):
        put_between(page, "chaos", "new")
