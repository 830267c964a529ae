"""A resume reads all of a checkpoint, from a disk that may be slow, or hang."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.commands.resume_point import find_resume_point
from actors.config import RunConfig
from actors.record import disk_at_start
from actors.record.checkpoint_reader import Reading
from actors.record.run_folder import Checkpoint, RunFolder
from correction.errors import DeadlineExceeded
from learner import file_sums


def test_a_disk_that_hangs_is_told_and_ends_the_resume_in_a_sentence(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of the newest checkpoint, which it was reading. The time is that of its bytes, or the table's."""
    find_resume_point(folder, ())  # what it imports takes seconds, too
    is_back = threading.Event()

    def sum_of(path: Path, note: Callable[[int], object]) -> Any:
        note(1000)
        is_back.wait(60.0)
        raise OSError

    monkeypatch.setattr(file_sums, "sum_of", sum_of)
    monkeypatch.setattr(disk_at_start, "_NOTICE_S", 0.2)
    what = "files of the newest checkpoint -> the run folder's disk"
    try:
        with pytest.raises(DeadlineExceeded) as caught:
            find_resume_point(folder, ["deadlines.checkpoint_s=0.3"])
    finally:
        is_back.set()
    read = r"step_000002: 8e-06 of \S+ GB are read"
    remedy = r"When that disk answers again, do the same once more\. The deadline follows from deadlines.checkpoint_s and bytes_per_s"
    assert re.fullmatch(rf"{re.escape(what)}: not done in 1 s \({read}\)\. {remedy}", str(caught.value)), str(caught.value)
    assert re.search(rf"^evenkeel: waiting 0 s for {re.escape(what)} \({read}\)$", capsys.readouterr().err, re.MULTILINE)


def test_a_checkpoint_has_the_time_of_its_bytes() -> None:
    """480 GB at 100 MB/s, and three times as long, as for one that is written; a small one, what the table has."""
    reading, deadlines = Reading(), RunConfig.model_fields["deadlines"].get_default(call_default_factory=True)
    reading.begins(Checkpoint(10, Path("checkpoints/step_000010")))
    assert (reading.limit_s(deadlines), str(reading)) == (deadlines.disk_s, "step_000010")
    reading.is_large(480 * 10**9)
    reading.add(12 * 10**9)
    assert (reading.limit_s(deadlines), str(reading)) == (14400.0, "step_000010: 12 of 480 GB are read")
    began = reading.began
    reading.begins(Checkpoint(5, Path("checkpoints/step_000005")))
    assert (str(reading), reading.began >= began) == ("step_000005", True), "the older one, when this one is damaged, has its own"
