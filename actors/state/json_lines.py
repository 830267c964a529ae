"""Files of one JSON object a line: they grow by whole lines, and a line that a crash has torn is no obstacle."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from actors.metrics.step_number import step_of

T = TypeVar("T")
_NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors of reading a torn or foreign line: values of other types and sizes. RecursionError: a line of a thousand brackets."""
_TAIL_BYTES = 1 << 17


class JsonLines:
    """One such file; each object has its "step". One process writes, any number read, without a lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add lines: strict JSON, in one write, so that a reader never sees two lines mixed and a crash tears the last one at most.

        Raises: ValueError for a number that isn't finite; OSError if the disk doesn't take them, and the file is as it was.
        """
        self._append_text([json.dumps(record, allow_nan=False) for record in records])

    def read(self, parse: Callable[[dict[str, Any]], T]) -> list[T]:
        """What `parse` makes of each line, in order, as `each`."""
        return list(self.each(parse))

    def each(self, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
        """What `parse` makes of each line, in order, without the others in memory; torn lines, and those that it can't read, are left out.

        Args:
            parse: raises one of _NOT_OURS for what it can't read.
        """
        if not self.path.is_file():
            return
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    found = parse(json.loads(line))
                except _NOT_OURS:
                    continue
                yield found

    def repair(self) -> None:
        """Cut off what follows the last line end: the part of a line that a crash has left, which the next line would join."""
        if not self.path.is_file():
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)

    def rewind(self, step: int, *, to: Path | None = None) -> int:
        """Take out the lines of later steps, and those that can't be read. Returns: how many.

        Args:
            to: they go to the end of this file before they leave the other; None: they are gone.
        Raises: OSError if the disk doesn't take that, and the file is as it was.
        """
        kept: list[str] = []
        taken: list[str] = []
        for line in self._lines():
            (kept if _is_until(step, line) else taken).append(line)
        if taken:
            temporary = self.path.with_name(f".{os.getpid()}.{self.path.name}")
            try:
                temporary.write_text("".join(line + "\n" for line in kept))
                if to is not None:
                    JsonLines(to)._append_text(taken)
                os.replace(temporary, self.path)
            finally:
                temporary.unlink(missing_ok=True)
        return len(taken)

    def _lines(self) -> list[str]:
        return self.path.read_text(errors="replace").splitlines() if self.path.is_file() else []

    def _append_text(self, lines: list[str]) -> None:
        append_whole(self.path, "".join(line + "\n" for line in lines).encode())


def last_step(path: Path) -> int:
    """Step of the last whole line, without reading the others; 0 if there is none. Raises: OSError if the disk doesn't give the file."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return step_of(json.loads(lines[-1])) if lines else 0
    except (FileNotFoundError, *_NOT_OURS):
        return 0


def append_whole(path: Path, content: bytes) -> None:
    """All of it or nothing: a part that a full disk has taken is cut off again. Raises: OSError."""
    with path.open("ab", buffering=0) as file:
        began = file.tell()
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, f"{path}: the disk took a part of the lines only")
        except OSError:
            with suppress(OSError):
                os.truncate(path, began)
            raise


def _is_until(step: int, line: str) -> bool:
    try:
        return step_of(json.loads(line)) <= step
    except _NOT_OURS:
        return False
