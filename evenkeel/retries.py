"""`evenkeel train --retries N`: a small parent that starts the run as a child, and again from its newest checkpoint if that dies or hangs.

It does nothing else: no torch, no Ray, and a thread only to look into the run folder, whose disk may hang or refuse: so there is little in
it that could die. A signal that it gets goes on to the child, which is in a session of its own and gets each once. What a dead child has
left (Ray's daemons, engines, reward processes) becomes a child of this process, as of a small init, and is ended before the next attempt.

What follows from a child's end:

* done, ended by an alarm, or by a signal that asked for it: the end.
* an error, and no attempt has made a step: the end. What the user gave is wrong, and the child has said so.
* anything else is tried again: a kill, a hang, a crash; and an error, because of what it was given the run has already made steps with
  (a judge, a disk, a node, the cluster's head is away).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from evenkeel.actors.carriers import EventLevel
from evenkeel.actors.json_lines import last_step
from evenkeel.actors.processes import signals
from evenkeel.actors.processes.children import HeartbeatListener, adopted_orphans, end_new
from evenkeel.actors.processes.disk import DaemonThreads
from evenkeel.actors.processes.output import put
from evenkeel.actors.processes.pacing import doubled_pause_s
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.stack_summary import FOLDER, next_number
from evenkeel.correction.errors import signal_name
from evenkeel.rollout.module_path import checkout
from evenkeel.rollout.stacks import stacks_of

T = TypeVar("T")
_COMMAND = (sys.executable, "-P", "-m", "evenkeel.cli", "train")
# For each look into the run folder.
_LOOK_S = 10.0
# Pause before the first retry, doubled before each further one, and the longest pause.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# Exit codes after which there is no retry: done, ended by an alarm, ended by one of the signals that ask for it.
_FINAL = (0, 3, *(code for number in signals.SIGNALS for code in (-number, signals.exit_code(number))))


def run_with_retries(recipe: Path | None, words: Sequence[str], run_dir: Path, *, retries: int, discard_groups: bool = False) -> int:
    """Run the training in a child process, and again when that dies, from its newest checkpoint.

    Args:
        recipe: of a new run; None: go on with that of `run_dir`.
        words: settings (KEY=VALUE) for every attempt.
        retries: attempts after the first, at most.
        discard_groups: see with_settings.
    Returns: the exit code for this process: that of the last attempt, as shells count.
    """
    flags, before = ["--discard-groups"] if discard_groups else [], _last_step(run_dir)
    for retry in range(retries + 1):
        is_resumed = recipe is None or (retry > 0 and _has_begun(run_dir))
        arguments = ["--resume", str(run_dir), *flags, *words] if is_resumed else [str(recipe), *words, f"run_dir={run_dir}"]
        with adopted_orphans():
            code, is_asked, silent_s = _attempt(arguments, hangs=partial(_keep_stacks, run_dir))
            _end_leftovers()
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        if silent_s:
            how = f"hung, without a sign of life for {silent_s:.0f} s, and was killed"
        if is_asked and silent_s:
            _say(run_dir, "error", f"the run's process {how}; it had been asked to end, and is not tried again")
        step = _last_step(run_dir)
        if is_asked or code in _FINAL or (code > 0 and step is not None and step == before):
            break
        reason = f"the run's process {how} after {'a step that its disk does not tell' if step is None else f'step {step}'}"
        if retry == retries:
            _say(run_dir, "error", f"{reason}, and --retries {retries} {'has' if retries == 1 else 'have'} been used up")
            break
        pause_s = doubled_pause_s(retry + 1, _PAUSE_S, _LONGEST_PAUSE_S)
        _say(run_dir, "warning", f"{reason}; it goes on from its newest checkpoint in {pause_s:g} s (retry {retry + 1} of {retries})")
        time.sleep(pause_s)
    return code if code >= 0 else signals.exit_code(-code)


def _attempt(arguments: Sequence[str], *, hangs: Callable[[int, float], object]) -> tuple[int, bool, float]:
    """Run one child until it ends; one that hangs is killed.

    Args: hangs: called with its process id, and with seconds of silence, before it is killed.
    Returns: its exit code, negative for a signal; whether a signal to this process asked for its end; and the seconds of silence for which
    it was killed, 0 if it wasn't.
    """
    asked: list[int] = []
    child: subprocess.Popen[bytes] | None = None
    starting = threading.Lock()

    def pass_on(number: int) -> None:
        with starting:
            asked.append(number)
            if child is not None:
                child.send_signal(number)

    with signals.received_by(pass_on), contextlib.closing(HeartbeatListener()) as listener:
        path = os.pathsep.join([*checkout(), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = listener.environment | ({"PYTHONPATH": path} if path else {})
        with starting:
            child = subprocess.Popen([*_COMMAND, *arguments], start_new_session=True, env=environment, pass_fds=(listener.writer,))
            if asked:
                child.send_signal(asked[-1])
        listener.child_has_begun()
        silent_s = _until_its_end(child.pid, listener, hangs)
        code = child.wait()
    return code, bool(asked), silent_s


def _until_its_end(pid: int, listener: HeartbeatListener, hangs: Callable[[int, float], object]) -> float:
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
            hangs(pid, silent_s)
            os.kill(pid, signal.SIGKILL)


def _keep_stacks(run_dir: Path, pid: int, silent_s: float) -> None:
    """Keep in the run folder where a process stands that gives no sign of life, as the run itself keeps it of its parts."""
    why = f"the run's process has given no sign of life for {silent_s:.0f} s"
    parts = [f"=== evenkeel train (process {pid})\n{stacks}" for stacks in stacks_of([pid]).values()]

    def write() -> Path:
        return RunFolder(run_dir).write_text(f"{FOLDER}/{next_number(run_dir):02d}.txt", "\n".join([why, "", *parts]))

    try:
        where = f"where it stands is in {_by_disk(write)}"
    except OSError as error:
        where = f"where it stands could not be written down: {error or 'no answer'}"
    _say(run_dir, "warning", f"{why}, and is killed; {where}")


def _end_leftovers() -> None:
    """End all processes that a child has left: nobody uses them any more, and the next attempt needs their memory."""
    if sys.stdout.isatty():
        put("\x1b[?25h", sys.stdout)  # the cursor, which a live panel hides
    end_new()


def _say(run_dir: Path, level: EventLevel, text: str) -> None:
    """Print a line; add it to the run's events, too, if the run has a folder."""
    put(f"evenkeel: {text}\n", sys.stderr)
    if _has_begun(run_dir):
        with contextlib.suppress(OSError):
            _by_disk(partial(RunFolder(run_dir).event, level, text))


def _last_step(run_dir: Path) -> int | None:
    """Last step of the ledger's lines; 0: there is none. None: the disk doesn't tell."""
    try:
        return _by_disk(partial(last_step, run_dir / "ledger.jsonl"))
    except OSError:
        return None


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
