"""What safetensors says of a file that it could not write, as other writers of files say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def saving(path: Path) -> Iterator[Path]:
    """Around a call of safetensors' save_file with this path. Raises: OSError in place of SafetensorError: a full disk, most often."""
    try:
        yield path
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
