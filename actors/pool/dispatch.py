"""Which worker takes which work: work waits in one place, and workers take it when they have free slots. A plain state machine: no Ray, no
clock. What went wrong with a group so far, it asks the book.

Two lists wait, oldest first: groups, and the questions of evaluations. What a worker takes is bounded by its slots, and by its share: of
all that waits or is under way no worker holds more than an equal part, so that the first to hold new weights leaves the others theirs.
A worker without work always has a share, so that nothing waits for one that is slow.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from evenkeel.actors.carriers import BegunTicket, Ticket
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.settings.evaluation_places import EVALUATION_SHARE, evaluation_answers_at_once
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.trajectory import Prompt, Trajectory, UnfinishedGroup


class PoolWorker(Protocol):
    """What a worker has under way."""

    name: str
    groups: set[int]
    questions: int


T = TypeVar("T", bound=PoolWorker)


@dataclass(slots=True, eq=False)
class Questions:
    """A part of an evaluation: what one call to a worker asks."""

    prompts: Sequence[Prompt]
    how: AnswerSampling
    answers: asyncio.Future[list[tuple[Trajectory, ...]]]
    """Scored answers to each prompt."""
    losses: int = 0
    """Engines lost while they answered it."""

    @property
    def size(self) -> int:
        """Answers asked for: what a worker's engine has to sample."""
        return len(self.prompts) * self.how.samples


class WaitingWork:
    """The groups and questions that no worker has taken yet."""

    def __init__(self, slots: int, samples_per_group: int) -> None:
        """Args: slots: groups that a worker has under way at most."""
        self._slots, self._samples_per_group = slots, samples_per_group
        # Heap of (group id, arrival number, ticket); a smaller id is an older group.
        self._tickets: list[tuple[int, int, Ticket]] = []
        self._came = 0
        # Those whose evaluation has ended without them leave at the head.
        self._questions: deque[Questions] = deque()
        # Answers that these ask for; of an evaluation that has ended without them also those that aren't at the head yet.
        self._asked = 0
        self.is_fed = False
        """Training goes on: evaluations keep to their share of the slots."""

    def add_groups(self, tickets: Sequence[Ticket]) -> None:
        """New ones, or those of a worker that failed, which are older than others that wait."""
        for ticket in tickets:
            self._came += 1
            heapq.heappush(self._tickets, (ticket.group_id, self._came, ticket))

    def add_questions(self, parts: Sequence[Questions]) -> None:
        self._questions += parts
        self._asked += sum(part.size for part in parts)

    def __bool__(self) -> bool:
        return bool(self._tickets or self._first_questions())

    def __str__(self) -> str:
        groups = f"{len(self._tickets)} groups (the oldest is {self._tickets[0][0]})" if self._tickets else ""
        questions = f"{self._asked} evaluation answers" if self._first_questions() else ""
        return " and ".join(part for part in (groups, questions) if part) or "nothing"

    def take(
        self, book: GroupBook, ready: Sequence[T], candidates: Sequence[T], most: int | None = None
    ) -> Iterator[tuple[T, Ticket | Questions]]:
        """What workers take now, as (worker, what one call to it is given); counted among what they have under way.

        Args:
            ready: workers that hold the published weights.
            candidates: workers that a share is kept for: those, and whoever will soon hold these weights.
            most: groups; None: all that there is room for.
        """
        if self._first_questions():
            yield from self._take_questions(ready, candidates)
        if self._tickets:
            yield from self._take_groups(book, ready, candidates, len(self._tickets) if most is None else most)

    def _take_questions(self, ready: Sequence[T], candidates: Sequence[T]) -> Iterator[tuple[T, Questions]]:
        slots, samples = self._slots, self._samples_per_group
        most = evaluation_answers_at_once(slots, samples) if self.is_fed else slots * samples
        share = (sum(w.questions for w in candidates) + self._asked) / max(1, len(candidates))
        while ready and (part := self._first_questions()) is not None:
            worker = min(ready, key=lambda w: (w.questions, len(w.groups)))
            if worker.questions and (worker.questions >= share or worker.questions + part.size > most):
                return
            worker.questions += part.size
            self._drop_first_questions()
            yield worker, part

    def _take_groups(self, book: GroupBook, ready: Sequence[T], candidates: Sequence[T], most: int) -> Iterator[tuple[T, Ticket]]:
        total = len(self._tickets) + sum(len(w.groups) for w in candidates)
        share, rest = divmod(total, max(1, len(candidates)))  # `rest` workers may hold one more than that
        above = sum(len(w.groups) > share for w in candidates)
        for worker in sorted(ready, key=lambda w: (len(w.groups), w.questions)):
            held = len(worker.groups)
            free = min(min(share + (above < rest), self._room(worker)) - held, most)
            taken = self._take_tickets(book, worker, max(0, free), ready, candidates)
            most -= len(taken)
            worker.groups.update(ticket.group_id for ticket in taken)
            above += held <= share < len(worker.groups)
            yield from ((worker, ticket) for ticket in taken)

    def _take_tickets(
        self, book: GroupBook, worker: PoolWorker, count: int, ready: Sequence[PoolWorker], candidates: Sequence[PoolWorker]
    ) -> list[Ticket]:
        """The oldest ones that this worker may have."""
        taken: list[Ticket] = []
        passed = []
        has_suspect = book.have_suspect(worker.groups)
        while self._tickets and len(taken) < count:
            entry = heapq.heappop(self._tickets)
            ticket = entry[-1]
            is_suspect, attempts = book.is_suspect(ticket.group_id), book.attempts(ticket.group_id)
            others = ready if attempts.is_overdue else candidates
            failed_here = len(others) > 1 and attempts.failed_at == worker.name
            if failed_here or (is_suspect and has_suspect):
                passed.append(entry)
                continue
            taken.append(ticket)
            has_suspect |= is_suspect
        for entry in passed:
            heapq.heappush(self._tickets, entry)
        return taken

    def _room(self, worker: PoolWorker) -> int:
        """Slots for groups: all but those that evaluation answers use, of which at most their share is counted."""
        asked = -(-worker.questions // self._samples_per_group)
        return self._slots - min(asked, self._slots // EVALUATION_SHARE)

    def _first_questions(self) -> Questions | None:
        """The oldest ones that are still asked. Takes the same time however many wait: each change in the pool looks."""
        while self._questions and self._questions[0].answers.done():
            self._drop_first_questions()
        return self._questions[0] if self._questions else None

    def _drop_first_questions(self) -> None:
        self._asked -= self._questions.popleft().size


def continuing(ticket: Ticket, begun: UnfinishedGroup) -> BegunTicket:
    """The ticket with which the next worker goes on from what was sampled."""
    return BegunTicket(ticket.group_id, ticket.prompt, ticket.admitted_version, begun)
