"""A whole run in simulated time: admission by the real queue, work by the real dispatch rule, time by what the costs say.

It keeps the order of the controller's loop: a batch is drawn while the learner trains the one before; weights go out; the trained groups
leave the queue, and their places are given to new prompts; a worker takes them once it holds the new weights.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from operator import itemgetter

from actors.carriers import Ticket
from actors.pool.dispatch import Questions, WaitingWork
from actors.queue.trajectory_queue import TrajectoryQueue
from actors.simulation.clock import SimulatedClock
from actors.simulation.costs import AnswerLengths, RunCosts, RunShape
from actors.simulation.engine import SampledGroup, SimulatedEngine
from actors.simulation.outcome import (
    ADMISSION,
    FULL_ENGINES,
    HANDOVER,
    PUBLISH,
    UNDER_WAY,
    WEIGHTS,
    Outcome,
    SimulatedStep,
)
from correction.errors import ConfigError
from rollout.trajectory import Group, Prompt


def simulate(
    shape: RunShape,
    costs: RunCosts,
    lengths: AnswerLengths,
    *,
    prompt_tokens: int,
    steps: int,
    on_step: Callable[[SimulatedStep], None] = lambda step: None,
) -> Outcome:
    """Train so many steps, after a few that fill the pipe and don't count.

    Args:
        prompt_tokens: length of every prompt.
        on_step: called with each step, those that don't count too.
    Raises: ConfigError for a shape in which nothing could ever be trained.
    """
    if min(shape.workers, shape.slots, shape.groups_per_step, shape.samples_per_group, steps) < 1:
        raise ConfigError(f"a simulation of {shape}, {steps} steps: workers, slots, groups, samples and steps have to be at least 1")
    if shape.every_steps > shape.max_staleness + 1:
        raise ConfigError(
            f"a simulation with weight_sync.every_steps = {shape.every_steps} and max_staleness {shape.max_staleness}: every answer would "
            f"be too old. Try bounds of {shape.every_steps - 1} or more"
        )
    return _SimulatedRun(shape, costs, lengths, prompt_tokens, on_step).train(steps)


class _SimulatedRun:
    def __init__(
        self, shape: RunShape, costs: RunCosts, lengths: AnswerLengths, prompt_tokens: int, on_step: Callable[[SimulatedStep], None]
    ) -> None:
        self._shape, self._costs, self._on_step = shape, costs, on_step
        self._prompt = {"tokens": prompt_tokens}
        self._clock = SimulatedClock()
        self._queue = TrajectoryQueue(groups_per_step=shape.groups_per_step, max_staleness=shape.max_staleness)
        self._work = WaitingWork(shape.slots, shape.samples_per_group)
        self._work.is_fed = True
        most = min(shape.max_running_requests, shape.slots * shape.samples_per_group)
        step_s = [costs.decode.step_s(max(1, running)) for running in range(most + 1)]
        names = map(str, range(shape.workers))
        self._engines = [SimulatedEngine(name, shape, costs, lengths, step_s, self._clock, self) for name in names]
        self._sampled: dict[int, SampledGroup] = {}
        """Finished groups that the queue holds."""
        self._version = self._published = 0
        self._batch: list[Group] = []
        """What is drawn of the batch of version `_preparing`."""
        self._preparing = 0
        self._training: list[Group] = []
        self._waits_since: float | None = 0.0
        """When the learner asked for a batch that isn't complete yet; None: it doesn't wait."""
        self._train_s = 0.0
        self._random = random.Random(lengths.seed)
        self._learner_trains = self._is_syncing = False
        self._busy_engines = self._waiting_requests = 0
        self._learner_waits_s: defaultdict[str, float] = defaultdict(float)
        self._tokens_by_staleness: Counter[int] = Counter()
        self._steps = 0
        self._step_ended = 0.0

    def train(self, steps: int) -> Outcome:
        filling = 2 * (self._shape.max_staleness + 1)  # versions until the queue is as full as it will ever be
        self._admit()
        self._reach(filling)
        before = self._outcome()
        self._reach(filling + steps)
        return self._outcome().since(before)

    def _reach(self, steps: int) -> None:
        if not self._clock.run(lambda: self._steps >= steps):
            raise AssertionError(f"the simulation stands still at step {self._steps}: {self._queue.waiting_for(self._version)}")

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        places = self._queue.free_places
        first = self._queue.admitted
        tickets = self._queue.admit([Prompt(f"simulated/0/{first + i}", "", (), "", self._prompt) for i in range(places)])
        if tickets:
            self._later(self._costs.admission_s, lambda: self._can_be_taken(tickets))

    def _can_be_taken(self, tickets: list[Ticket]) -> None:
        self._work.add_groups(tickets)
        self._dispatch()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """What takes no time happens at once, before anything else of this moment."""
        if seconds:
            self._clock.after(seconds, action)
        else:
            action()

    def _dispatch(self) -> None:
        """As RolloutPool.wake does it; engines without a free slot are left out, because they could take nothing."""
        if not self._work:
            return
        slots = self._shape.slots
        ready = [engine for engine in self._engines if engine.version == self._published and len(engine.groups) < slots]
        if not ready:
            return
        for engine, taken in itertools.groupby(self._work.take(ready, self._engines), key=itemgetter(0)):
            tickets = [work for _, work in taken if not isinstance(work, Questions)]
            self._later(self._costs.dispatch_s, partial(engine.take, tickets))

    def group_finished(self, engine: SimulatedEngine, group: SampledGroup) -> None:
        """Called by an engine."""
        self._later(self._costs.answer_s, lambda: self._group_arrives(engine, group))

    def _group_arrives(self, engine: SimulatedEngine, group: SampledGroup) -> None:
        ticket: Ticket = group.ticket
        self._count_wait()
        self._sampled[ticket.group_id] = group
        self._queue.put(Group(ticket.group_id, ticket.prompt, (), ticket.admitted_version))
        self._draw()
        engine.groups.discard(ticket.group_id)
        self._dispatch()

    def activity_changed(self, by: int) -> None:
        """Called by an engine."""
        self._busy_engines += by
        self._share_cores()

    def waiting_changed(self, by: int) -> None:
        """Called by an engine."""
        self._count_wait()
        self._waiting_requests += by

    def _share_cores(self) -> None:
        pace = self._costs.engine_pace(self._busy_engines, learner_trains=self._learner_trains)
        if pace != self._engines[0].pace:
            for engine in self._engines:
                engine.set_pace(pace)

    # -- the learner's side ------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        places = self._shape.groups_per_step - len(self._batch)
        if places:
            self._batch += self._queue.draw(self._preparing, places)
            self._begin_if_whole()

    def _begin_if_whole(self) -> None:
        if self._waits_since is None or len(self._batch) < self._shape.groups_per_step:
            return
        self._count_wait()
        self._waits_since = None
        self._training, self._batch = self._batch, []
        self._preparing += 1
        self._clock.after(self._costs.handover_s, self._training_begins)
        self._draw()

    def _training_begins(self) -> None:
        shape, costs = self._shape, self._costs
        self._learner_waits_s[HANDOVER] += costs.handover_s
        tokens = sum(self._sampled[group.group_id].tokens for group in self._training)
        tokens += len(self._training) * shape.samples_per_group * self._prompt["tokens"]
        self._learner_trains = True
        self._share_cores()
        train_s = (costs.learner_fixed_s + tokens * costs.learner_token_s) * self._random.choice(costs.learner_factors)
        self._clock.after(train_s, lambda: self._training_ends(train_s))

    def _training_ends(self, train_s: float) -> None:
        self._learner_trains = False
        self._share_cores()
        self._train_s += train_s
        publish_s = 0.0 if (self._version + 1) % self._shape.every_steps else self._costs.publish_s
        self._learner_waits_s[PUBLISH] += publish_s
        self._clock.after(publish_s, self._step_ends)

    def _step_ends(self) -> None:
        trained, self._training = self._training, []
        ages: Counter[int] = Counter()
        for group in trained:
            for version, tokens in self._sampled.pop(group.group_id).tokens_by_version.items():
                if tokens:
                    ages[self._version - version] += tokens
        self._tokens_by_staleness += ages
        self._version += 1
        if self._version % self._shape.every_steps == 0:
            self._published = self._version
            self._sync()
        group_ids = tuple(group.group_id for group in trained)
        self._queue.publish(self._version, self._published)
        self._queue.settle(group_ids)
        self._steps += 1
        now = self._clock.now
        self._on_step(SimulatedStep(self._version - 1, group_ids, dict(ages), now - self._step_ended))
        self._step_ended = self._waits_since = now
        self._begin_if_whole()
        self._admit()

    def _sync(self) -> None:
        """All engines alike. While they are at an older version still, the newest has to wait."""
        if self._is_syncing:
            return
        self._is_syncing = True
        version = self._published
        for engine in self._engines:
            engine.sync_begins()

        def pause() -> None:
            for engine in self._engines:
                engine.pause()

        def receipts() -> None:
            for engine in self._engines:
                engine.resume(version)
            self._is_syncing = False
            if version < self._published:
                self._sync()
            else:
                self._dispatch()

        self._clock.after(max(0.0, self._costs.sync_s - self._costs.pause_s), pause)
        self._clock.after(self._costs.sync_s, receipts)

    # -- books -------------------------------------------------------------------------------------------------------

    def _count_wait(self) -> None:
        """Time since the last call in which the learner waited, by what it waited for."""
        if self._waits_since is None:
            return
        now, cause = self._clock.now, FULL_ENGINES if self._waiting_requests or self._work else UNDER_WAY
        self._learner_waits_s[cause] += now - self._waits_since
        self._waits_since = now

    def _outcome(self) -> Outcome:
        self._count_wait()
        engines = self._engines
        for engine in engines:
            engine.pass_time()
        working_s, weights_s = sum(e.working_s for e in engines), sum(e.waits_for_weights_s for e in engines)
        admission_s = self._clock.now * len(engines) - working_s - weights_s
        return Outcome(
            workers=len(engines),
            max_staleness=self._shape.max_staleness,
            steps=self._steps,
            seconds=self._clock.now,
            tokens=sum(self._tokens_by_staleness.values()),
            train_s=self._train_s,
            learner_waits_s=dict(self._learner_waits_s),
            working_s=working_s,
            occupied_s=sum(e.occupied_s for e in engines),
            request_s=sum(e.request_s for e in engines),
            engine_waits_s={WEIGHTS: weights_s, ADMISSION: admission_s},
            tokens_by_staleness=Counter(self._tokens_by_staleness),
        )
