"""What the benchmark of asynchrony says of a gain: its share of the ideal, and of what cores allow that slow each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import async_vs_sync
from benchmarks.async_vs_sync import Phases


def test_a_gain_is_told_as_a_share_of_the_ideal_and_of_what_the_cores_allow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Phases of 1 s each could be 2 times as fast; two processes that compute at once at 0.8 and 0.9 of one's speed allow 1.7 times."""
    speeds = iter([0.8, 0.9])
    step_s = {"sync": 2.0, "async": 1.25, "sync-two-threads": 1.5}

    def run(run_dir: Path, steps: int, *overrides: str) -> Phases:
        return Phases(step_s[run_dir.name.rpartition("-")[0]], 1.0, 1.0, 0.0, 0.0, 1.0)

    monkeypatch.setattr(async_vs_sync, "run", run)
    monkeypatch.setattr(async_vs_sync, "evenkeel", lambda *_: "")
    monkeypatch.setattr(async_vs_sync, "speed_at_once", lambda: next(speeds))
    monkeypatch.setattr("sys.argv", ["async_vs_sync.py", "--pairs", "2"])
    async_vs_sync.main()
    said = capsys.readouterr().out
    assert said.count("ideal 2.00, reached 80% of it") == 2
    assert said.count("these cores, slower at once than alone, allow 1.70; reached 94% of that") == 2
    assert "80% of the ideal, 94% of what these cores allow" in said
