"""Which checkpoint a run goes on from: the newest one whose files are all as they were written; and what is taken back for it.

A resume goes on from it, and so does a run that goes back to a checkpoint (driver/recovery.py). Nothing in the folder is changed before
`take_back`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from evenkeel.actors.carriers import EventLevel
from evenkeel.actors.checkpoints.state import OtherVersionError, TrainingState, other_version
from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.json_lines import JsonLines
from evenkeel.actors.processes.disk import by_disk_at_start
from evenkeel.actors.record.run_folder import CHECKPOINT_FORMAT, Checkpoint, RunFolder
from evenkeel.actors.settings.deadlines import reading_s
from evenkeel.correction.errors import DataError
from evenkeel.learner.weights.file_sums import may_pass, read_manifest_of_files, verify
from evenkeel.rollout.tasks.chat import load_tokenizer
from evenkeel.rollout.tasks.mixture import Mixture

# Folder of the learner's own files in a checkpoint's state.
_LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a run goes on from."""

    checkpoint: Checkpoint
    state: TrainingState
    damaged: tuple[tuple[Checkpoint, str], ...]
    """Newer checkpoints that can't be read, newest first, each with the reason."""
    notes: tuple[tuple[EventLevel, str], ...] = ()
    """Events of the start: level and sentence."""


def newest_readable(folder: RunFolder, begins: Callable[[], object] = lambda: None, reading: Reading | None = None) -> ResumePoint:
    """The newest checkpoint whose files are whole.

    Args:
        begins: called before each checkpoint that is read.
        reading: is told how far that is.
    Raises: OtherVersionError if another version wrote it; DataError if there is none; OSError naming a file that the disk doesn't give now:
        that may pass, and no checkpoint is passed over for it.
    """
    damaged: list[tuple[Checkpoint, str]] = []
    reading = reading or Reading()
    for checkpoint in reversed(folder.checkpoints()):
        begins()
        reading.begins(checkpoint)
        try:
            state, foreign = _read(checkpoint, reading)
            note = f"{checkpoint.path} holds files that it was not written with and that are not read: {', '.join(foreign)}"
            return ResumePoint(checkpoint, state, tuple(damaged), (("warning", note),) if foreign else ())
        except OtherVersionError:
            raise  # the older ones are of no later version, and nothing is wrong with this one
        except (DataError, OSError) as error:  # what reads a model's files makes a DataError of all that a disk says
            if (said := may_pass(error)) is None:
                damaged.append((checkpoint, str(error)))
                continue
            not_now = OSError(said.errno, said.strerror, said.filename or str(checkpoint.path))
            not_now.add_note(
                f"That is no damage of {checkpoint.path}, and nothing is changed: do the same once more when its disk gives the file. "
                "To go on from the checkpoint before it, move it away"
            )
            raise not_now from error
    raise DataError(
        f"{folder.path}: nothing to resume from: none of its checkpoints can be read ({', '.join(c.path.name for c, _ in damaged)}). "
        f"The newest: {damaged[0][1]}. Without it, start a new run"
    )


def _read(checkpoint: Checkpoint, reading: Reading) -> tuple[TrainingState, list[str]]:
    """Returns: the state, and names of files that the checkpoint was not written with.

    Raises: OtherVersionError; DataError naming the file that is missing or damaged.
    """
    from evenkeel.learner.hf.folder import check_trainable
    from evenkeel.learner.weights.checkpoint_files import check_readable  # torch: seconds that a refusal of the settings doesn't need

    foreign = _verify(checkpoint, reading)
    state = TrainingState.load(checkpoint.state)
    hf_config = check_trainable(checkpoint.hf)
    load_tokenizer(checkpoint.hf)
    check_readable(checkpoint.state / _LEARNER, hf_config)
    if state.step != checkpoint.step:
        raise DataError(f"{checkpoint.state}: it is the state of step {state.step}, in the checkpoint of step {checkpoint.step}")
    return state, foreign


def verify_whole(checkpoint: Checkpoint, reading: Reading) -> None:
    """Read all files, as a resume does, but for what takes torch or transformers to understand.

    Raises: OtherVersionError if a resume would refuse it, whole as it is; DataError naming a file that is missing or damaged; OSError for
        what may pass.
    """
    _verify(checkpoint, reading)


def _verify(checkpoint: Checkpoint, reading: Reading) -> list[str]:
    """Compare all files with the manifest. Returns: names of files that it doesn't have. Raises: as `_read`."""
    manifest = read_manifest_of_files(checkpoint.path)
    if (found := manifest.get("format")) != CHECKPOINT_FORMAT:
        which = "a later version" if isinstance(found, int) and found > CHECKPOINT_FORMAT else "an earlier version"
        raise other_version(checkpoint.path, which, f"its format is {found}, this version's {CHECKPOINT_FORMAT}")
    reading.has_files(manifest)
    return verify(checkpoint.path, manifest, reading.add)


def take_back(folder: RunFolder, point: ResumePoint, task: Mixture) -> tuple[ResumePoint, list[tuple[EventLevel, str]]]:
    """Take back what the folder has of steps after the point's, once all else has been found right.

    Returns: the point with the task's prompts, and what to say about it.

    Raises: DataError if the task doesn't ask what the run asked.
    """
    point = replace(point, state=_with_prompts(folder, point, task))
    said = list(point.notes)
    step = point.checkpoint.step
    for checkpoint, reason in reversed(point.damaged):
        aside = set_aside(checkpoint)
        said.append(("warning", f"the checkpoint of step {checkpoint.step} can't be read and is set aside as {aside.name}: {reason}"))
    lines = folder.rewind(step)
    if point.damaged:
        newest = point.damaged[0][0].step
        said.append(
            ("warning", f"so all after step {step} is done again, up to step {newest} at least; {lines} lines of it went to rewound.jsonl")
        )
    return point, said


def steps_without_a_line(folder: RunFolder, step: int) -> list[tuple[EventLevel, str]]:
    """What to say if metrics.jsonl has not all steps up to this one. It is read whole, which takes seconds for a gigabyte."""
    if lost := step - sum(1 <= one <= step for one in JsonLines(folder.metrics_path).steps()):
        return [("warning", f"{folder.metrics_path} is damaged: {lost} of {step} steps have no line in it, and no place in the report")]
    return []


def _with_prompts(folder: RunFolder, point: ResumePoint, task: Mixture) -> TrainingState:
    """Raises: DataError if the task is of another file, or of one that has changed."""
    state = point.state
    task.restore(state.mixture)
    try:
        state = state.with_prompts_of(task.train_prompt)
        if state.data and state.data != task.fingerprint:
            raise DataError(f"the fingerprint of its questions is {task.fingerprint}, and was {state.data}")
    except DataError as error:
        raise DataError(
            f"{task.name}: {error}: these are other data than those of {folder.path}, and a resume would take some of them twice or never. "
            f"Put the run's data back, or start a new run from {point.checkpoint.hf}"
        ) from error
    return state


# How far a checkpoint is read, for whoever waits for it: a large one takes minutes, on a slow disk hours.

T = TypeVar("T")


class Reading:
    """How far a checkpoint is read: threads that read tell it, and whoever waits for them looks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._name, self._bytes, self._read = "", 0, 0
        self.began = time.monotonic()

    def begins(self, checkpoint: Checkpoint) -> None:
        with self._lock:
            self._name, self._bytes, self._read, self.began = checkpoint.path.name, 0, 0, time.monotonic()

    def has_files(self, manifest: Mapping[str, Any]) -> None:
        """Args: manifest: of the checkpoint; it has the bytes of each file."""
        self._bytes = sum(file["bytes"] for file in manifest["files"].values())

    def add(self, size: int) -> None:
        with self._lock:
            self._read += size

    def limit_s(self, deadlines: DeadlinesConfig) -> float:
        """Longest time from `began` on: that of a checkpoint that is written, by the bytes of this one (disk_s)."""
        return reading_s(deadlines.disk_s, self._bytes, deadlines.bytes_per_s)

    def __str__(self) -> str:
        if not self._bytes:
            return self._name
        return f"{self._name}: {self._read / 1e9:.3g} of {self._bytes / 1e9:.3g} GB are read"


def read_at_start(look: Callable[[Reading], T], deadlines: DeadlinesConfig) -> T:
    """What `look` finds in the newest checkpoint: all of it is read, which may take hours on a slow disk. Each half minute says how far.

    Raises: as `look`; DiskLate.
    """
    reading = Reading()
    return by_disk_at_start(
        lambda: look(reading),
        "files of the newest checkpoint",
        limit_s=lambda: reading.limit_s(deadlines),
        counts_from=lambda: reading.began,
        detail=lambda: str(reading),
    )


# Checkpoints that could not be read, and were set aside: the newest one stays, to be looked at; older ones, too, until the next save.
#
# If the next checkpoint lacks room, the oldest go earlier, the newest last; but only if that makes enough.

_NAME = re.compile(r"step_\d{6,}\.damaged(-\d+)?")
KEPT = 1
"""Those that stay when a checkpoint has been saved."""


def set_aside(checkpoint: Checkpoint) -> Path:
    """Rename a checkpoint so that nothing reads it; no file is removed. Returns: its new path."""
    names = (checkpoint.path.with_name(f"{checkpoint.path.name}.damaged{number}") for number in ("", *(f"-{i}" for i in range(2, 100))))
    return checkpoint.path.rename(next(name for name in names if not name.exists()))


def superseded(folder: RunFolder, keep: int) -> list[Path]:
    """All that were set aside but the `keep` that were written last; oldest first. Raises: OSError."""
    oldest_first = _oldest_first(folder)
    return oldest_first[: max(0, len(oldest_first) - keep)]


def to_free(folder: RunFolder, lacking: float) -> list[Path]:
    """The oldest that were set aside, as many as have `lacking` bytes together; none if all of them have fewer. Raises: OSError."""
    oldest_first = _oldest_first(folder)
    sizes = accumulate(map(bytes_under, oldest_first))
    return oldest_first[: next((number for number, size in enumerate(sizes, 1) if size >= lacking), 0)]


def bytes_under(folder: Path) -> int:
    """Bytes of all files in a folder. Raises: OSError."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _oldest_first(folder: RunFolder) -> list[Path]:
    found = [path for path in (folder.path / "checkpoints").glob("step_*.damaged*") if _NAME.fullmatch(path.name)]
    return [path for _, path in sorted((path.stat().st_mtime_ns, path) for path in found)]
