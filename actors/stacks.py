"""What each process of a run is doing: the stacks of its threads, asked for by a signal, so that a process that hangs answers too."""

from __future__ import annotations

import asyncio
import faulthandler
import io
import os
import re
import signal
import tempfile
import time
from pathlib import Path

_SIGNAL = signal.SIGUSR2
_WRITTEN_S = 0.5
"""A signalled process has written its stacks within so long; faulthandler's handler runs no Python code."""


def listen(name: str, run: str) -> None:
    """From now on this process writes the stacks of all its threads to a file of its own when `collect` asks. Any thread may call it.

    Args:
        name: of the part, as it stands in notices: "rollout 3".
        run: tells the processes of one run from another's on the same machine.
    """
    folder = _folder(run)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{os.getpid()}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.txt"
    faulthandler.register(_SIGNAL, file=path.open("w"), all_threads=True, chain=False)  # the file stays open as long as the process


def collect(run: str) -> dict[str, str]:
    """The stacks of all processes of a run on this node that listen, by name; files of those that have ended are removed."""
    asked: dict[str, tuple[Path, int]] = {}
    for path in sorted(_folder(run).glob("*.txt")):
        pid, _, name = path.stem.partition("-")
        try:
            size = path.stat().st_size
            os.kill(int(pid), _SIGNAL)
        except (ProcessLookupError, PermissionError, FileNotFoundError):
            path.unlink(missing_ok=True)
            continue
        asked[name if name not in asked else path.stem] = (path, size)
    time.sleep(_WRITTEN_S)
    return {name: path.read_text(errors="replace")[size:] for name, (path, size) in asked.items()}


def of_tasks() -> str:
    """The stacks of all tasks of the running event loop: who waits for whom in the run's own process."""
    text = io.StringIO()
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        task.print_stack(file=text)
        text.write("\n")
    return text.getvalue()


def _folder(run: str) -> Path:
    return Path(tempfile.gettempdir()) / f"evenkeel-stacks-{os.getuid()}" / run
