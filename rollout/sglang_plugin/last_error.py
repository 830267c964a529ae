"""Keeps the exception that ends one of SGLang's processes, so that the engine's owner can name it. SGLang only writes it to its log."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

# In SGLang's line about it, followed by the traceback.
_MARK = " hit an exception: "
_LONGEST = 300


class _Keeper(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if _MARK in (message := record.getMessage()):
                with contextlib.suppress(OSError), self._file.open("x") as kept:  # the first that fails: others fail because of it
                    kept.write(_exception(message)[:_LONGEST])
        except Exception:
            self.handleError(record)


def _exception(message: str) -> str:
    """The first line of a traceback's exception, which may be followed by pages of advice."""
    lines = message.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines[-1:]
    return next((line for line in after if line and not line.startswith(" ")), lines[-1]).strip()


def keep(file: Path) -> None:
    """Have a deadly exception written into this file by this process: its class and the first line of what it says."""
    logging.getLogger("sglang").addHandler(_Keeper(file))


def read(file: Path) -> str:
    """What was kept; empty if nothing was, as of a killed process."""
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace")
    return ""
