"""The manifest of a checkpoint: size and checksum of every file. It is written after all files, and verified before any is read.

XXH3 (64 bits) finds damage by disks, networks and interrupted copies, at several GB/s; it doesn't protect against forgery. The writer of a
large file leaves its sum in a file next to it (`leave_sum`), so that nobody else has to read the file again for the manifest.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from evenkeel.correction.errors import DataError

T = TypeVar("T")
MANIFEST = "manifest.json"
"""File of a checkpoint, and of its folder of the learner, where it says what the learner does of its own files (checkpoint_files.py)."""
# Suffix of the files that `leave_sum` writes.
_LEFT = ".xxh3"
_CHUNK_BYTES = 4 << 20
# What a disk or a file system says of data that it has lost. All else (a stale handle, a deadline, no permission, too many open files) may
# pass, and says nothing of the file.
_DAMAGE = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
# Files read at a time: a network file system gives one reader a part of what it has.
_THREADS = 8


def sum_of(path: Path, note: Callable[[int], object] = lambda _: None) -> dict[str, Any]:
    """{"bytes": size, "xxh3": 16 hexadecimal digits} of a file. Args: note: takes the bytes of each piece that is read. Raises: OSError."""
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            note(len(chunk))
    return {"bytes": size, "xxh3": digest.hexdigest()}


def leave_sum(path: Path) -> None:
    """Write a file's sum to a file next to it, for `seal`. To be called right after the file was written, while it is in the page cache."""
    path.with_name(path.name + _LEFT).write_text(json.dumps(sum_of(path)))


def seal(folder: Path, about: dict[str, Any]) -> None:
    """Write the manifest of all files under a folder. They must be on disk: the manifest is the last file of a checkpoint.

    Args:
        about: further entries of the manifest.
    Raises: DataError if a file has another size than `leave_sum` saw; OSError.
    """
    paths = list(_files(folder))
    sums = dict(zip((path.relative_to(folder).as_posix() for path in paths), _side_by_side(_left_or_found, paths), strict=True))
    for left in [*folder.rglob(f"*{_LEFT}")]:
        left.unlink()
    content = {**about, "files": sums}
    path = folder / MANIFEST
    path.write_text(json.dumps({**content, "xxh3": _own_sum(content)}, indent=1) + "\n")
    flush_to_disk(path)


def flush_to_disk(path: Path) -> None:
    """Make a file, or a rename inside a folder, outlive a power cut. Raises: OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest_of_files(folder: Path) -> dict[str, Any]:
    """The manifest. Raises: DataError if it is missing or damaged; OSError, as all here, for what may pass."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{folder}: not complete, it has no {MANIFEST}, which is written last")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        is_whole = content.pop("xxh3") == _own_sum(content)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: damaged, no manifest can be read from it ({type(error).__name__}: {error})") from error
    if not is_whole:
        raise DataError(f"{path}: damaged, its content is not what its own checksum says")
    return content


def verify(folder: Path, manifest: dict[str, Any], note: Callable[[int], object] = lambda _: None) -> list[str]:
    """Compare every file with the manifest. Returns: files that the manifest doesn't name; nothing reads them.

    Args: note: takes the bytes of each piece that is read, in whatever thread reads it.
    Raises: DataError naming the first file that is missing, of another size or content, or that could be read in place of a saved one;
        OSError naming the first that the disk doesn't give now.
    """
    files: dict[str, dict[str, Any]] = manifest["files"]
    extra = sorted({path.relative_to(folder).as_posix() for path in _files(folder)} - set(files))
    if foreign := [name for name in extra if name.endswith((".safetensors", ".safetensors.index.json"))]:
        raise DataError(f"{folder / foreign[0]}: not in the manifest, but its tensors could be read in place of saved ones. Move it away")
    for name, expected in files.items():  # sizes first: checking them takes no time
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path}: is not there, but the manifest has it with {expected['bytes']} bytes")
        if path.stat().st_size != expected["bytes"]:
            raise DataError(f"{path}: damaged, {path.stat().st_size} bytes long instead of {expected['bytes']}")
    for name, found in zip(files, _side_by_side(lambda path: _sum_found(path, note), [folder / name for name in files]), strict=True):
        if found != files[name]:
            raise DataError(f"{folder / name}: damaged, its checksum is {found['xxh3']} instead of {files[name]['xxh3']}")
    return extra


def _side_by_side(work: Callable[[Path], T], paths: list[Path]) -> Iterator[T]:
    """Results of the work on each path, in order, _THREADS at a time. Raises: the first error in that order; no other file is begun then.

    Daemon threads: those of an executor are waited for when the process ends, and a disk that hangs would keep it for good.
    """
    todo = deque((path, Future[T]()) for path in paths)
    results = [future for _, future in todo]

    def take() -> None:
        while todo:
            try:
                path, future = todo.popleft()
            except IndexError:  # another thread was first
                return
            try:
                future.set_result(work(path))
            except BaseException as error:
                future.set_exception(error)

    for _ in range(min(_THREADS, len(paths))):
        threading.Thread(target=take, name="files of a checkpoint", daemon=True).start()
    try:
        for future in results:
            yield future.result()
    finally:
        todo.clear()


def _files(folder: Path) -> Iterator[Path]:
    """All files of the folder except the manifest and the files of `leave_sum`."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST and not path.name.endswith(_LEFT):
            yield path


def _left_or_found(path: Path) -> dict[str, Any]:
    left = path.with_name(path.name + _LEFT)
    if not left.is_file():
        return sum_of(path)
    found: dict[str, Any] = json.loads(left.read_text())
    if found["bytes"] != path.stat().st_size:
        raise DataError(f"{path}: {path.stat().st_size} bytes are on disk, but {found['bytes']} were written")
    return found


def unreadable(path: Path, error: OSError, damage: str = "it can't be read") -> DataError | OSError:
    """What a file's error is to whoever reads it: damage, or an OSError with the file's name, which one of reading has not."""
    if may_pass(error) is None:  # one without a number is of a library that reads the file itself
        return DataError(f"{path}: damaged, {damage} ({type(error).__name__}: {error})")
    return OSError(error.errno, error.strerror, str(path))


def may_pass(error: BaseException) -> OSError | None:
    """What a disk has said, in an error or as its cause, that may pass; None: damage, or no disk's word."""
    said = error if isinstance(error, OSError) else error.__cause__
    return said if isinstance(said, OSError) and said.errno is not None and said.errno not in _DAMAGE else None


def _sum_found(path: Path, note: Callable[[int], object]) -> dict[str, Any]:
    try:
        return sum_of(path, note)
    except OSError as error:
        raise unreadable(path, error) from error


def _own_sum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_64(json.dumps(content, sort_keys=True).encode()).hexdigest()
