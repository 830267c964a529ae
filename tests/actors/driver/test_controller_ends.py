"""A signal when all is done and saved: the run ends as it would have, and a second one ends it at once. All parts are played."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.driver.controller import RunSummary
from tests.actors.driver.controller_cases import EventsRecorder, controller, nothing

SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}


class DoneRun:
    """A run that is at its last step, or before it, and has evaluated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, step: int = 10, alarm: str = "") -> None:
        self.recorder = EventsRecorder()
        self.run = run = controller(self.recorder)
        run._step, run._alarm = step, alarm
        run._source = SimpleNamespace(keep_scatter=nothing, stop=lambda: None)  # type: ignore[assignment]
        run._checkpoints = SimpleNamespace(finished=nothing, abandon=lambda: None, saved_step=step)  # type: ignore[assignment]
        run._sync = SimpleNamespace(close=nothing)  # type: ignore[assignment]
        run._evaluations, run._pool = SimpleNamespace(abandon=nothing), SimpleNamespace(stop=nothing)  # type: ignore[assignment]
        run._ends.push_async_callback(lambda: run._pool.stop())
        monkeypatch.setattr(run, "_start", nothing)
        monkeypatch.setattr(run, "_until_done", lambda: run._finish(None))

    def summary(self) -> RunSummary:
        return asyncio.run(asyncio.wait_for(self.run.run(), 20.0))


def signalling(number: int, *, times: int = 1) -> Any:
    async def work(*_: Any, **__: Any) -> None:
        for _ in range(times):
            signal.raise_signal(number)
            await asyncio.sleep(0.05)

    return work


@pytest.mark.parametrize("where", ["the last lines", "the end of its parts"])
@pytest.mark.parametrize("name", SIGNALS)
def test_a_complete_run_stays_complete(monkeypatch: pytest.MonkeyPatch, name: str, where: str) -> None:
    """Whoever waits for exit code 0 gets it: nothing is left to be done by a resume."""
    ending = DoneRun(monkeypatch)
    if where == "the last lines":
        ending.run._source.keep_scatter = signalling(SIGNALS[name])  # type: ignore[method-assign]
    else:
        ending.run._pool.stop = signalling(SIGNALS[name])  # type: ignore[method-assign]
    summary = ending.summary()
    assert (summary.exit_code, summary.stopped_early, summary.ended_by, summary.steps) == (0, False, None, 10)
    assert [text for text in ending.recorder.events if "interrupted" in text] == [
        f"[ending] interrupted ({name}): all is done and saved, and the run is ending (next time: at once)"
    ]


@pytest.mark.parametrize("where", ["keep_scatter", "stop"])
def test_a_second_signal_ends_it_at_once_and_it_is_complete_all_the_same(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """In the last lines, or in the end of its parts: how the run ended is known by then."""
    ending = DoneRun(monkeypatch)
    setattr(ending.run._pool if where == "stop" else ending.run._source, where, signalling(signal.SIGTERM, times=2))
    monkeypatch.setattr("evenkeel.actors.processes.signals.SAME_S", 0.0)
    with pytest.raises(asyncio.CancelledError):
        ending.summary()
    assert ending.run.ended_by == signal.SIGTERM
    assert ending.recorder.events[-1] == "[ending] interrupted (SIGTERM): ending at once; all is done and saved"
    assert ending.run.summary is not None and (ending.run.summary.exit_code, ending.run.summary.steps) == (0, 10)


def test_a_run_that_an_alarm_has_ended_says_so_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = DoneRun(monkeypatch, step=4, alarm="reward fell")
    ending.run._source.keep_scatter = signalling(signal.SIGINT)  # type: ignore[method-assign]
    summary = ending.summary()
    assert (summary.exit_code, summary.stopped_early, summary.alarm) == (3, True, "reward fell")


@pytest.mark.parametrize("name", SIGNALS)
def test_a_run_whose_last_evaluation_was_left_out_is_complete(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All its steps are made and saved; only a number is missing."""
    ending = DoneRun(monkeypatch)
    run = ending.run

    async def whole(*_: Any) -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, SIGNALS[name])
        await asyncio.sleep(60.0)

    async def evaluate_and_finish() -> RunSummary:
        return await run._finish(await run._evaluate_last())

    run._evaluations = SimpleNamespace(whole=whole, abandon=nothing)  # type: ignore[assignment]
    monkeypatch.setattr(run, "_until_done", evaluate_and_finish)
    summary = ending.summary()
    assert (summary.exit_code, summary.stopped_early, summary.ended_by, summary.after) == (0, False, None, None)
