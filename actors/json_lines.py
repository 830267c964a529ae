"""Files of one JSON object a line: they grow by whole lines, and a line that a crash has torn is no obstacle."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
# Errors of reading a torn or foreign line: values of other types and sizes. RecursionError: a line of a thousand brackets.
_NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_TAIL_BYTES = 1 << 17
_PIECE_BYTES = 1 << 20
# Whole numbers below have a double of their own, as plots need it.
_MOST_STEPS = 1 << 53


class _StepAlone(msgspec.Struct):
    step: int


_DECODER = msgspec.json.Decoder(_StepAlone)


class JsonLines:
    """One such file. In those of a run each object has its "step", and no line's step is before that of the line above.

    One process writes, any number read, without a lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add lines: strict JSON, in one write, so that a reader never sees two lines mixed and a crash tears the last one at most.

        Raises: ValueError for a number that isn't finite; OSError if the disk doesn't take them, and the file is as it was.
        """
        append_whole(self.path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode())

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

    def last(self, count: int, parse: Callable[[dict[str, Any]], T]) -> list[T]:
        """The last `count` of what `each` gives, in order; only the end of the file is read."""
        found: list[T] = []
        lines = self._from_the_end()
        while len(found) < count and (line := next(lines, None)) is not None:
            with suppress(*_NOT_OURS):
                found.append(parse(json.loads(line[1].decode(errors="replace"))))
        return found[::-1]

    def steps(self) -> set[int]:
        """Steps of all lines that can be read. Nothing else of them is in memory; of a gigabyte this takes seconds."""
        found = set[int]()
        if self.path.is_file():
            with self.path.open("rb") as file:
                for line in file:
                    with suppress(*_NOT_OURS):
                        found.add(step_of_line(line))
        return found

    def repair(self) -> None:
        """Cut off what follows the last line end: the part of a line that a crash has left, which the next line would join."""
        begin, torn = next(self._from_the_end(), (0, b""))
        if torn:
            os.truncate(self.path, begin)

    def rewind(self, step: int, *, to: Path | None = None) -> int:
        """Take out all lines after the last one of this step or an earlier one, whether they can be read or not. Returns: how many.

        The file is read from its end, as far as it is taken back; one of any length costs what it loses. A line before that can't be read
        stays where it is, and readers leave it out. What follows the last line end is taken out, whatever its step, even if it is a whole
        line: nothing says that all of it is there.

        Args:
            to: they go to the end of this file before they leave the other; None: they are gone.
        Raises: OSError if the disk doesn't take that, and the file is as it was.
        """
        lines = self._from_the_end()
        cut, torn = next(lines, (0, b""))
        taken = int(bool(torn))
        for begin, line in lines:
            if _is_until(step, line):
                break
            cut, taken = begin, taken + 1
        if taken:
            if to is not None:
                _append(to, self._lines_from(cut))
            os.truncate(self.path, cut)
        return taken

    def _from_the_end(self) -> Iterator[tuple[int, bytes]]:
        """(where it begins, the line without its end) of each, the last one first. The first of all is what follows the last line end:
        empty, unless a crash has torn a line."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            at = file.seek(0, os.SEEK_END)
            later: list[bytes] = []  # parts of the line whose beginning isn't read yet, the last one first
            while at:
                size = min(_TAIL_BYTES, at)
                at -= size
                file.seek(at)
                block = file.read(size)
                end = len(block)
                while (line_end := block.rfind(b"\n", 0, end)) >= 0:
                    yield at + line_end + 1, b"".join([block[line_end + 1 : end], *reversed(later)])
                    later, end = [], line_end
                later.append(block[:end])
            yield 0, b"".join(reversed(later))

    def _lines_from(self, begin: int) -> Iterator[bytes]:
        """All from there on, in pieces, with a line end at the last."""
        piece = b""
        with self.path.open("rb") as file:
            file.seek(begin)
            while read := file.read(_PIECE_BYTES):
                yield (piece := read)
        if not piece.endswith(b"\n"):
            yield b"\n"


def step_of(record: Mapping[str, Any]) -> int:
    """Step of a line's object. Raises: KeyError, TypeError or ValueError if it has none."""
    step = record["step"]
    if type(step) is not int or not 0 <= step < _MOST_STEPS:
        raise ValueError(f"step = {step}: no number of a step")
    return step


def step_of_line(line: bytes) -> int:
    """Step of a line of JSON. The whole line is checked to be JSON, but nothing else in it is kept: a tenth of the time of json.loads.

    Raises: as json.loads, which may also raise RecursionError, and step_of.
    """
    try:
        step = _DECODER.decode(line).step
    except msgspec.MsgspecError:  # it refuses more than json does (NaN, for one), and has errors of its own
        return step_of(json.loads(line.decode(errors="replace")))
    return step_of({"step": step})


def last_step(path: Path) -> int:
    """Step of the last line that can be read; 0 if there is none. Raises: OSError if the disk doesn't give the file."""
    return next(iter(JsonLines(path).last(1, step_of)), 0)


def append_whole(path: Path, content: bytes) -> None:
    """All of it or nothing: a part that a full disk has taken is cut off again. Raises: OSError."""
    _append(path, (content,))


def _append(path: Path, pieces: Iterable[bytes]) -> None:
    """The work of append_whole, one piece after another."""
    with path.open("ab", buffering=0) as file:
        began = file.tell()
        try:
            for piece in pieces:
                if file.write(piece) != len(piece):
                    raise OSError(errno.ENOSPC, f"{path}: the disk took a part of the lines only")
        except OSError:
            with suppress(OSError):
                os.truncate(path, began)
            raise


def _is_until(step: int, line: bytes) -> bool:
    try:
        return step_of_line(line) <= step
    except _NOT_OURS:
        return False
