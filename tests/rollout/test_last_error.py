"""Of what a process of SGLang died, as its owner reads it."""

from __future__ import annotations

import logging
from io import StringIO
from pathlib import Path

import pytest

from evenkeel.rollout.sglang_plugin import hooks, last_error


def test_the_first_deadly_exception_is_kept(tmp_path: Path) -> None:
    """Its class and the first line of what it says. Ranks that fail after it fail because of it, and other errors end nothing."""
    file, sglang = tmp_path / "engine.error", logging.getLogger("sglang")
    before = list(sglang.handlers)
    last_error.keep(file)
    try:
        scheduler = logging.getLogger("sglang.srt.managers.scheduler")
        scheduler.error("a request was refused")
        assert last_error.read(file) == ""
        scheduler.error(
            "Scheduler hit an exception: Traceback (most recent call last):\n"
            '  File "runner.py", line 1, in capture\n    raise Exception(\n'
            "RuntimeError: Capture failed: out of memory\nPossible solutions:\n  1. set --mem-fraction-static\nOpen an issue\n"
        )
        scheduler.error("Scheduler hit an exception: Traceback (most recent call last):\nConnectionError: rank 0 is gone")
        assert last_error.read(file) == "RuntimeError: Capture failed: out of memory"
    finally:
        sglang.handlers[:] = before


def test_bars_that_sglang_insists_on_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    from tqdm.std import tqdm

    monkeypatch.setattr(tqdm, "__init__", tqdm.__init__)  # put back after the test
    drawn = StringIO()
    list(tqdm([1, 2], desc="before", disable=False, file=drawn))
    hooks.draw_no_bars()
    assert list(tqdm([1, 2], desc="after", disable=False, file=drawn)) == [1, 2]
    assert "before" in drawn.getvalue() and "after" not in drawn.getvalue()
