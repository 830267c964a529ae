"""Output that can't fail: a full disk, or a pipe whose reader has gone, neither ends a run nor changes its exit code."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Any, TextIO


class UnfailingStream:
    """A stream that drops what can't be written, and raises nothing. The run folder has the same texts.

    A disk may have room again later, so each text is tried. A pipe never gets a second reader, so /dev/null takes its place in this
    process.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Args: stream: None, if this process was started without one: everything is dropped."""
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
    """Print a text as it is; drop it if that fails."""
    unfailing = UnfailingStream(stream)
    unfailing.write(text)
    unfailing.flush()


def prepare_streams() -> None:
    """Prepare a command's output: call `keep_exit_code`, and have standard output escape what it can't encode, as standard error does.

    UTF-8 can't encode half a surrogate pair: it stands for a byte of a file's name that isn't UTF-8, or comes from a text that was cut.
    """
    keep_exit_code()
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def keep_exit_code() -> None:
    """Drop, at the end of the process, output that can't be written. Otherwise Python's own flush of the streams would fail, and the exit
    code would be 120 instead of the intended one."""
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
    """Redirect the stream to /dev/null, with what its buffer holds."""
    with suppress(OSError, ValueError):  # it has no file descriptor, or is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def refused_file(error: OSError) -> str:
    """Name of the file in an OSError, and the reason. Raises: the error itself if it names no file."""
    if not isinstance(error.filename, str):
        raise error
    return f"{error.filename}: {error.strerror}"
