"""What a restart needs besides the learner's own state, saved in the same checkpoint at the same moment.

Saved after a step is settled, while the learner is idle: the queue's counts and contents (finished groups whole, groups in flight by
their prompts, which are sampled again), and the step. The position in the data is the queue's count of admitted prompts, because they are
admitted in order.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.alarms import Replacement
from actors.carriers import QueueSnapshot
from correction.errors import DataError

_FILE = "controller.pickle"
_FORMAT = 4
"""The file is a pickle of plain values; the state in it is a pickle of its own, of classes that another version may not have."""


class OtherVersionError(DataError):
    """A checkpoint that is whole, and that another version of evenkeel has written."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Where a run stands between two steps."""

    step: int
    """Steps done."""
    weight_version: int
    """Of the learner; equals step unless a step published nothing."""
    elapsed_s: float
    """Wall time of the run, all its parts together."""
    queue: QueueSnapshot
    totals: dict[str, float]
    """Running totals of counters, by metric name."""
    monitor: dict[str, Any]
    """What the early warning knows (Monitor.state_dict), after the diagnostics of this step."""
    replacement: Replacement | None = None
    """Of the correction, by an alarm."""

    @property
    def prompt_position(self) -> int:
        """Prompts taken from the training stream."""
        return self.queue.admitted

    def save(self, folder: Path) -> None:
        """Write into a checkpoint's state folder."""
        with (folder / _FILE).open("wb") as file:
            pickle.dump({"format": _FORMAT, "state": pickle.dumps(self)}, file)

    @classmethod
    def load(cls, folder: Path) -> TrainingState:
        """Read from a checkpoint's state folder (pickle: only load what a run of yours has written).

        Raises: OtherVersionError if another version of evenkeel has written it; DataError if it is missing or damaged.
        """
        path = folder / _FILE
        if not path.exists():
            raise DataError(f"{path} is missing: {folder.parent} is no complete checkpoint. Resume from an older one by removing it.")
        try:
            content = pickle.loads(path.read_bytes())
            found = content["format"]
            if found != _FORMAT:
                which = "an earlier version" if found < _FORMAT else "a later version"
                raise _other_version(folder, which, f"its format is {found}, this version's {_FORMAT}")
            state: TrainingState = pickle.loads(content["state"])
        except OtherVersionError:
            raise
        except Exception as error:  # whatever damaged bytes ask of pickle
            if _names_what_is_gone(error):
                raise _other_version(folder, "an earlier version", str(error)) from error
            raise DataError(f"{path}: damaged, no state can be read from it ({type(error).__name__}: {error})") from error
        outstanding = len(state.queue.in_flight) + len(state.queue.finished)
        if state.queue.admitted != state.queue.trained + state.queue.discarded + outstanding:
            raise DataError(
                f"{path}: {state.queue.admitted} groups admitted, but {state.queue.trained} trained, {state.queue.discarded} discarded and "
                f"{outstanding} under way: the checkpoint has lost or doubled prompts"
            )
        return state


def _names_what_is_gone(error: Exception) -> bool:
    """The pickle is whole, and holds a module or a class that this version doesn't have."""
    return isinstance(error, ModuleNotFoundError) or (isinstance(error, AttributeError) and "Can't get attribute" in str(error))


def _other_version(folder: Path, which: str, reason: str) -> OtherVersionError:
    return OtherVersionError(
        f"{folder / _FILE}: written by {which} of evenkeel ({reason}), and only that can go on with it. "
        f"Start a new run from its weights: model={folder.parent / 'hf'}"
    )
