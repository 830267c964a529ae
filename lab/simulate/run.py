"""A whole run in simulated time: engines and learner take as long as the costs say.

It keeps a run's rules, in a few lines of its own: admission by staleness, whole groups oldest first, a worker's share of the waiting work,
new work only for engines that hold the published weights. Left out: evaluations, checkpoints, discarded groups, workers that come and go.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from evenkeel.correction.errors import ConfigError
from lab.simulate.costs import AnswerLengths, RunCosts, RunShape

FULL_ENGINES, UNDER_WAY, HANDOVER, PUBLISH = "full engines", "answers under way", "hand-over", "publish"
"""What a learner waits for. FULL_ENGINES: requests wait for a place in an engine. UNDER_WAY: all requests have a place, and no further
prompt may start. HANDOVER: a batch is on its way to the learner. PUBLISH: the learner publishes its weights."""
# Tokens.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One training step."""

    group_ids: tuple[int, ...]
    tokens_by_staleness: Counter[int]
    seconds: float
    """Since the step before ended."""


@dataclass(slots=True)
class Outcome:
    """Sums over the counted steps."""

    shape: RunShape
    steps: int
    seconds: float
    train_s: float
    learner_waits_s: dict[str, float]
    """By what it waited for."""
    working_s: float
    """Seconds of all engines together with a request in them, and not stopped for new weights."""
    occupied_s: float
    """Seconds of all engines together with a request in them."""
    tokens_by_staleness: Counter[int]

    @property
    def tokens(self) -> int:
        """Response tokens that were trained."""
        return self.tokens_by_staleness.total()

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def learner_share(self) -> float:
        """Share of its time in which the learner trains."""
        return self.train_s / self.seconds

    @property
    def engine_share(self) -> float:
        """Share of their time in which engines sample."""
        return self.working_s / (self.seconds * self.shape.workers)

    @property
    def mean_staleness(self) -> float:
        """Versions, mean over trained tokens."""
        return sum(age * tokens for age, tokens in self.tokens_by_staleness.items()) / max(1, self.tokens)


def simulate(
    shape: RunShape,
    costs: RunCosts,
    lengths: AnswerLengths,
    *,
    prompt_tokens: int,
    steps: int,
    on_step: Callable[[SimulatedStep], None] = lambda step: None,
) -> Outcome:
    """Train so many steps, after a few that fill the queue and don't count.

    Args:
        prompt_tokens: length of every prompt.
        on_step: called with each step, those that don't count too.
    Raises: ConfigError for a shape in which nothing could ever be trained.
    """
    if min(shape.workers, shape.slots, shape.groups_per_step, shape.samples_per_group, steps) < 1:
        raise ConfigError(f"a simulation of {shape}, {steps} steps: workers, slots, groups, samples and steps have to be at least 1")
    return _Run(shape, costs, lengths, prompt_tokens, on_step).train(steps)


class _Clock:
    """Simulated time: it jumps from one event to the next. A heap and nothing else: engines have millions of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + max(0.0, seconds), next(self._numbers), action))

    def advance(self) -> None:
        self.now, _, action = heapq.heappop(self._events)
        action()


@dataclass(slots=True, eq=False)
class _Group:
    group_id: int
    admitted_version: int
    unfinished: int
    """Answers that have not ended."""
    tokens_by_version: Counter[int] = field(default_factory=Counter)
    is_read: bool = False
    """Its prompt has been read, with its first answer."""


class _Queue:
    """Admission and order. A place is free while admitted - trained < (max_staleness + 1) * groups_per_step."""

    def __init__(self, shape: RunShape) -> None:
        self._shape = shape
        self._admitted = self.trained = 0
        # Groups that are in no batch yet, by the version at their admission.
        self._undrawn: Counter[int] = Counter()
        self._finished: list[tuple[int, _Group]] = []

    def admit(self, version: int) -> list[_Group]:
        shape = self._shape
        places = (shape.max_staleness + 1) * shape.groups_per_step - (self._admitted - self.trained)
        groups = [_Group(self._admitted + i, version, shape.samples_per_group) for i in range(places)]
        self._admitted += places
        self._undrawn[version] += places
        return groups

    def put(self, group: _Group) -> None:
        heapq.heappush(self._finished, (group.group_id, group))

    def draw(self, version: int, places: int) -> list[_Group]:
        """Finished groups for the batch of `version`, oldest first; a place that an older group can't do without stays empty."""
        drawn: list[_Group] = []
        while self._finished and places - len(drawn) > self._reserved(version, self._finished[0][1].admitted_version):
            _, group = heapq.heappop(self._finished)
            self._undrawn[group.admitted_version] -= 1
            drawn.append(group)
        return drawn

    def _reserved(self, version: int, younger: int) -> int:
        """Places in the batch of `version` without which groups admitted before `younger` would become too old."""
        reserved = older = 0
        for admitted in range(version - self._shape.max_staleness, younger):
            older += self._undrawn[admitted]
            reserved = max(reserved, older - (admitted + self._shape.max_staleness - version) * self._shape.groups_per_step)
        return reserved


class _Engine:
    """Requests that are decoded together share its speed, others wait; new weights stop it for a while.

    All running requests advance alike, so one number says how far each is: the tokens that any of them would have made since the beginning.
    A request ends when that number has grown by its length, and the next end is on top of a heap.
    """

    def __init__(self, run: _Run, step_s: list[float]) -> None:
        """Args: step_s: seconds of a decoding step, by the number of requests."""
        self._run, self._step_s = run, step_s
        self.groups = 0
        """Groups under way."""
        self.version = 0
        self.waiting: deque[_Group] = deque()
        """A group for each of its answers that has no place yet."""
        self.occupied_s = self.working_s = 0.0
        # A heap: progress at the end, a number that decides between equals, progress at the start, group.
        self._running: list[tuple[float, int, float, _Group]] = []
        self._is_paused = False
        self._progress = self._to_read_s = self._at = 0.0
        self._starts = itertools.count()
        # Versions that it has held, the last ones, and the progress from which each held.
        self._versions: list[tuple[int, float]] = [(0, 0.0)]
        # Number of the event that counts: the last one set.
        self._alarm = 0

    def take(self, groups: list[_Group]) -> None:
        self.pass_time()
        for group in groups:
            self.waiting.extend([group] * group.unfinished)
        self._fill()
        self._look_ahead()

    def _fill(self) -> None:
        """Give free places to waiting requests."""
        while self.waiting and len(self._running) < self._run.shape.max_running_requests:
            group = self.waiting.popleft()
            if not group.is_read:
                group.is_read = True
                self._to_read_s += self._run.prompt_tokens * self._run.costs.prompt_token_s
            end = self._progress + self._run.lengths.next()
            heapq.heappush(self._running, (end, next(self._starts), self._progress, group))

    def _look_ahead(self) -> None:
        """Set the alarm to the next end of an answer."""
        self._alarm += 1
        if self._running and not self._is_paused:
            left_s = self._to_read_s + max(0.0, self._running[0][0] - self._progress) * self._step_s[len(self._running)]
            self._run.clock.after(left_s, partial(self._answers_end, self._alarm))

    def _answers_end(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self.pass_time()
        self._progress = max(self._progress, self._running[0][0])  # it was set for this one's end, whatever rounding says
        finished: list[_Group] = []
        while self._running and self._running[0][0] <= self._progress + _ROUNDING:
            end, _, start, group = heapq.heappop(self._running)
            self._count_tokens(group, start, end)
            group.unfinished -= 1
            if not group.unfinished:
                finished.append(group)
        self._fill()
        self._look_ahead()
        for group in finished:
            self._run.group_finished(self, group)

    def _count_tokens(self, group: _Group, start: float, end: float) -> None:
        counted = 0
        for version, since in reversed(self._versions):
            newer = round(end - max(start, since))  # of this version and of those after it
            if newer > counted:
                group.tokens_by_version[version] += newer - counted
                counted = newer
            if since <= start:
                return

    def pass_time(self) -> None:
        """Bring the engine to the clock's time."""
        seconds, self._at = self._run.clock.now - self._at, self._run.clock.now
        if not self._running:
            return
        self.occupied_s += seconds
        if not self._is_paused:
            self.working_s += seconds
            reading_s = min(seconds, self._to_read_s)
            self._to_read_s -= reading_s
            self._progress += (seconds - reading_s) / self._step_s[len(self._running)]

    def pause(self) -> None:
        self.pass_time()
        self._is_paused = True
        self._look_ahead()

    def resume(self, version: int) -> None:
        """Go on with the weights of this version."""
        self.pass_time()
        self._is_paused = False
        self.version = version
        oldest = min((start for _, _, start, _ in self._running), default=self._progress)
        first = max(i for i, (_, since) in enumerate(self._versions) if i == 0 or since <= oldest)
        self._versions = [*self._versions[first:], (version, self._progress)]
        if self._run.shape.retracts:  # the cache is empty, and they come back all at once
            tokens = sum(self._run.prompt_tokens + self._progress - start for _, _, start, _ in self._running)
            self._to_read_s += tokens * self._run.costs.prompt_token_s
        self._look_ahead()


class _Run:
    """The order of the driver's loop: a batch is drawn while the learner trains the one before; weights go out; the places of the trained
    groups are given to new prompts; a worker takes them once it holds the new weights."""

    def __init__(
        self, shape: RunShape, costs: RunCosts, lengths: AnswerLengths, prompt_tokens: int, on_step: Callable[[SimulatedStep], None]
    ) -> None:
        self.shape, self.costs, self.lengths, self.prompt_tokens = shape, costs, lengths, prompt_tokens
        self._on_step = on_step
        self.clock = _Clock()
        most = min(shape.max_running_requests, shape.slots * shape.samples_per_group)
        step_s = [costs.decode.step_s(max(1, running)) for running in range(most + 1)]
        self._engines = [_Engine(self, step_s) for _ in range(shape.workers)]
        self._queue = _Queue(shape)
        # Admitted groups that no engine has taken.
        self._work: deque[_Group] = deque()
        self._version = 0
        # What is drawn of the batch of version `_preparing`.
        self._batch: list[_Group] = []
        self._preparing = 0
        self._training: list[_Group] = []
        # When the learner asked for a batch that isn't complete yet; None: it doesn't wait.
        self._waits_since: float | None = 0.0
        self._is_syncing = False
        self._steps = 0
        self._train_s = self._step_ended = 0.0
        self._learner_waits_s: defaultdict[str, float] = defaultdict(float)
        self._tokens_by_staleness: Counter[int] = Counter()

    def train(self, steps: int) -> Outcome:
        self._admit()
        filling = 2 * (self.shape.max_staleness + 1)  # until the queue is as full as it will ever be
        self._reach(filling)
        before = self._outcome()
        self._reach(filling + steps)
        after = self._outcome()
        return Outcome(
            shape=self.shape,
            steps=steps,
            seconds=after.seconds - before.seconds,
            train_s=after.train_s - before.train_s,
            learner_waits_s={cause: waited - before.learner_waits_s.get(cause, 0.0) for cause, waited in after.learner_waits_s.items()},
            working_s=after.working_s - before.working_s,
            occupied_s=after.occupied_s - before.occupied_s,
            tokens_by_staleness=after.tokens_by_staleness - before.tokens_by_staleness,
        )

    def _reach(self, steps: int) -> None:
        while self._steps < steps:
            self.clock.advance()

    def _outcome(self) -> Outcome:
        """Sums since the beginning."""
        self._count_wait()
        for engine in self._engines:
            engine.pass_time()
        return Outcome(
            shape=self.shape,
            steps=self._steps,
            seconds=self.clock.now,
            train_s=self._train_s,
            learner_waits_s=dict(self._learner_waits_s),
            working_s=sum(engine.working_s for engine in self._engines),
            occupied_s=sum(engine.occupied_s for engine in self._engines),
            tokens_by_staleness=self._tokens_by_staleness.copy(),
        )

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        self._work.extend(self._queue.admit(self._version))
        self._dispatch()

    def _dispatch(self) -> None:
        """Groups go to engines with free slots that hold the published weights; none takes more than its share of all that there is."""
        ready = [engine for engine in self._engines if engine.version == self._version and engine.groups < self.shape.slots]
        share = -(-(len(self._work) + sum(engine.groups for engine in self._engines)) // len(self._engines))
        for engine in sorted(ready, key=lambda engine: engine.groups):
            places = min(share, self.shape.slots) - engine.groups
            groups = [self._work.popleft() for _ in range(min(places, len(self._work)))]
            if groups:
                engine.groups += len(groups)
                engine.take(groups)

    def group_finished(self, engine: _Engine, group: _Group) -> None:
        """Called by an engine."""
        self._count_wait()
        engine.groups -= 1
        self._queue.put(group)
        self._draw()
        self._dispatch()

    # -- the learner's side ------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        self._batch += self._queue.draw(self._preparing, self.shape.groups_per_step - len(self._batch))
        self._begin_if_whole()

    def _begin_if_whole(self) -> None:
        if self._waits_since is None or len(self._batch) < self.shape.groups_per_step:
            return
        self._count_wait()
        self._waits_since = None
        self._training, self._batch = self._batch, []
        self._preparing += 1
        tokens = sum(group.tokens_by_version.total() for group in self._training)
        tokens += len(self._training) * self.shape.samples_per_group * self.prompt_tokens
        train_s = tokens * self.costs.learner_token_s
        self._learner_waits_s[HANDOVER] += self.costs.handover_s
        self._learner_waits_s[PUBLISH] += self.costs.publish_s
        self._train_s += train_s
        self.clock.after(self.costs.handover_s + train_s + self.costs.publish_s, self._step_ends)
        self._draw()

    def _step_ends(self) -> None:
        ages: Counter[int] = Counter()
        for group in self._training:
            for version, tokens in group.tokens_by_version.items():
                ages[self._version - version] += tokens
        self._tokens_by_staleness += ages
        self._queue.trained += len(self._training)
        self._version += 1
        self._steps += 1
        now = self.clock.now
        self._on_step(SimulatedStep(tuple(group.group_id for group in self._training), ages, now - self._step_ended))
        self._step_ended = self._waits_since = now
        self._sync()
        self._begin_if_whole()
        self._admit()

    def _sync(self) -> None:
        """All engines alike. While they are at an older version still, the newest has to wait."""
        if not self._is_syncing:
            self._is_syncing = True
            self.clock.after(self.costs.sync_s - self.costs.pause_s, self._pause)
            self.clock.after(self.costs.sync_s, partial(self._receipts, self._version))

    def _pause(self) -> None:
        for engine in self._engines:
            engine.pause()

    def _receipts(self, version: int) -> None:
        for engine in self._engines:
            engine.resume(version)
        self._is_syncing = False
        if version < self._version:
            self._sync()
        self._dispatch()

    def _count_wait(self) -> None:
        """Time since the last call in which the learner waited, by what it waited for."""
        if self._waits_since is not None:
            is_full = self._work or any(engine.waiting for engine in self._engines)
            self._learner_waits_s[FULL_ENGINES if is_full else UNDER_WAY] += self.clock.now - self._waits_since
            self._waits_since = self.clock.now
