"""What a restart needs besides the learner's own state, saved in the same checkpoint at the same moment.

Saved after a step is settled, while the learner is idle: the queue's counts and contents (finished groups whole, groups in flight by
their prompts, which are sampled again), and the step. The position in the data is the queue's count of admitted prompts, because they are
admitted in order; a group's number is its prompt's position.

JSON and arrays: reading them runs nothing. A prompt is kept without its metadata, which may be anything; the task makes it again
(`with_prompts_of`), and has to make the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from actors.carriers import Ticket
from actors.processes.event_level import Notify
from actors.state.ledger import HandOver, Ledger, LedgerMark, at_once, imbalance_of
from actors.state.queue_snapshot import QueueSnapshot
from actors.state.state_format import Columns, as_plain, of_plain
from correction.config import CorrectionConfig
from correction.errors import DataError
from learner.hf.tensor_files import saving
from learner.weights.file_sums import unreadable
from rollout.trajectory import Prompt

STATE, COLUMNS = "controller.json", "groups.safetensors"
_NAMES = {"Prompt": Prompt}
_ENCODER = json.JSONEncoder(default=float)  # float: numpy's numbers


class OtherVersionError(DataError):
    """A checkpoint is complete, but was written by another version of evenkeel."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """The correction that an alarm has put in the place of the configured one; saved with a checkpoint."""

    configured: CorrectionConfig
    correction: CorrectionConfig


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of a run between two steps, except for the learner's."""

    step: int
    """Steps done."""
    weight_version: int
    """Version of the learner's weights; equals step unless a step published nothing."""
    elapsed_s: float
    """Wall time of the run, all its parts together."""
    queue: QueueSnapshot
    totals: dict[str, float]
    """Running totals of counters, by metric name."""
    monitor: Mapping[str, Any] | None
    """State of the early warning (Monitor.state_dict), after the diagnostics of this step, or of an earlier one if the run was ended in a
    hurry; None: there is none."""
    replacement: Replacement | None = None
    """The correction that an alarm has put in the place of the configured one; None: none has."""
    ledger: LedgerMark | None = None
    """Position in the ledger; None: it had no line yet."""
    data: str = ""
    """Fingerprint of the training questions (Task.fingerprint); empty: not known."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The run's settings, with which the queue's groups were sampled; its folder may have those of a resume that saved nothing yet."""

    def save(self, folder: Path) -> None:
        """Write into a checkpoint's state folder. Raises: OSError."""
        columns = Columns()
        queue = _with_prompts(self.queue, lambda prompt, _: replace(prompt, metadata={}))
        correction = self.replacement and {
            "configured": self.replacement.configured.model_dump(mode="json"),
            "correction": self.replacement.correction.model_dump(mode="json"),
        }
        plain = {name: getattr(self, name) for name in ("step", "weight_version", "elapsed_s", "totals", "monitor", "data", "settings")}
        plain |= {"queue": as_plain(queue, columns), "ledger": as_plain(self.ledger, columns), "replacement": correction}
        with (folder / STATE).open("w", encoding="utf-8") as file:
            file.writelines(_ENCODER.iterencode(plain))  # json.dumps would hold the interpreter's lock, and the event loop, for all groups
        with saving(folder / COLUMNS) as path:
            save_file(columns.arrays(), path)

    @classmethod
    def load(cls, folder: Path) -> TrainingState:
        """Read from a checkpoint's state folder; prompts have no metadata yet.

        Raises: DataError if it is missing, damaged or out of balance;
            OSError for what may pass.
        """
        path = folder / STATE
        if not path.exists():
            raise DataError(
                f"{path} is missing, so {folder.parent} is not a complete checkpoint. Remove that folder to resume from an older one."
            )
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            (folder / COLUMNS).open("rb").close()  # safetensors' own errors have no number, which tells damage from what may pass
            columns = load_file(folder / COLUMNS)
            queue = of_plain(QueueSnapshot, plain.pop("queue"), columns, _NAMES)
            ledger = of_plain(LedgerMark | None, plain.pop("ledger"), columns, _NAMES)
            corrections = plain.pop("replacement")
            replacement = corrections and Replacement(**{k: CorrectionConfig.model_validate(v) for k, v in corrections.items()})
            state = cls(queue=queue, ledger=ledger, replacement=replacement, **plain)
        except OSError as error:
            raise unreadable(Path(error.filename or path), error, "no state can be read from it") from error
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise DataError(f"{path}: damaged, no state can be read from it ({type(error).__name__}: {error})") from error
        if found := imbalance_of(state.queue, state.ledger):
            raise DataError(f"{path}: the checkpoint has lost or doubled prompts: {found}")
        return state

    def with_prompts_of(self, train_prompt: Callable[[int], Prompt]) -> TrainingState:
        """The same with whole prompts. Raises: DataError if another question is at a prompt's position, naming both."""

        def found(saved: Prompt, position: int) -> Prompt:
            prompt = train_prompt(position)
            if (prompt.prompt_id, prompt.text, prompt.answer) != (saved.prompt_id, saved.text, saved.answer):
                raise DataError(
                    f"its question {position} is {prompt.prompt_id} {prompt.text[:60]!r}, but the run asked {saved.prompt_id} "
                    f"{saved.text[:60]!r} there"
                )
            return prompt

        return replace(self, queue=_with_prompts(self.queue, found))


def open_ledger(path: Path, state: TrainingState | None, notify: Notify, hand_over: HandOver = at_once) -> Ledger:
    """The ledger of a run that begins, or goes on from a state.

    Args:
        notify: takes level and sentence, if the file is not what the checkpoint knows.
        hand_over: see Ledger.
    """
    if state is None:
        return Ledger(path, hand_over=hand_over)
    ledger, warning = Ledger.resumed(path, state.queue, state.ledger, hand_over=hand_over)
    if warning:
        notify("warning", warning)
    return ledger


def other_version(folder: Path, which: str, reason: str) -> OtherVersionError:
    """Args: folder: of the checkpoint."""
    return OtherVersionError(
        f"{folder}: written by {which} of evenkeel ({reason}), and only that can go on with it. "
        f"Start a new run from its weights: model={folder / 'hf'}"
    )


def _with_prompts(queue: QueueSnapshot, prompt_of: Callable[[Prompt, int], Prompt]) -> QueueSnapshot:
    """Args: prompt_of: takes a prompt and its position."""

    def changed(of: Any) -> Any:
        return replace(of, prompt=prompt_of(of.prompt, of.group_id))

    tickets: tuple[Ticket, ...] = tuple(map(changed, queue.in_flight))
    return replace(queue, in_flight=tickets, finished=tuple(map(changed, queue.finished)))
