"""Which worker takes which work: work waits in one place, and workers take it when they have free slots. A plain state machine: no Ray, no
clock. What went wrong with a group so far, it asks the book.

Three lists wait, oldest first: groups that take a slot, groups of tasks with an environment, which take none, and the questions of
evaluations. What a worker takes is bounded by its slots, and by its share: of all of a kind that waits or is under way no worker holds more
than an equal part, so that the first to hold new weights leaves the others theirs. A worker without work always has a share, so that
nothing waits for one that is slow.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from evenkeel.actors.carriers import Ticket
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.settings.evaluation_places import EVALUATION_SHARE, evaluation_answers_at_once
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.prompt_place import task_of
from evenkeel.rollout.trajectory import Prompt, Trajectory


class PoolWorker(Protocol):
    """What a worker has under way."""

    name: str
    groups: set[int]
    in_slots: set[int]
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

    def __init__(self, slots: int, samples_per_group: int, without_slot: Collection[str] = ()) -> None:
        """
        Args:
            slots: groups that a worker has under way at most.
            without_slot: tasks whose groups take none, as their rollouts wait for environments: a worker's share alone bounds these.
        """
        self._slots, self._samples_per_group, self._without_slot = slots, samples_per_group, without_slot
        # By whether they take a slot: heap of (group id, arrival number, ticket); a smaller id is an older group.
        self._tickets: dict[bool, list[tuple[int, int, Ticket]]] = {True: [], False: []}
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
            takes_slot = task_of(ticket.prompt.prompt_id) not in self._without_slot
            heapq.heappush(self._tickets[takes_slot], (ticket.group_id, self._came, ticket))

    def add_questions(self, parts: Sequence[Questions]) -> None:
        self._questions += parts
        self._asked += sum(part.size for part in parts)

    @property
    def groups(self) -> int:
        """Number of groups that wait."""
        return sum(map(len, self._tickets.values()))

    @property
    def answers(self) -> int:
        """Answers that the waiting questions ask for."""
        return self._asked if self._first_questions() else 0

    def __bool__(self) -> bool:
        return bool(any(self._tickets.values()) or self._first_questions())

    def __str__(self) -> str:
        oldest = [self._tickets[kind][0][0] for kind in self._oldest_first()]
        groups = f"{self.groups} groups (the oldest is {oldest[0]})" if oldest else ""
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
        left = self.groups if most is None else most
        for takes_slot in self._oldest_first():
            for worker, ticket in self._take_groups(takes_slot, book, ready, candidates, left):
                left -= 1
                yield worker, ticket

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

    def _take_groups(
        self, takes_slot: bool, book: GroupBook, ready: Sequence[T], candidates: Sequence[T], most: int
    ) -> Iterator[tuple[T, Ticket]]:
        """Of those that take a slot, or of the others."""

        def held_by(worker: T) -> int:
            return len(worker.in_slots) if takes_slot else len(worker.groups) - len(worker.in_slots)

        total = len(self._tickets[takes_slot]) + sum(map(held_by, candidates))
        share, rest = divmod(total, max(1, len(candidates)))  # `rest` workers may hold one more than that
        above = sum(held_by(w) > share for w in candidates)
        for worker in sorted(ready, key=lambda w: (held_by(w), len(w.groups), w.questions)):
            held, room = held_by(worker), self._room(worker) if takes_slot else total
            free = min(min(share + (above < rest), room) - held, most)
            taken = self._take_tickets(self._tickets[takes_slot], book, worker, max(0, free), ready, candidates)
            most -= len(taken)
            ids = [ticket.group_id for ticket in taken]
            worker.groups.update(ids)
            worker.in_slots.update(ids if takes_slot else ())
            above += held <= share < held_by(worker)
            yield from ((worker, ticket) for ticket in taken)

    def _take_tickets(
        self,
        waiting: list[tuple[int, int, Ticket]],
        book: GroupBook,
        worker: PoolWorker,
        count: int,
        ready: Sequence[PoolWorker],
        candidates: Sequence[PoolWorker],
    ) -> list[Ticket]:
        """The oldest ones that this worker may have."""
        taken: list[Ticket] = []
        passed = []
        has_suspect = book.have_suspect(worker.groups)
        while waiting and len(taken) < count:
            entry = heapq.heappop(waiting)
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
            heapq.heappush(waiting, entry)
        return taken

    def _room(self, worker: PoolWorker) -> int:
        """Slots for groups: all but those that evaluation answers use, of which at most their share is counted."""
        asked = -(-worker.questions // self._samples_per_group)
        return self._slots - min(asked, self._slots // EVALUATION_SHARE)

    def _oldest_first(self) -> list[bool]:
        """Kinds of groups of which some wait, that of the oldest first."""
        return sorted((kind for kind, waiting in self._tickets.items() if waiting), key=lambda kind: self._tickets[kind][0])

    def _first_questions(self) -> Questions | None:
        """The oldest ones that are still asked. Takes the same time however many wait: each change in the pool looks."""
        while self._questions and self._questions[0].answers.done():
            self._drop_first_questions()
        return self._questions[0] if self._questions else None

    def _drop_first_questions(self) -> None:
        self._asked -= self._questions.popleft().size
