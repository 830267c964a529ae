"""Turns safetensors' error for a file that could not be written into an OSError, as other writers of files raise it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def saving(path: Path) -> Iterator[Path]:
    """To be put around a call of safetensors' save_file with this path. Raises: OSError instead of SafetensorError, as for a full disk."""
    try:
        yield path
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
