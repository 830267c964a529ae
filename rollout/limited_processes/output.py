"""What a process with limits prints: handed on by its guardian, and no more than PRINTED_BYTES in PRINTED_S of each of its two outputs.

A tool that prints without end would fill the disk with the log of its worker."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping

PRINTED_BYTES, PRINTED_S = 1 << 20, 600
_LEFT_OUT = f"\n[more than {PRINTED_BYTES >> 20} MiB printed within {PRINTED_S // 60} minutes; the rest of it is left out]\n".encode()
_PIECE = 1 << 16
# Seconds that the last words may take after the process has ended.
_LAST_S = 1.0

Pipes = Mapping[int, tuple[int, int]]
"""(reading end, writing end), by the descriptor of the output."""


def write_to(pipes: Pipes) -> None:
    """For the child: its outputs are these pipes."""
    for output, (reading, writing) in pipes.items():
        os.dup2(writing, output)
        os.close(reading)
        os.close(writing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # or a process that is killed takes its words along


@contextlib.contextmanager
def handed_on(pipes: Pipes) -> Iterator[None]:
    """For the guardian: a block in which it hands on what comes."""
    threads = [threading.Thread(target=_hand_on, args=(reading, output), daemon=True) for output, (reading, _) in pipes.items()]
    for _, writing in pipes.values():
        os.close(writing)
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(_LAST_S)


def _hand_on(reading: int, output: int) -> None:
    """Read to the end, also where nothing can be written any more: the child must not wait for that. It does wait for a reader of the
    worker's own output that is there and doesn't read."""
    left, until = PRINTED_BYTES, time.monotonic() + PRINTED_S
    while piece := os.read(reading, _PIECE):
        if time.monotonic() > until:
            left, until = PRINTED_BYTES, time.monotonic() + PRINTED_S
        if left >= 0:
            with contextlib.suppress(OSError):
                _write(output, piece[:left] + (_LEFT_OUT if len(piece) > left else b""))
            left -= len(piece)


def _write(output: int, data: bytes) -> None:
    while data:
        data = data[os.write(output, data) :]
