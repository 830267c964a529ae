"""Reading a small file that the user's code has written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

LARGEST = 1 << 16
"""Most bytes of such a file: a reward of 128 parts with long names has less."""


def read_small_file(path: Path) -> bytes:
    """Its bytes. A link is not followed, and a pipe that nobody writes to not waited for.

    Raises: OSError; ValueError for what is no regular file, or larger.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise ValueError("it is no regular file")
        written = file.read(LARGEST + 1)
    if len(written) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    return written
