"""SIGTERM and Ctrl-C, each to the whole process group, before there is an engine: while libraries are imported, and at two points of the
real Ray's start."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.launch import RECIPE, Run


def imports_ray(run: Run) -> bool:
    return "_raylet" in Path(f"/proc/{run.process.pid}/maps").read_text()


def children(pid: int) -> list[psutil.Process]:
    """As the kernel lists them, where it does: psutil looks at every process of the machine, and in a loop that takes a core."""
    lists = list(Path(f"/proc/{pid}/task").glob("*/children"))
    return [psutil.Process(int(child)) for one in lists for child in one.read_text().split()] if lists else psutil.Process(pid).children()


def has_started(command: str) -> Callable[[Run], bool]:
    return lambda run: any(command in " ".join(child.cmdline()[:1]) for child in children(run.process.pid))


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGTERM, imports_ray),
        (signal.SIGINT, has_started("gcs_server")),
        (signal.SIGTERM, has_started("raylet")),
        pytest.param(signal.SIGTERM, has_started("gcs_server"), marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, has_started("raylet"), marks=pytest.mark.slow),
    ],
    ids=["importing", "control service, Ctrl-C", "daemon", "control service", "daemon, Ctrl-C"],
)
def test_a_signal_ends_a_start_and_leaves_nothing(model: Path, tmp_path: Path, number: int, moment: Callable[[Run], bool]) -> None:
    run = Run(tmp_path / "run", str(RECIPE), f"model={model}", f"run_dir={tmp_path / 'run'}")
    try:
        until = time.monotonic() + 240.0
        while True:
            assert run.process.poll() is None and time.monotonic() < until, run.output()[-4000:]
            try:
                if moment(run):
                    break
            except (psutil.Error, OSError):  # a child, or a thread, that has just ended
                pass
            time.sleep(0.02)  # without a pause the test would take the core that the start needs
        run.signal_group(number)
        assert run.wait(60.0) == 128 + number, run.output()[-4000:]
        said = run.output()
        ended = "evenkeel: " + ("interrupted" if number == signal.SIGINT else "ended by SIGTERM")
        last = [line for line in said.splitlines() if not line.startswith("run folder: ")][-1]  # once there is one, it is named
        assert last.startswith(ended), said[-4000:]
        assert not any(trace in said for trace in ("Traceback", "Exception ignored", "SystemExit")), said[-4000:]
        assert run.orphans(30.0) == [], "Ray's agents neither"
    finally:
        run.close()
