"""A clock for waits of `by_disk_at_start`, so that no busy machine lets a deadline come before a notice."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.processes import disk


def notice_first(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Time stands still until the wait for `what` has had its first notice, which comes after a tenth of a second."""
    told, began, wait_notice = list[str](), time.monotonic(), disk.WaitNotice

    def noted(named: str, *rest: Any) -> Any:
        told.append(named)
        return wait_notice(named, *rest)

    def now() -> float:
        return time.monotonic() if any(named.startswith(what) for named in told) else began

    monkeypatch.setattr(disk, "WaitNotice", noted)
    monkeypatch.setattr(disk, "_NOTICE_S", 0.1)
    monkeypatch.setattr(disk, "time", SimpleNamespace(monotonic=now))
