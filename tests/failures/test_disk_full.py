"""The disk of a run's folder is full, to the last byte, as a checkpoint comes, and has room again before the third in a row has failed."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.record.run_folder import RunFolder
from tests.e2e.launch import RAY_AGENTS, RECIPE, Run
from tests.failures.books import check_books
from tests.failures.measured import Recovery

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUPS, EVERY, MORE = 16, 3, 2


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own; what a run prints lies beside it."""
    folder = tmp_path / "run"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """With a file that takes all that is free."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


def test_a_checkpoint_that_found_no_room_is_made_up_for(small_model: Path, run_dir: Path) -> None:
    words = [f"model={small_model}", f"groups_per_step={GROUPS}", f"checkpoint.every_steps={EVERY}", "evaluation.problems=4"]
    run = Run(run_dir, str(RECIPE), f"run_dir={run_dir}", *words, "checkpoint.keep=100")
    try:
        folder = RunFolder(run_dir)
        run.wait_until(lambda: len(folder.checkpoints()) >= 1 and len(run.metrics()) >= EVERY + 1, "a step after a checkpoint")
        follows = "training goes on, lines wait in memory; the checkpoint is tried again after the next step, until there is room"
        recovery = Recovery(run, "disk of the run's folder full", follows)
        fill(run_dir / "ballast")
        # Its events may find no room either: what there is to say goes to the terminal, too.
        failed = re.compile(r"the checkpoint of step (\d+) failed")
        run.wait_until(lambda: failed.search(run.output()) is not None, "a checkpoint to fail")
        (run_dir / "ballast").unlink()
        tried = int(failed.findall(run.output())[0])
        recovery.wait()
        run.wait_until(lambda: folder.checkpoints()[-1].step > tried, "the checkpoint that was tried again")
        made_up = min(one.step for one in folder.checkpoints() if one.step > tried)
        before = len(run.metrics())
        run.wait_until(lambda: len(run.metrics()) >= before + 2, "two more steps")
        run.process.send_signal(signal.SIGKILL)  # whatever it would do at its end: what is on the disk is enough
        run.process.wait(30.0)
        assert run.orphans(30.0, but=RAY_AGENTS) == []
    finally:
        run.close()
    assert "in a row failed" not in run.output() and "Traceback" not in run.output()
    assert made_up < tried + EVERY, "before the next one is due"
    stop = max(run.steps()) + MORE
    resumed = Run(run_dir, "--resume", str(run_dir), f"steps={stop}")
    try:
        assert resumed.wait() == 0, resumed.output()[-4000:]
    finally:
        resumed.close()
    check_books(resumed, groups_per_step=GROUPS, steps=stop)
