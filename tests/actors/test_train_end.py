"""How the command ends a run that a signal has ended."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from actors import interrupts
from actors.commands import train
from correction.errors import DataError


@pytest.mark.parametrize(
    ("error", "within_s", "reports"),
    [(interrupts.Interrupted(signal.SIGTERM), 2.0, 0), (DataError("a row"), 30.0, 1)],
    ids=["SIGTERM", "its own error"],
)
def test_a_run_that_a_signal_ended_at_once_waits_two_seconds_for_its_disk(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, within_s: float, reports: int
) -> None:
    """The run's event loop has taken the signal, and the process may be killed in seconds: no time for a report either."""
    closed, reported = list[float](), list[object]()

    def ends(text: str) -> None:
        raise error

    config = SimpleNamespace(steps=3, name="x", model="m", batch_arithmetic=lambda: "4 groups")
    observer = SimpleNamespace(
        event=lambda *_: None, keep_event=lambda *_: None, phase=ends, close=lambda *, within_s: closed.append(within_s)
    )
    folder: Any = SimpleNamespace(path="run", checkpoints=list)
    monkeypatch.setattr(train, "TerminalView", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(train, "Observer", lambda *_: observer)
    monkeypatch.setattr(train, "Controller", lambda *_, **__: None)
    monkeypatch.setattr(train, "_report", reported.append)
    with pytest.raises(type(error)):
        train._run_in(folder, config, None, [], None)  # type: ignore[arg-type]
    assert closed == [within_s] and len(reported) == reports
