"""Which folder a new run gets, and who owns it: one process, by a lock that the kernel releases when it ends."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import filelock

from evenkeel.correction.errors import ConfigError, require_utf8

FOLDERS = ("tensorboard", "trajectories", "checkpoints")
WANDB_ID = "wandb_id"
_BEFORE_NUMBERS = {*FOLDERS, "model", "recipe.yaml", "config.yaml", "events.log", "ledger.jsonl", "wandb", WANDB_ID}
"""What a run writes before its first evaluation, step or checkpoint."""
_PARTIAL = re.compile(r"\.\d+\.")
"""A file that was being written, see write_file."""
_GLANCE_S = 0.3
"""How long an owner waits for the folder's lock: whoever only looks whether the folder is in use holds it for an instant."""
_STAYS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Refusals that a later attempt would meet again: rights, kinds of files, a file system without locks. A full disk may have room then."""


def fresh_path(root: Path, name: str) -> Path:
    """root/NAME-DATE-TIME, with a number behind it if that is taken."""
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = [root / stem, *(root / f"{stem}-{i}" for i in range(2, 100))]
    return next(path for path in candidates if not path.exists())


def is_failed_start(path: Path, present: Sequence[str]) -> bool:
    """Whether a folder holds only what a run writes before its first number. A config.yaml alone may be anybody's."""
    known = all(name in _BEFORE_NUMBERS or _PARTIAL.match(name) for name in present)
    samples = path / "trajectories"
    has_samples = samples.is_dir() and any(samples.iterdir())
    checkpoints = path / "checkpoints"
    has_checkpoints = checkpoints.is_dir() and any(not entry.name.endswith(".partial") for entry in checkpoints.iterdir())
    is_ours = "config.yaml" not in present or set(FOLDERS) <= set(present)  # which are made before it
    return known and is_ours and not has_samples and not has_checkpoints


def clear(path: Path, present: Sequence[str]) -> None:
    """Remove what a start that failed has left, all but its events.log."""
    for name in present:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        elif name != "events.log":
            (path / name).unlink()


def make_below(run_folder: Path, path: Path) -> None:
    """Make a folder below the run's, with those between. Raises: FileNotFoundError if the run's is gone, which is not made anew."""
    if not run_folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the run folder is gone", str(run_folder))
    for missing in reversed([path, *path.parents][: len(path.relative_to(run_folder).parts)]):
        missing.mkdir(exist_ok=True)


def own(path: Path) -> filelock.BaseFileLock:
    """Take the lock of a folder, which is made if need be.

    Raises: ConfigError if another process has it, or the folder can't be used as it is; OSError for what may pass, such as a full disk.
    """
    require_utf8("run_dir = ", path.absolute())
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir = {path}: can't be made: {error.strerror}. Choose another run_dir.") from error
    lock = filelock.FileLock(path / ".owner.lock", thread_local=False)  # a thread takes it, another may give it back
    owner = path / ".owner.json"
    try:
        lock.acquire(timeout=_GLANCE_S)
    except filelock.Timeout:
        try:
            who = json.loads(owner.read_text())
            by = f"process {who['pid']} on {who['host']} since {who['since']}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            by = "another process"
        raise ConfigError(f"run_dir = {path}: in use by {by}. Wait for that run or stop it, or choose another run_dir.") from None
    except OSError as error:
        if error.errno not in _STAYS:
            raise
        raise ConfigError(f"run_dir = {path}: can't be locked: {error}. Choose another run_dir, or let this user write there.") from error
    ours = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().isoformat(timespec="seconds")}
    try:
        owner.write_text(json.dumps(ours))
    except OSError as error:
        lock.release()
        if error.errno not in _STAYS:
            raise
        raise ConfigError(f"run_dir = {path}: can't be written to: {error}. Choose another, or let this user write there.") from error
    return lock
