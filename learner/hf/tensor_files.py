"""Writes of safetensors files as other writers of files do them: with OSError for what can't be written, and the mode of any new file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


@contextmanager
def saving(path: Path) -> Iterator[Path]:
    """A block around a call of safetensors' save_file with this path. Raises: OSError instead of SafetensorError, as for a full disk.

    save_file puts a temporary file in the path's place, which its owner alone may read. The file has the mode that any new one would have
    there (the umask's), or the one that it had.
    """
    path.touch()
    mode = path.stat().st_mode & 0o7777
    try:
        yield path
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    if path.stat().st_mode & 0o7777 != mode:
        path.chmod(mode)


def save_model(model: Any, folder: Path) -> None:
    """transformers' save_pretrained of a model, with files of the mode that its config.json has. Raises: OSError, as `saving`."""
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(f"{folder}: {error}") from error
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / "config.json").stat().st_mode & 0o7777)
