"""Checks that a run has used each prompt once, and compares the books of two runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from evenkeel.actors.checkpoints.state import TrainingState
from evenkeel.actors.groups.ledger import TRAINED
from evenkeel.actors.metrics.held_out import wilson_interval
from evenkeel.actors.record.run_folder import Checkpoint, RunFolder
from evenkeel.correction.errors import DataError

_CONFIDENCE = 0.99


@dataclass(frozen=True)
class RunBooks:
    """Counts of a run's work, from its folder."""

    steps: int
    version: int
    """Of the weights."""
    trained: tuple[int, ...]
    """Groups, by step."""
    discarded: int
    under_way: int
    admitted: int
    wrong: tuple[str, ...]
    """Empty: each prompt once, and every step once."""

    @classmethod
    def of(cls, run_dir: Path, *, groups_per_step: int) -> RunBooks:
        """Raises: EvenkeelError if it has no checkpoint that can be read."""
        folder = RunFolder.view(run_dir)
        state = TrainingState.load(_newest(folder).state)
        entries = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
        settled = [entry["prompt_id"] for entry in entries]
        under_way = [t.prompt.prompt_id for t in state.book.in_flight] + [g.prompt.prompt_id for g in state.book.finished]
        trained = Counter(entry["step"] for entry in entries if entry["outcome"] == TRAINED)
        by_step = tuple(trained[step] for step in range(1, state.step + 1))
        wrong = []
        if twice := [prompt for prompt, times in Counter(settled + under_way).items() if times > 1]:
            wrong.append(f"{len(twice)} prompts are there twice, {twice[:5]} among them")
        if missing := set(range(state.book.admitted)) - {_position(prompt) for prompt in settled + under_way}:
            wrong.append(f"{len(missing)} of {state.book.admitted} prompts are nowhere, {sorted(missing)[:5]} among them")
        if len(settled) + len(under_way) != state.book.admitted:
            wrong.append(f"{state.book.admitted} prompts were admitted; {len(settled)} have left, and {len(under_way)} are under way")
        if short := [step for step, groups in enumerate(by_step, 1) if groups != groups_per_step]:
            wrong.append(f"steps {short[:5]} have not {groups_per_step} prompts each")
        if [int(line.step) for line in folder.read_metrics()] != list(range(1, state.step + 1)):
            wrong.append("metrics.jsonl does not have every step once")
        discarded = len(entries) - sum(trained.values())
        return cls(state.step, state.weight_version, by_step, discarded, len(under_way), state.book.admitted, tuple(wrong))

    def differs_from(self, calm: RunBooks) -> list[str]:
        """What differs between a run with faults and one without, though it must not; empty: nothing."""
        return [
            f"{what}: {ours} instead of the undisturbed run's {theirs}"
            for what, ours, theirs in (
                ("steps", self.steps, calm.steps),
                ("version of the weights", self.version, calm.version),
                ("groups trained", sum(self.trained), sum(calm.trained)),
                ("groups by step", self.trained, calm.trained),
            )
            if ours != theirs
        ]

    def __str__(self) -> str:
        return (
            f"{self.admitted} prompts admitted = {sum(self.trained)} trained + {self.discarded} discarded + {self.under_way} under way, "
            f"each once; {self.steps} steps"
        )


def steps_done_again(run_dir: Path) -> int:
    """Finished steps that the run took back."""
    path = run_dir / "rewound.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sum("groups/trained_total" in line for line in lines)


@dataclass(frozen=True)
class HeldOut:
    """A run's last evaluation."""

    accuracy: float
    questions: float

    @classmethod
    def of(cls, run_dir: Path) -> HeldOut | None:
        """None: it has none after its last step. Raises: EvenkeelError if it has no checkpoint."""
        folder = RunFolder.view(run_dir)
        step = _newest(folder).step
        found = [one for one in folder.read_evaluations() if one.step == step]
        return cls(float(found[-1]["held_out/accuracy"]), float(found[-1]["held_out/problems"])) if found else None

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.accuracy, self.questions, confidence=_CONFIDENCE)

    def less(self, calm: HeldOut) -> tuple[float, float]:
        """The 99 % interval of this accuracy less that one's.

        Both are of as many questions drawn from one task, so that both err. Source: Newcombe (1998), Stat. Med. 17, method 10.
        """
        (low, high), (calm_low, calm_high) = self.interval, calm.interval
        difference = self.accuracy - calm.accuracy
        down = math.hypot(self.accuracy - low, calm_high - calm.accuracy)
        up = math.hypot(high - self.accuracy, calm.accuracy - calm_low)
        return difference - down, difference + up


def _newest(folder: RunFolder) -> Checkpoint:
    """Raises: DataError if no checkpoint is complete."""
    if not (checkpoints := folder.checkpoints()):
        raise DataError(f"{folder.path}: no complete checkpoint in checkpoints/")
    return checkpoints[-1]


def _position(prompt_id: str) -> int:
    return int(prompt_id.rpartition("/")[2])
