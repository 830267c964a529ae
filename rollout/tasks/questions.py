"""What tasks are made of: questions, where they come from, and which side of the split a question is on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Question:
    """What a task asks."""

    text: str
    """The question itself, without template."""
    answer: str | tuple[str, ...]
    """Reference answer; several: any of them is right; "" if the task has none."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """reasoning-gym: the whole entry; rows: the columns that are neither prompt nor answer."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """Turns of a conversation: each with its role, its content and whatever else it has, the last one the user's. `text` has all of them
    then."""
    demonstration: str | tuple[Mapping[str, Any], ...] | None = None
    """A worked answer for the warm-up, where it differs from `answer`: a text, or turns with role and content, of which those of the
    assistant are shown."""


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that was left out."""

    place: str
    """File and line, or data set and row number."""
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class QuestionSource(Protocol):
    """Questions of one origin, on two sides that share no text."""

    @property
    def name(self) -> str:
        """Data set or file, for people."""

    @property
    def questions_per_epoch(self) -> int | None:
        """Training positions after which questions repeat; None: they don't by design."""

    @property
    def distinct_train_questions(self) -> int | None:
        """How many texts there are to train on; None: no end is known."""

    @property
    def held_out(self) -> tuple[Question, ...]:
        """Distinct questions for evaluation, at most held_out_size, always the same ones in the same order."""

    @property
    def skipped(self) -> tuple[SkippedRow, ...]:
        """What was left out so far."""

    def train_question(self, position: int) -> Question:
        """The question at a position of the training stream, 0, 1, 2, ... without end.

        Raises: DataError if the source can't make one.
        """

    def demonstration_questions(self) -> Iterator[Question]:
        """Questions of the training side for the warm-up, without end."""


def text_key(question: str) -> str:
    """What makes two questions the same: their text, runs of blanks aside."""
    return " ".join(question.split())


def hash_share(question: str) -> float:
    """A number in [0, 1) that depends on the question's text alone, uniform over texts."""
    digest = hashlib.blake2b(text_key(question).encode(), digest_size=8, person=b"evenkeel split").digest()
    return int.from_bytes(digest, "big") / 2**64
