"""`evenkeel train --retries N`: a small parent that starts the run as a child, and again from its newest checkpoint when the process dies.

It does nothing else: no torch, no Ray, and a thread only to look into the run folder, whose disk may hang or refuse: so there is little in
it that could die. A signal that it gets goes on to the child, which is in a session of its own and gets each once. A child that hangs (it
is stopped, or its event loop is blocked) is killed. What a dead child has left (Ray's daemons, engines, reward processes) becomes a child
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

from evenkeel.actors.json_lines import last_step
from evenkeel.actors.processes import interrupts
from evenkeel.actors.processes.daemon_threads import DaemonThreads
from evenkeel.actors.processes.descendants import adopted_orphans, end_new
from evenkeel.actors.processes.doubled_pause import doubled_pause_s
from evenkeel.actors.processes.driver_heartbeat import HeartbeatListener
from evenkeel.actors.processes.event_level import EventLevel
from evenkeel.actors.processes.long_wait import LongWait
from evenkeel.actors.processes.output import put
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.stack_summary import FOLDER, collections
from evenkeel.correction.errors import signal_name
from evenkeel.rollout.module_path import checkout
from evenkeel.rollout.stacks import stacks_of

T = TypeVar("T")
NOT_AGAIN = 78
"""Exit code of an attempt that was refused by its settings; EX_CONFIG of sysexits.h. Another one would be as well, unless the run has
made a step with them: then what they ask for is away for the moment (a judge, room on a disk, a node)."""
AWAY = 75
"""Exit code of an attempt whose start did not get its data, its model or an answer of a disk; EX_TEMPFAIL of sysexits.h. If the run has
made a step with them, they are away for the moment, too; if not, it is an error as any other."""
_COMMAND = (sys.executable, "-P", "-m", "evenkeel.attempt", "train")
_LOOK_S = 10.0
"""For each look into the run folder."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before the first retry, doubled before each further one, and the longest pause."""
_FINAL = (0, 3, *(code for number in interrupts.SIGNALS for code in (-number, interrupts.exit_code(number))))
"""Exit codes after which there is no retry: done, ended by an alarm, ended by one of the signals that ask for it."""
_MAY_PASS = (-signal.SIGKILL, interrupts.NO_CLUSTER, NOT_AGAIN, AWAY)
"""Ends that say nothing about where the run is: a kill from outside, a lost cluster, whose head may be started again, what a start lacked.
Any other end comes again if it has come twice at one place."""


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
        """Whether the run has got further than `before`; True also where the disk doesn't tell."""
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
        discard_queue: see with_settings.
    Returns: the exit code for this process: that of the last attempt, as shells count.
    """
    flags, before = ["--discard-queue"] if discard_queue else [], Reached.of(run_dir)
    reached = before if recipe is None else Reached()
    for retry in range(retries + 1):
        is_resumed = recipe is None or (retry > 0 and _has_begun(run_dir))
        arguments = ["--resume", str(run_dir), *flags, *words] if is_resumed else [str(recipe), *words, f"run_dir={run_dir}"]
        with adopted_orphans():
            code, is_asked, silent_s = _attempt(arguments, half_over=partial(_keep_stacks, run_dir))
            _end_leftovers()
        if silent_s and is_asked:
            _say(run_dir, "error", f"the run's process {_end_of(code, silent_s)}; it had been asked to end, and is not tried again")
        if is_asked or code in _FINAL or (code in (1, AWAY, interrupts.NO_CLUSTER) and not _has_begun(run_dir)):
            break  # the last: what was wrong has been said, before there was anything to go on with
        now = Reached.of(run_dir)
        if before.unknown and not now.unknown:
            before = now
        if code in (NOT_AGAIN, AWAY) and (before.unknown or not (now.is_beyond(before) or reached.is_beyond(before))):
            if code == NOT_AGAIN:
                break  # it has been said, too
            code = 1
        reason = f"the run's process {_end_of(code, silent_s)} after {now}"
        if retry > 0 and (code not in _MAY_PASS or silent_s) and not now.is_beyond(reached):
            _say(run_dir, "error", f"{reason}, as far as it had come before this retry: it makes no progress, and is not tried again")
            break
        if retry == retries:
            _say(run_dir, "error", f"{reason}, and --retries {retries} {'has' if retries == 1 else 'have'} been used up")
            break
        reached = now.and_before(reached)
        pause_s = doubled_pause_s(retry + 1, _PAUSE_S, _LONGEST_PAUSE_S)
        _say(run_dir, "warning", f"{reason}; it goes on from {now.where()} in {pause_s:g} s (retry {retry + 1} of {retries})")
        time.sleep(pause_s)
    if code in (NOT_AGAIN, AWAY, interrupts.NO_CLUSTER):
        return 1
    return code if code >= 0 else interrupts.exit_code(-code)


def _attempt(arguments: Sequence[str], *, half_over: Callable[[int, HeartbeatListener], None]) -> tuple[int, bool, float]:
    """Run one child until it ends.

    Args: half_over: called with its process id and heartbeat when half of the time for a sign of life is over.
    Returns: its exit code, negative for a signal; whether a signal to this process asked for its end; and the seconds of silence for which
    it was killed, 0 if it wasn't.
    """
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int) -> None:
        asked.append(number)
        if child is not None:
            os.kill(child.pid, number)  # it may have ended, but isn't reaped yet, so the id is still its own

    with interrupts.passed_on(pass_on), contextlib.closing(HeartbeatListener()) as listener:
        command, inherited = [*_COMMAND, *arguments], (listener.writer,)
        path = os.pathsep.join([*checkout(), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = listener.environment | ({"PYTHONPATH": path} if path else {})
        child = subprocess.Popen(command, start_new_session=True, env=environment, pass_fds=inherited)
        listener.child_has_begun()
        if asked:  # while it was started
            os.kill(child.pid, asked[-1])
        silent_s = _until_its_end(child.pid, listener, half_over)
        code = child.wait()
    return code, bool(asked), silent_s


def _until_its_end(pid: int, listener: HeartbeatListener, half_over: Callable[[int, HeartbeatListener], None]) -> float:
    """Wait for the end of a child, killing it if it hangs, and leave it to be reaped. Returns: seconds of silence for which it was killed,
    or 0."""
    silent_s = 0.0
    while True:
        listens = not (silent_s or listener.is_over)
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | (os.WNOHANG if listens else 0))
        if ended is not None and ended.si_pid == pid:
            return silent_s
        if ended is not None:  # an orphan of the child's has ended: reap it
            os.waitpid(ended.si_pid, 0)
        elif listener.hangs():
            silent_s = listener.silent_s
            os.kill(pid, signal.SIGKILL)
        elif listener.is_half_over:
            half_over(pid, listener)


def _keep_stacks(run_dir: Path, pid: int, listener: HeartbeatListener) -> None:
    """Where a process stands that gives no sign of life, as the run's own collector, which is in it, keeps those of others."""
    parts = [f"=== evenkeel train (process {pid})\n{stacks}" for stacks in stacks_of([pid]).values()]

    def write() -> Path:
        number = 1 + max((int(path.stem) for path in collections(run_dir)), default=0)
        wait = LongWait("a sign of life of the run's process")
        return RunFolder(run_dir).write_text(f"{FOLDER}/{number:02d}.txt", "\n".join([str(wait), "", *parts]))

    try:
        where = f"where it stands is in {_by_disk(write)}"
    except OSError as error:
        where = f"where it stands could not be written down: {error or 'no answer'}"
    silent = f"the run's process has given no sign of life for {listener.silent_s:.0f} s"
    _say(run_dir, "warning", f"{silent}, and is killed after {listener.limit_s:.0f}; {where}")


def _end_leftovers() -> None:
    """End all processes that a child has left: nobody uses them any more, and the next attempt needs their memory."""
    if sys.stdout.isatty():
        put("\x1b[?25h", sys.stdout)  # the cursor, which a live panel hides
    end_new()


def _end_of(code: int, silent_s: float) -> str:
    if silent_s:
        return f"hung, without a sign of life for {silent_s:.0f} s, and was killed"
    if code == interrupts.NO_CLUSTER:
        return "found no Ray cluster, or lost its own,"
    if code == NOT_AGAIN:
        return "was refused what its settings ask for, though it has trained with them,"
    if code == AWAY:
        return "did not get its data, its model or an answer of a disk at its start, though it has trained with them,"
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
