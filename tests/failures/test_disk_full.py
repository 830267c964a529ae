"""The disk of a run's folder and of what it prints is full, to the last byte, as a checkpoint comes, and has room again before the third in
a row has failed."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenkeel.actors.record.run_folder import RunFolder
from tests.e2e.launch import RAY_AGENTS, RECIPE, Run
from tests.failures.books import check_books
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS, EVERY, MORE = 16, 3, 2


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """On a file system of its own; what a run prints lies next to it, on the same one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk / "run"
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(*paths: Path) -> None:
    """Append to files until nothing more is taken: the first takes all that is free, the others what is left of their last pages."""
    for path in paths:
        with path.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while file.write(b"\n" * size):
                        pass
                except OSError as error:
                    assert error.errno == errno.ENOSPC


def published_version(run: Run) -> int:
    """The newest version that the run's own endpoint tells: a full disk keeps nothing from it."""
    discovery = re.findall(r"Prometheus service discovery at (\S+)", run.output())[-1]
    targets = json.loads(fetched(discovery))
    (address,) = next(one["targets"] for one in targets if one["labels"]["role"] == "controller")
    return int(float(re.findall(r"^evenkeel_weight_version (\S+)", fetched(f"http://{address}/metrics"), re.MULTILINE)[0]))


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30.0) as answer:
        return str(answer.read().decode())


def test_a_checkpoint_that_found_no_room_is_made_up_for(small_model: Path, run_dir: Path) -> None:
    words = [f"model={small_model}", f"groups_per_step={GROUPS}", f"checkpoint.every_steps={EVERY}", "evaluation.problems=4"]
    run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, "checkpoint.keep=100")
    try:
        folder = RunFolder(run_dir)
        run.wait_until(lambda: len(folder.checkpoints()) >= 1 and len(run.metrics()) >= EVERY + 1, "a step after a checkpoint")
        follows = "training goes on, lines wait in memory; the checkpoint is tried again after the next step, until there is room"
        recovery = Recovery(run, "disk of the run's folder full, and of what it prints", follows)
        fill(run_dir / "ballast", run.log, run_dir / "events.log")
        printed, due = run.log.stat().st_size, folder.checkpoints()[-1].step + EVERY
        ends = time.monotonic() + 300.0
        while published_version(run) <= due:  # a step after the one whose checkpoint finds no room
            assert run.process.poll() is None and time.monotonic() < ends
            time.sleep(0.05)
        assert run.log.stat().st_size == printed
        (run_dir / "ballast").unlink()
        recovery.wait()
        run.wait_until(lambda: folder.checkpoints()[-1].step > due, "the checkpoint that was tried again")
        checkpoints = [one.step for one in folder.checkpoints()]
        made_up = min(step for step in checkpoints if step > due)
        before = len(run.metrics())
        run.wait_until(lambda: len(run.metrics()) >= before + 2, "two more steps")
        assert re.search(rf"^step +{before + 1}/", run.output()[printed:], re.MULTILINE), "it is printed again"
        run.process.send_signal(signal.SIGKILL)  # whatever it would do at its end: what is on the disk is enough
        run.process.wait(30.0)
        assert run.orphans(30.0, but=RAY_AGENTS) == []
    finally:
        run.close()
    assert "in a row failed" not in run.output() and "Traceback" not in run.output()
    assert due not in checkpoints and made_up < due + EVERY, "before the next one is due"
    stop = max(run.steps()) + MORE
    resumed = Run(run_dir, "--resume", str(run_dir), f"steps={stop}")
    try:
        assert resumed.wait() == 0, resumed.output()[-4000:]
    finally:
        resumed.close()
    check_books(resumed, groups_per_step=GROUPS, steps=stop)
