"""An engine is lost when it gives no sign of life and computes nothing, and for nothing else. In simulated time."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from evenkeel.rollout.engine import heartbeat
from evenkeel.rollout.engine.heartbeat import kernels_are_compiled, until_engine_lost
from tests.actors.simulated_time import simulate

LIMIT_S = 30.0
FOREVER_S = 1e9


class FrozenFrom:
    """Answers at once until `freezes_at`, and again from `wakes_at` on; uses `share` of a processor all the time that it lives,
    and its other ranks theirs."""

    def __init__(self, *, freezes_at: float, wakes_at: float = FOREVER_S, share: float = 0.0, others: Sequence[float] = ()) -> None:
        self.freezes_at, self.wakes_at, self.share, self.others = freezes_at, wakes_at, share, others
        self.probes = 0
        self.silences: list[float] = []

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def probe(self, deadline_s: float) -> bool:
        self.probes += 1
        if self.freezes_at <= self.now < self.wakes_at:
            await asyncio.sleep(deadline_s)
        return not self.freezes_at <= self.now < self.wakes_at

    def silent(self, seconds: float) -> None:
        self.silences.append(seconds)

    def cpu_s(self) -> list[float]:
        return [share * self.now for share in (self.share, *self.others)]


def lost_at(
    engine: FrozenFrom,
    *,
    is_excused: Callable[[], bool] = lambda: False,
    compiles: Callable[[], bool] = lambda: False,
    within_s: float = 2000.0,
) -> tuple[float, str] | None:
    """(seconds, why), or None if it still counts as living after `within_s`."""
    found: list[tuple[float, str]] = []

    async def scenario() -> None:
        try:
            async with asyncio.timeout(within_s):
                watch = until_engine_lost(
                    engine.probe, engine.cpu_s, limit_s=LIMIT_S, is_excused=is_excused, compiles=compiles, silent=engine.silent
                )
                why = await watch
                found.append((engine.now, why))
        except TimeoutError:
            return

    simulate(scenario)
    return found[0] if found else None


def test_a_frozen_engine_is_lost_after_three_probes_in_vain() -> None:
    """Three probes of 10 s, the first of which begins at most 5 s after it froze."""
    found = lost_at(FrozenFrom(freezes_at=100.0))
    assert found is not None and 130.0 <= found[0] <= 135.0
    assert "no answer to 3 probes" in found[1] and "computed nothing" in found[1]


def test_an_engine_at_a_long_pass_has_ten_times_as_long() -> None:
    assert lost_at(FrozenFrom(freezes_at=100.0, wakes_at=350.0, share=0.5)) is None
    engine = FrozenFrom(freezes_at=100.0, share=0.5)
    found = lost_at(engine)
    assert max(engine.silences[:-15]) == pytest.approx(0.5 * LIMIT_S), "half of its time is over at the fifteenth of thirty probes"
    assert found is not None and 400.0 <= found[0] <= 405.0 and "though its processes compute" in found[1]


def test_a_rank_that_stands_is_not_excused_by_one_that_computes() -> None:
    """Which waits for it in a loop, say. At a long pass all of them compute."""
    found = lost_at(FrozenFrom(freezes_at=100.0, share=1.0, others=[0.0]))
    assert found is not None and 130.0 <= found[0] <= 135.0 and "one of its 2 ranks computed nothing" in found[1]
    assert lost_at(FrozenFrom(freezes_at=100.0, wakes_at=350.0, share=1.0, others=[0.06])) is None


def test_an_engine_that_waits_for_a_kernel_has_ten_times_as_long() -> None:
    """Which other processes compile, perhaps another engine's. Seen on an H200: of three engines that began at once one was lost."""
    assert lost_at(FrozenFrom(freezes_at=100.0, wakes_at=350.0), compiles=lambda: True) is None
    found = lost_at(FrozenFrom(freezes_at=100.0), compiles=lambda: True)
    assert found is not None and 400.0 <= found[0] <= 405.0


def test_a_compiler_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it. (Of a real one's name there could be somebody else's.)"""
    monkeypatch.setattr(heartbeat, "_COMPILERS", frozenset({"cicc-of-a-test"}))
    compiler = tmp_path / "cicc-of-a-test"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", compiler)
    assert not kernels_are_compiled()
    with subprocess.Popen([compiler, "60"]) as process:
        assert kernels_are_compiled()
        process.kill()
    assert not kernels_are_compiled()


def test_two_missed_probes_are_none() -> None:
    """But they are known: at half of the limit the stacks of the run are asked for."""
    engine = FrozenFrom(freezes_at=100.0, wakes_at=118.0)
    assert lost_at(engine) is None
    assert [seconds for seconds in engine.silences if seconds] == [10.0] and engine.silences[-1] == 0.0


def test_what_it_is_excused_for_has_a_deadline_of_its_own() -> None:
    """A broadcast ends when its sender sends, however long that takes."""
    assert lost_at(FrozenFrom(freezes_at=100.0), is_excused=lambda: True) is None


def test_an_engine_that_answers_is_asked_every_few_seconds() -> None:
    engine = FrozenFrom(freezes_at=FOREVER_S)
    assert lost_at(engine, within_s=100.0) is None
    assert engine.probes == pytest.approx(100.0 / 5.0, abs=1)
