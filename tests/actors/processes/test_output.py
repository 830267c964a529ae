"""A run prints to a full disk, or into a pipe whose reader has gone: it goes on, and ends with the code that was meant."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.processes.output import UnfailingStream, put
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.terminal import TerminalView
from evenkeel.cli import main
from tests.e2e.launch import ROOT, environment


class Disk(io.RawIOBase):
    """What is written to it, while it has room."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full, self.content = True, b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.content += bytes(data)
        return len(data)


def stream_on(disk: Disk) -> TextIO:
    """Buffered as the interpreter's own."""
    return io.TextIOWrapper(io.BufferedWriter(disk), encoding="utf-8", line_buffering=True)


@pytest.fixture
def broken() -> Iterator[TextIO]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


def show_a_run(view: TerminalView) -> None:
    view.phase("training")
    view.event("warning", "a reward raised")
    view.step(StepMetrics(3, {"reward/mean": 0.5, "worker/tokens/0": 5, "worker/tokens/1": 6}))
    view.evaluation(StepMetrics(3, {"held_out/accuracy": 0.5, "held_out/wilson_low": 0.4, "held_out/wilson_high": 0.6}))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_a_full_disk_refuses_is_not_shown_and_what_comes_later_is(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    disk = Disk()
    monkeypatch.setattr("sys.stdout", stream_on(disk))
    view = TerminalView(10, "a run")
    show_a_run(view)
    assert disk.content == b""
    disk.is_full = False
    view.event("info", "there is room again")
    view.close("the end")
    assert b"there is room again" in disk.content and b"the end" in disk.content


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_pipe_that_nobody_reads_ends_nothing(is_terminal: bool, monkeypatch: pytest.MonkeyPatch, broken: TextIO) -> None:
    """Nor does it stay: what a library prints on it later would be an error there."""
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout", broken)
    view = TerminalView(10, "a run")
    show_a_run(view)
    view.close("the end")
    assert os.readlink(f"/proc/self/fd/{broken.fileno()}") == os.devnull
    print("a library's", file=broken, flush=True)


def test_an_event_that_neither_its_file_nor_the_terminal_takes_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder.create(tmp_path / "run", "x") as folder:
        folder.events_path.mkdir()
        monkeypatch.setattr("sys.stderr", stream_on(Disk()))
        folder.event("warning", "the disk is full")
        folder.events_path.rmdir()
        folder.event("warning", "half of a character: \udce9")
        assert [event.text for event in folder.read_events()] == [r"half of a character: \udce9"]


def test_without_a_stream_or_with_a_closed_one_nothing_is_printed(broken: TextIO) -> None:
    put("x", None)
    closed = stream_on(full := Disk())
    full.is_full = False
    closed.close()
    put("x", closed)
    assert full.content == b""


def test_what_an_encoding_lacks_is_a_question_mark() -> None:
    disk = Disk()
    disk.is_full = False
    stream = UnfailingStream(io.TextIOWrapper(io.BufferedWriter(disk), encoding="ascii"))
    stream.write("0.5 → 0.9\n")
    stream.flush()
    assert disk.content == b"0.5 ? 0.9\n"


ENDS = """
import resource, sys
from evenkeel.actors.processes.output import keep_exit_code, put
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
keep_exit_code()
put("a step", sys.stdout)
sys.exit({code})
"""


def test_a_command_prints_a_name_that_is_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's, with a byte of another encoding in it, which stands in Python's text as half a surrogate pair."""
    (name := tmp_path / "run-\udce9").mkdir()
    (name / "config.yaml").write_text("name: x\nsteps: 10\n")
    disk = Disk()
    disk.is_full = False
    monkeypatch.setattr("sys.stdout", stream_on(disk))
    monkeypatch.setattr("sys.argv", ["evenkeel", "doctor", str(name)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and rb"run-\udce9 " in disk.content


@pytest.mark.parametrize("code", ["0", "3", "'a sentence'"])
def test_a_run_that_can_not_print_ends_with_its_own_exit_code(code: str, tmp_path: Path) -> None:
    """Without that it would be 120, which `--retries` takes for a crash. The kernel's limit stands for a full disk."""
    buffered = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", ENDS.format(code=code)]
        ended = subprocess.run(command, stdout=log, stderr=log, env=buffered, cwd=ROOT, check=False)
    assert ended.returncode == (int(code) if code.isdigit() else 1) and (tmp_path / "log").stat().st_size == 0
