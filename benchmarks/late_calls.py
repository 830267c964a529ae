"""Delays the calls to a process: stops the thread in which gRPC hands it its calls, while all its other threads go on.

Ray gives that thread a name. It is stopped with ptrace, which the kernel allows an ancestor, and goes on by itself when the process that
stopped it ends. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
# Of wait4: threads, too.
_WALL = 0x40000000
_NAME = "server.poll"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class LateCalls:
    """Of one process, from now until `end`. Used by one thread, which asks `look` now and then."""

    def __init__(self, pid: int) -> None:
        """Raises: OSError if the process has no such thread, or may not be stopped."""
        self._threads: list[int] = []
        try:
            for folder in sorted(Path(f"/proc/{pid}/task").iterdir()):
                if (folder / "comm").read_text().startswith(_NAME):
                    self._stop(int(folder.name))
        except OSError:
            self.end()  # those that were stopped before it
            raise
        if not self._threads:
            raise OSError(f"process {pid} has no thread {_NAME}")

    def _stop(self, thread: int) -> None:
        _trace(_SEIZE, thread)
        self._threads.append(thread)
        _trace(_INTERRUPT, thread)
        os.waitpid(thread, _WALL)

    def look(self) -> None:
        """If the process was killed meanwhile, its parent hears of that when we have."""
        for thread in self._threads:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(thread, os.WNOHANG | _WALL)

    def end(self) -> None:
        """Let the thread go on; it hands on the calls that have come meanwhile."""
        self.look()
        for thread in self._threads:
            with contextlib.suppress(OSError):
                _trace(_DETACH, thread)
        self._threads = []


def _trace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
