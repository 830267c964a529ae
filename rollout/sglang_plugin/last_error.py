"""The exception of which one of SGLang's processes dies, for the engine's owner: SGLang itself writes it to its log and nowhere else."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

_MARK = " hit an exception: "
"""In SGLang's line about it, followed by the traceback."""
_LONGEST = 300


class _Keeper(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        lines = record.getMessage().strip().splitlines()
        if _MARK in record.getMessage():
            with contextlib.suppress(OSError), self._file.open("x") as kept:  # the first that fails: others fail because of it
                kept.write(lines[-1].strip()[:_LONGEST])


def keep(file: Path) -> None:
    """Have the last line of a deadly exception's traceback written into this file, by this process."""
    logging.getLogger("sglang").addHandler(_Keeper(file))


def read(file: Path) -> str:
    """What was kept; empty if nothing was, as of a killed process."""
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace")
    return ""
