"""Which checkpoint a run goes on from: the newest one whose files are all as they were written; and what is taken back for it.

A resume goes on from it, and so does a run that goes back to a checkpoint (driver/rollback.py). Nothing in the folder is changed before
`take_back`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from actors.checkpoints.reading import Reading
from actors.checkpoints.set_aside import set_aside
from actors.processes.event_level import EventLevel
from actors.record.run_folder import CHECKPOINT_FORMAT, Checkpoint, RunFolder
from actors.state.json_lines import JsonLines
from actors.state.resume import OtherVersionError, TrainingState, other_version
from correction.errors import DataError
from learner.weights.file_sums import may_pass, read_manifest_of_files, verify
from rollout.tasks.chat import load_tokenizer
from rollout.tasks.tasks import Task

_LEARNER = "learner"
"""Folder of the learner's own files in a checkpoint's state."""


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
    from learner.hf.hf_folder import check_trainable
    from learner.weights.checkpoint_files import check_readable  # torch: seconds that a refusal of the settings doesn't need

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


def take_back(folder: RunFolder, point: ResumePoint, task: Task) -> tuple[ResumePoint, list[tuple[EventLevel, str]]]:
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


def _with_prompts(folder: RunFolder, point: ResumePoint, task: Task) -> TrainingState:
    """Raises: DataError if the task is of another file, or of one that has changed."""
    state = point.state
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
