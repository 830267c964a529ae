"""`evenkeel train --retries N`: a small parent that starts the run as a child, and again from its newest checkpoint when the process dies.

It does nothing else: no torch, no Ray, and a thread only to look into the run folder, whose disk may hang or refuse: so there is little in
it that could die. A signal that it gets goes on to the child,
which is in a session of its own and gets each once. What a dead child has left (Ray's daemons, engines, reward processes) becomes a child
of this process, as of a small init, and is ended before the next attempt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from actors.processes import interrupts
from actors.processes.daemon_threads import DaemonThreads
from actors.processes.descendants import adopted_orphans, end_new
from actors.processes.event_level import EventLevel
from actors.processes.output import put
from actors.record.run_folder import RunFolder
from actors.state.json_lines import last_step
from correction.errors import signal_name

T = TypeVar("T")
NOT_AGAIN = 78
"""Exit code of an attempt with wrong settings, which another attempt would have as well; EX_CONFIG of sysexits.h."""
_COMMAND = (sys.executable, "-m", "actors.commands.attempt", "train")
_LOOK_S = 10.0
"""For each look into the run folder."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before the first retry, doubled before each further one, and the longest pause."""
_FINAL = (0, 3, NOT_AGAIN, *(code for number in interrupts.SIGNALS for code in (-number, interrupts.exit_code(number))))
"""Exit codes after which there is no retry: done, ended by an alarm, wrong settings, ended by one of the signals that ask for it."""


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a run has come."""

    checkpoint: int = 0
    """Step of the newest checkpoint."""
    step: int = 0
    """The last finished step."""
    unknown: str = ""
    """Why neither is known; empty: they are."""

    @classmethod
    def of(cls, run_dir: Path) -> Reached:
        def look() -> Reached:
            checkpoints = RunFolder(run_dir).checkpoints()
            return cls(checkpoints[-1].step if checkpoints else 0, last_step(run_dir / "ledger.jsonl"))

        try:
            return _by_disk(look)
        except OSError as error:
            return cls(unknown=str(error) or "no answer")

    def is_beyond(self, before: Reached) -> bool:
        """Or may be."""
        return bool(self.unknown) or self.checkpoint > before.checkpoint or self.step > before.step

    def where(self) -> str:
        """What the next attempt goes on from."""
        if self.unknown:
            return "its newest checkpoint"
        return f"the checkpoint of step {self.checkpoint}" if self.checkpoint else "its beginning (it has no checkpoint)"

    def __str__(self) -> str:
        return f"a step that its disk doesn't tell ({self.unknown})" if self.unknown else f"step {self.step}"

    def and_before(self, before: Reached) -> Reached:
        """The larger value of both, field by field."""
        return Reached(max(self.checkpoint, before.checkpoint), max(self.step, before.step))


def run_with_retries(recipe: Path | None, words: Sequence[str], run_dir: Path, *, retries: int, discard_queue: bool = False) -> int:
    """Run the training in a child process, and again when that dies, from its newest checkpoint.

    Args:
        recipe: of a new run; None: go on with that of `run_dir`.
        words: settings (KEY=VALUE) for every attempt.
        retries: attempts after the first, at most.
        discard_queue: see find_resume_point.
    Returns: the exit code for this process: that of the last attempt, as shells count.
    """
    flags, reached = ["--discard-queue"] if discard_queue else [], Reached()
    if recipe is None:
        reached = Reached.of(run_dir)
    for retry in range(retries + 1):
        is_resumed = recipe is None or (retry > 0 and _has_begun(run_dir))
        arguments = ["--resume", str(run_dir), *flags, *words] if is_resumed else [str(recipe), *words, f"run_dir={run_dir}"]
        with adopted_orphans():
            code, is_asked = _attempt(arguments)
            _end_leftovers()
        if is_asked or code in _FINAL or (code in (1, interrupts.NO_CLUSTER) and not _has_begun(run_dir)):
            break  # the last: what was wrong has been said, before there was anything to go on with
        now = Reached.of(run_dir)
        reason = f"the run's process {_end_of(code)} after {now}"
        # A kill from outside says nothing about the run, nor does a lost cluster, whose head may be started again. What ends by itself
        # twice at one place will do so again.
        if retry > 0 and code not in (-signal.SIGKILL, interrupts.NO_CLUSTER) and not now.is_beyond(reached):
            _say(run_dir, "error", f"{reason}, as far as it had come before this retry: it makes no progress, and is not tried again")
            break
        if retry == retries:
            _say(run_dir, "error", f"{reason}, and --retries {retries} {'has' if retries == 1 else 'have'} been used up")
            break
        reached = now.and_before(reached)
        pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2**retry)
        _say(run_dir, "warning", f"{reason}; it goes on from {now.where()} in {pause_s:g} s (retry {retry + 1} of {retries})")
        time.sleep(pause_s)
    if code in (NOT_AGAIN, interrupts.NO_CLUSTER):
        return 1
    return code if code >= 0 else interrupts.exit_code(-code)


def _attempt(arguments: Sequence[str]) -> tuple[int, bool]:
    """Run one child until it ends. Returns: its exit code, negative for a signal; and whether a signal to this process asked for its
    end."""
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int) -> None:
        asked.append(number)
        if child is not None:
            os.kill(child.pid, number)  # it may have ended, but isn't reaped yet, so the id is still its own

    with interrupts.passed_on(pass_on):
        child = subprocess.Popen([*_COMMAND, *arguments], start_new_session=True)
        if asked:  # while it was started
            os.kill(child.pid, asked[-1])
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            if ended is not None and ended.si_pid == child.pid:
                break
            if ended is not None:  # an orphan of the child's has ended: reap it
                os.waitpid(ended.si_pid, 0)
        code = child.wait()
    return code, bool(asked)


def _end_leftovers() -> None:
    """End all processes that a child has left: nobody uses them any more, and the next attempt needs their memory."""
    if sys.stdout.isatty():
        put("\x1b[?25h", sys.stdout)  # the cursor, which a live panel hides
    end_new()


def _end_of(code: int) -> str:
    if code == interrupts.NO_CLUSTER:
        return "found no Ray cluster, or lost its own,"
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal_name(-code)}"


def _say(run_dir: Path, level: EventLevel, text: str) -> None:
    """Print a line; add it to the run's events, too, if the run has a folder."""
    put(f"evenkeel: {text}\n", sys.stderr)
    if _has_begun(run_dir):
        with contextlib.suppress(OSError):
            _by_disk(partial(RunFolder(run_dir).event, level, text))


def _has_begun(run_dir: Path) -> bool:
    """The run has come as far as its folder. One whose disk refuses or hangs counts as there: a resume says what is wrong with it."""
    try:
        return _by_disk((run_dir / "config.yaml").is_file)
    except OSError:
        return True


def _by_disk(look: Callable[[], T]) -> T:
    """Raises: as `look`; TimeoutError, which is an OSError, after _LOOK_S; OSError if the machine has no thread left."""
    try:
        return DaemonThreads().submit(look).result(_LOOK_S)
    except RuntimeError as error:  # can't start new thread
        raise OSError(str(error)) from error
