"""A simulated engine: requests that are decoded together share its speed, others wait; new weights stop it for a while.

All running requests advance alike, so one number says how far each is: the tokens that any of them would have made since the beginning.
A request ends when that number has grown by its length, and the next end is on top of a heap.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from actors.carriers import Ticket
from actors.simulation.clock import SimulatedClock
from actors.simulation.costs import AnswerLengths, RunCosts, RunShape

_ROUNDING = 1e-6
"""Tokens."""
_MANY_VERSIONS = 64


@dataclass(slots=True)
class SampledGroup:
    """A group in an engine, and its tokens by version when it is finished."""

    ticket: Ticket
    unfinished: int
    """Answers that have not ended."""
    tokens: int = 0
    tokens_by_version: dict[int, int] = field(default_factory=dict)


class EngineOwner(Protocol):
    """Takes the events of an engine."""

    def group_finished(self, engine: SimulatedEngine, group: SampledGroup) -> None: ...

    def activity_changed(self, by: int) -> None:
        """Args: by: change in the number of engines that work."""

    def waiting_changed(self, by: int) -> None:
        """Args: by: change in the number of requests that wait for a place in an engine."""


class SimulatedEngine:
    """One worker with its engine. `groups` and `questions` are the attributes that actors.pool.dispatch reads."""

    def __init__(
        self,
        name: str,
        shape: RunShape,
        costs: RunCosts,
        lengths: AnswerLengths,
        step_s: Sequence[float],
        clock: SimulatedClock,
        owner: EngineOwner,
    ) -> None:
        """Args: step_s: seconds of a decoding step, by the number of requests."""
        self.name, self._shape, self._costs, self._lengths = name, shape, costs, lengths
        self._step_s, self._clock, self._owner = step_s, clock, owner
        self.groups: set[int] = set()
        self.questions = 0
        self.version = 0
        """Version of its weights."""
        self.is_syncing = False
        self.pace = 1.0
        self.occupied_s = self.working_s = self.request_s = self.waits_for_weights_s = 0.0
        self._timer = clock.timer(self._answers_end)
        self._at = 0.0
        self._is_paused = self._was_active = False
        self._progress = 0.0
        self._to_read_s = 0.0
        self._started = 0
        self._sum_of_starts = 0.0
        self._running: list[tuple[float, int, float, SampledGroup]] = []
        """A heap: progress at the end, a number that decides between equals, progress at the start, group."""
        self._waiting: deque[SampledGroup] = deque()
        self._versions: list[tuple[int, float]] = [(0, 0.0)]
        """Versions that requests in flight may have met, and the progress from which each held."""

    # -- work --------------------------------------------------------------------------------------------------------

    def take(self, tickets: Sequence[Ticket]) -> None:
        """Take groups."""
        self.pass_time()
        samples = self._shape.samples_per_group
        for ticket in tickets:
            self._waiting.extend([SampledGroup(ticket, samples)] * samples)
        self._owner.waiting_changed(len(tickets) * samples)
        self._fill()
        self._look_ahead()

    def _fill(self) -> None:
        """Give free places to waiting requests."""
        running, waiting, most, samples = self._running, self._waiting, self._shape.max_running_requests, self._shape.samples_per_group
        if waiting and len(running) < most:
            self._owner.waiting_changed(-min(len(waiting), most - len(running)))
        while waiting and len(running) < most:
            group = waiting.popleft()
            if group.unfinished == samples and not group.tokens_by_version:
                group.tokens_by_version[self.version] = 0  # its prompt is read once, with its first answer
                self._to_read_s += group.ticket.prompt.metadata["tokens"] * self._costs.prompt_token_s
            self._started += 1
            self._sum_of_starts += self._progress
            heapq.heappush(running, (self._progress + self._lengths.next(), self._started, self._progress, group))

    def _answers_end(self) -> None:
        self.pass_time()
        running = self._running
        finished: list[SampledGroup] = []
        self._progress = max(self._progress, running[0][0])  # it was set for this one's end, whatever rounding says
        while running and running[0][0] <= self._progress + _ROUNDING:
            end, _, start, group = heapq.heappop(running)
            self._sum_of_starts -= start
            self._count_tokens(group, start, end)
            group.unfinished -= 1
            if not group.unfinished:
                finished.append(group)
        self._fill()
        if not running:  # the progress may begin anew, which keeps its digits
            self._progress = self._sum_of_starts = 0.0
            self._versions = [(self.version, 0.0)]
        for group in finished:
            self._owner.group_finished(self, group)
        self._look_ahead()

    def _count_tokens(self, group: SampledGroup, start: float, end: float) -> None:
        by_version = group.tokens_by_version
        tokens, counted = round(end - start), 0
        group.tokens += tokens
        for version, since in reversed(self._versions):
            newer = tokens if since <= start else min(tokens, round(end - since))  # of this version and of those after it
            if newer > counted:
                by_version[version] = by_version.get(version, 0) + newer - counted
                counted = newer
            if since <= start:
                return

    # -- time --------------------------------------------------------------------------------------------------------

    def pass_time(self) -> None:
        """Bring the engine to the clock's time."""
        seconds, self._at = self._clock.now - self._at, self._clock.now
        running = len(self._running)
        if self._is_paused or (self.is_syncing and not running):
            self.waits_for_weights_s += seconds
        if not running:
            return
        self.occupied_s += seconds
        self.request_s += seconds * running
        if self._is_paused:
            return
        self.working_s += seconds
        work_s = seconds * self.pace
        reading_s = min(work_s, self._to_read_s)
        self._to_read_s -= reading_s
        self._progress += (work_s - reading_s) / self._step_s[running]

    def _look_ahead(self) -> None:
        """Set the timer to the next end of an answer."""
        running = self._running
        is_active = bool(running) and not self._is_paused
        if is_active != self._was_active:
            self._was_active = is_active
            self._owner.activity_changed(1 if is_active else -1)  # may set another pace, and the timer with it
        if not is_active:
            self._timer.stop()
            return
        left_s = self._to_read_s + max(0.0, running[0][0] - self._progress) * self._step_s[len(running)]
        self._timer.set(self._at + left_s / self.pace)

    def set_pace(self, pace: float) -> None:
        """Go on at this share of the full speed."""
        self.pass_time()
        self.pace = pace
        self._look_ahead()

    # -- weights -----------------------------------------------------------------------------------------------------

    def sync_begins(self) -> None:
        self.pass_time()
        self.is_syncing = True

    def pause(self) -> None:
        self.pass_time()
        self._is_paused = True
        self._look_ahead()

    def resume(self, version: int) -> None:
        """Go on with the weights of this version."""
        self.pass_time()
        self._is_paused = self.is_syncing = False
        self.version = version
        self._versions.append((version, self._progress))
        running = len(self._running)
        if running and self._shape.retracts:
            prompts = running * self._running[0][3].ticket.prompt.metadata["tokens"]  # the cache is empty, they come back all at once
            self._to_read_s += (prompts + running * self._progress - self._sum_of_starts) * self._costs.prompt_token_s
        if len(self._versions) > _MANY_VERSIONS:
            self._forget_versions()
        self._look_ahead()

    def _forget_versions(self) -> None:
        """Drop versions that no request in flight has met."""
        oldest = min((start for _, _, start, _ in self._running), default=self._progress)
        first = max(i for i, (_, since) in enumerate(self._versions) if since <= oldest or i == 0)
        self._versions = self._versions[first:]


