"""Where batches come from: trajectory queue and correction service, with the driver's own books of what they hold.

Both can be replaced at any moment, between two steps or in one. The ledger has what was settled, `Outstanding` what is under way; what the
learner, the engines and the object store have goes on meanwhile. With a service go the diagnostics of the batches that it held.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from actors.carriers import ForwardRequest, PreparedBatch, Ticket
from actors.config import RunConfig
from actors.going_back import while_they_answer
from actors.outstanding import Outstanding
from actors.parts import StartingPoint, make_queue, start_service
from actors.pool import RolloutPool
from actors.record.observer import Observer
from actors.resume import open_ledger
from actors.supervision import kill, persistently
from correction.config import CorrectionConfig

QUEUE, SERVICE = "trajectory queue", "correction service"
REPLACEABLE = frozenset({QUEUE, SERVICE})


class BatchSource:
    """Of one stretch of a run, from a starting point on. The queue is there from the beginning, the service after `start`."""

    def __init__(self, config: RunConfig, point: StartingPoint, ledger: Path, observer: Observer) -> None:
        """Args: ledger: its file."""
        self._config, self._observer = config, observer
        self.ledger = open_ledger(ledger, point.state, observer.event, observer.disk.do)
        self.outstanding = Outstanding(point.state.queue if point.state else None, dynamic_sampling=config.dynamic_sampling)
        self.monitor: Mapping[str, Any] | None = point.state.monitor if point.state else None
        """What the early warning knows after the last batch that was observed."""
        self._unfinished = self.outstanding.in_flight
        self.queue = make_queue(config)
        self.service: Any = None

    @property
    def parts(self) -> dict[str, Any]:
        """The actors, by what they are called in sentences."""
        return {QUEUE: self.queue} | ({SERVICE: self.service} if self.service is not None else {})

    def start(self, correction: CorrectionConfig) -> None:
        """Start the service. Args: correction: the run's, or the one that an alarm has put in its place."""
        self.service = start_service(self._config, self.monitor, correction, self.queue)

    def replace(self, correction: CorrectionConfig) -> None:
        """Begin anew with both; `fill` comes next."""
        kill(self.queue, self.service)
        self.queue = make_queue(self._config)
        self.start(correction)

    async def fill(self, update: PreparedBatch | None = None, advance: tuple[int, int] | None = None) -> None:
        """Give a new queue what is under way.

        Args:
            update: the batch that the learner has or had, if no step has settled it.
            advance: the learner's version after it, and the published one; None: it isn't done.
        """
        contents = self.outstanding.contents(update.group_ids if update is not None else (), advance)
        what = "contents -> trajectory queue"
        await persistently(lambda: self.queue.fill.remote(contents), what, deadline_s=self._config.deadlines.start_s)

    def take_unfinished(self) -> list[Ticket]:
        """What the pool has to sample beside what it admits; once, as the pool knows it since."""
        tickets, self._unfinished = self._unfinished, []
        return tickets

    async def stop(self) -> None:
        """No further batch is made, if any was."""
        if self.service is not None:
            await self.service.stop.remote()

    async def ask(self, method: Any, *arguments: Any) -> Any:
        """A short call, which may run twice. Args: method: of the queue's or the service's actor."""
        what = f"{method._method_name} <- queue or service"
        call, tell = partial(method.remote, *arguments), self._observer.event
        return await while_they_answer(self.parts, call, what, deadline_s=self._config.deadlines.sync_s, tell=tell)

    async def next(self, version: int, pool: RolloutPool) -> PreparedBatch | ForwardRequest:
        """The batch of a version, or what the learner has to compute for it first. Args: pool: whose progress puts the deadline off."""
        deadlines = self._config.deadlines
        return await persistently(
            lambda: self.service.next_batch.remote(version),
            f"batch of version {version} <- correction service",
            deadline_s=deadlines.batch_s + 30.0,
            counts_from=pool.last_progress,
            notice_s=deadlines.notice_s,
            notice=self._observer.waiting,
            detail=lambda: self.queue.waiting_for.remote(version),
        )

    async def settle(
        self, step: int, batch: PreparedBatch, *, version: int, published: int
    ) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Write a finished step down, in the queue's books and in the ledger.

        Args: version: of the learner after it. published: that the engines get.
        Returns: the queue's counts, and what was discarded since the step before, as (prompt id, reason).
        Raises: LedgerError if the books don't agree.
        """
        discarded, counts, held = await self.ask(self.queue.advance, version, batch.group_ids, published)
        known = [prompt_id for prompt_id in held if self.outstanding.knows(prompt_id)]
        coming = len(held) - len(known)  # admitted, and the answer is on its way: without this queue they would be admitted once more
        counted = counts | {"admitted": counts["admitted"] - coming, "in_flight": counts["in_flight"] - coming}
        self.ledger.settle(step, trained=batch.prompt_ids, discarded=discarded, outstanding=known, counts=counted)
        self.outstanding.settle(version, published, trained=batch.prompt_ids, discarded=discarded)
        return counts, discarded
