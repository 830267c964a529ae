"""What this process prints: a disk that is full, or a pipe whose reader has gone, ends no run and doesn't change how one has ended."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Any, TextIO


class UnfailingStream:
    """A stream that drops what can't be written and raises nothing: what is printed stands in the run folder, too.

    A disk may have room again, so each text is tried. A pipe never gets a second reader: /dev/null takes its place in this process.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Args: stream: None: this process was started without one, and all is dropped."""
        self._stream = stream if stream is not None else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # as long as the process

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: it is closed
            _refused(self._stream, error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            _refused(self._stream, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def put(text: str, stream: TextIO | None) -> None:
    """Print a text as it is, if that can be."""
    unfailing = UnfailingStream(stream)
    unfailing.write(text)
    unfailing.flush()


def prepare_streams() -> None:
    """For a command: `keep_exit_code`, and what standard output can't encode is escaped there, as Python does on standard error.

    That is half a surrogate pair: a byte of a file's name that isn't UTF-8, or a text from outside that was cut.
    """
    keep_exit_code()
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def keep_exit_code() -> None:
    """Python flushes its streams at the end and, where one can't take what it holds, exits with code 120 instead of the one that was meant:
    what can't be written then is dropped before."""
    atexit.unregister(_drop_the_rest)  # a second call changes nothing
    atexit.register(_drop_the_rest)


def _drop_the_rest() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                _to_nowhere(stream)


def _refused(stream: TextIO, error: Exception) -> None:
    if isinstance(error, BrokenPipeError):
        _to_nowhere(stream)


def _to_nowhere(stream: TextIO) -> None:
    """What the stream holds, and all that comes, goes to /dev/null."""
    with suppress(OSError, ValueError):  # it is none of the system's, or closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def refused_file(error: OSError) -> str:
    """Which file the system refuses, and why. Raises: the error itself if it names none."""
    if not isinstance(error.filename, str):
        raise error
    return f"{error.filename}: {error.strerror}"
