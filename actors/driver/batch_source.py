"""Trajectory queue and correction service, and the driver's records of what they hold, by which both can be replaced at any time; and the
batches that the driver asks them for.

The ledger records finished steps, `Outstanding` the groups under way. While queue and service are replaced, learner, engines and objects in
the store are not touched. What is lost are the diagnostics of batches that the old service held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from actors.carriers import DiscardedGroup, PreparedBatch, QueueSettlement, StepVersions, Ticket
from actors.config import RunConfig
from actors.driver.batch_ahead import BatchAhead
from actors.driver.drawing import Drawing
from actors.driver.lost_parts import lost_among, while_they_answer
from actors.driver.parts import QUEUE, SERVICE, StartingPoint, make_queue, start_service
from actors.pool.pool import RolloutPool
from actors.processes.numbered import NumberedCaller
from actors.processes.supervision import call_with_retries, kill, lost_if_late, unless_set, wait_for
from actors.queue.outstanding import Outstanding
from actors.queue.payloads import whole_snapshot
from actors.ranks.learner_group import LearnerGroup
from actors.record.disk_waits import ByDisk
from actors.record.observer import Observer
from actors.record.run_folder import RunFolder
from actors.settings.deadlines import new_parts_s
from actors.state.ledger import Ledger
from actors.state.queue_snapshot import QueueSnapshot
from actors.state.resume import open_ledger
from correction.config import CorrectionConfig
from correction.errors import ActorLost, EvenkeelError

if TYPE_CHECKING:
    from correction.engines.agreement import Agreement
    from learner.results import StepResult

_LOOK_S = 0.1
_LAST_TOKENS_S = 5.0
"""For the tokens of finished groups after SIGTERM. A preemption leaves half a minute, in which the learner's copy and the disk have to
come, too. Its nodes go together: tokens on one that is gone would be waited for until the kill. From one that lives they come at once."""


class BatchSource:
    """Queue and service of a run from one starting point on. The queue exists from the beginning, the service after `start`."""

    def __init__(self, config: RunConfig, point: StartingPoint, ledger: Ledger, observer: Observer) -> None:
        self._config, self._observer, self.ledger = config, observer, ledger
        self.outstanding = Outstanding(point.state.queue if point.state else None, dynamic_sampling=config.dynamic_sampling)
        self.monitor: Mapping[str, Any] | None = point.state.monitor if point.state else None
        """State of the early warning after the last batch that was diagnosed."""
        self.correction = config.correction
        """Of the next batch that is begun."""
        self._unfinished = self.outstanding.in_flight
        self._ahead: BatchAhead | None = None
        self._open_queue()
        self.service: Any = None

    @classmethod
    async def opened(cls, config: RunConfig, point: StartingPoint, folder: RunFolder, observer: Observer, by_disk: ByDisk) -> BatchSource:
        """A source with the ledger of the run folder. Its file is read, and cut to the checkpoint, once all earlier lines are written.

        Raises: LedgerError; DeadlineExceeded if the disk hangs.
        """
        opening = partial(open_ledger, folder.path / "ledger.jsonl", point.state, observer.event, observer.disk.do)
        return cls(config, point, await by_disk(observer.disk.result(opening), "the ledger's checksum"), observer)

    @property
    def parts(self) -> dict[str, Any]:
        """The actors, by their names in messages."""
        return {QUEUE: self.queue} | ({SERVICE: self.service} if self.service is not None else {})

    def _open_queue(self) -> None:
        self.queue = make_queue(self._config)
        self._drawing = Drawing(NumberedCaller(self.queue, late=partial(self._observer.event, "warning")))

    def start(self, correction: CorrectionConfig) -> None:
        """Start the service. Args: correction: the run's, or the one that an alarm has put in its place."""
        self.correction = correction
        self.service = start_service(self._config, self.monitor)

    def replace(self, correction: CorrectionConfig) -> None:
        """Kill both and start new ones, which are empty: call `fill` next."""
        self.stop()
        kill(self.queue, self.service)
        self._open_queue()
        self.start(correction)

    async def fill(self, update: PreparedBatch | None = None, advance: StepVersions | None = None) -> None:
        """Give a new queue what is under way.

        Args:
            update: the batch of the step under way.
            advance: versions after it; None: it is still being trained.
        """
        contents = self.outstanding.contents(update.group_ids if update is not None else (), advance)
        what = "contents -> trajectory queue"
        await call_with_retries(lambda: self.queue.fill.remote(contents), what, deadline_s=self._config.deadlines.start_s)

    def take_unfinished(self) -> list[Ticket]:
        """Groups of the starting point that the pool has to sample; empty at a second call."""
        tickets, self._unfinished = self._unfinished, []
        return tickets

    async def switch(self, correction: CorrectionConfig) -> None:
        """Use this correction from the next batch on whose preparation begins."""
        self.monitor = None  # of a service that dies meanwhile: what it followed means something else now
        before, self.correction = self.correction, correction
        self.monitor = await self.ask(self.service.switch, before, correction)

    async def keep_scatter(self) -> None:
        """Hand the service's picture of tokens to the report."""
        try:
            self._observer.keep_scatter(await self.ask(self.service.scatter))
        except (EvenkeelError, ray.exceptions.RayError) as error:
            self._observer.event("warning", f"the report goes without its picture of tokens: {error}")

    def stop(self) -> None:
        """Prepare no further batch; what is prepared is dropped."""
        if self._ahead is not None:
            self._ahead.drop()
        self._ahead = None

    async def saved(self, is_hurried: asyncio.Event) -> tuple[QueueSnapshot, Mapping[str, Any] | None]:
        """What a checkpoint has of both: the queue's state, and the early warning's, which is None if it is to begin anew.

        Args: is_hurried: set, now or meanwhile, when the process may be killed in seconds. Then finished groups whose tokens are not here
            in _LAST_TOKENS_S are among those in flight, and the early warning knows what it did after the last diagnosis that came here.
        Raises: as whole_snapshot.
        """
        limit_s, tell = self._config.deadlines.checkpoint_s, partial(self._observer.event, "info")
        take = partial(whole_snapshot, self.queue, deadline_s=limit_s, tell=tell)
        return await unless_set(is_hurried, take()) or await take(tokens_s=_LAST_TOKENS_S), self.monitor

    async def ask(self, method: Any, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Make a call that may be repeated. Args: method: of the queue's or the service's actor. deadline_s: None: it is a short one."""
        what, limit_s = f"{method._method_name} <- queue or service", deadline_s or self._config.deadlines.sync_s
        call, notify = partial(method.remote, *arguments), self._observer.event
        return await while_they_answer(self.parts, call, what, deadline_s=limit_s, notify=notify)

    async def compared(self, version: int, result: StepResult) -> Agreement | None:
        """Ask the correction service to compare the batch. If it dies meanwhile, its replacement is asked, which lacks the batch.

        Raises: as `ask`, if all parts are there; ActorLost if the next one is late.
        """
        while True:
            asked, parts = self.service, self.parts
            try:
                found: Agreement | None = await self.ask(asked.compared, version, result)
                return found
            except ActorLost as error:
                lost = [parts[name] for name in (await lost_among(parts, error)).parts]
                if not lost and self.service is asked:
                    raise
            kill(*lost)  # so that a part that was only out of reach is replaced, too
            await lost_if_late(self._until_replaced(asked, f"comparison of the batch of version {version} <- a new correction service"))

    async def _until_replaced(self, service: Any, what: str) -> None:
        """Wait for another one. Args: what: the wait's name. Raises: DeadlineExceeded."""

        async def is_replaced() -> None:
            while self.service is service:
                await asyncio.sleep(_LOOK_S)

        deadlines = self._config.deadlines
        limit_s, notice_s = new_parts_s(deadlines.start_s), deadlines.notice_s
        await wait_for(is_replaced(), what, deadline_s=limit_s, notice_s=notice_s, notice=self._observer.waiting)

    async def next(self, version: int, learner: LearnerGroup, pool: RolloutPool, *, step: int) -> PreparedBatch:
        """The batch of a version, complete; the next one is begun before this returns.

        Args:
            learner: stands at this version, and is idle until this returns.
            pool: its last progress starts the deadline for groups.
            step: number of the step that will train it.
        """
        deadlines, delays = self._config.deadlines, self.outstanding.delays
        delays.asked()
        in_time = partial(
            wait_for,
            what=f"batch of version {version} <- trajectory queue",
            deadline_s=deadlines.batch_s,
            counts_from=pool.last_progress,
            notice_s=deadlines.notice_s,
            notice=self._observer.waiting,
            detail=lambda: self.queue.waiting_for.remote(version),
        )
        ahead = self._ahead if self._ahead is not None and self._ahead.version == version else self._begin(version)
        batch = await ahead.completed(learner, step=step, in_time=in_time)
        self._begin(version + 1)
        delays.given(batch.group_ids)
        return batch

    def _begin(self, version: int) -> BatchAhead:
        async def ask_service(method: str, *arguments: Any, deadline_s: float) -> Any:
            return await self.ask(getattr(service, method), *arguments, deadline_s=deadline_s)

        service = self.service
        self._ahead = BatchAhead(version, self.correction, self._config, self._drawing, ask_service)
        return self._ahead

    async def settle(
        self, step: int, batch: PreparedBatch, *, version: int, published: int
    ) -> tuple[dict[str, int], list[DiscardedGroup]]:
        """Record a finished step in the queue and in the ledger.

        Args:
            version: of the learner after it.
            published: version that the engines get.
        Returns: the queue's counts, and what was discarded since the step before.
        Raises: LedgerError if queue and ledger don't agree.
        """
        settled: QueueSettlement = await self.ask(self.queue.advance, version, batch.group_ids, published)
        discarded, counts = settled.discarded, settled.counts
        known = [prompt_id for prompt_id in settled.outstanding if self.outstanding.knows(prompt_id)]
        # Admitted, but the pool hasn't got the answer yet; a new queue would admit them again.
        coming = len(settled.outstanding) - len(known)
        counted = counts | {"admitted": counts["admitted"] - coming, "in_flight": counts["in_flight"] - coming}
        self.ledger.settle(step, trained=batch.prompt_ids, discarded=discarded, outstanding=known, counts=counted)
        self.outstanding.settle(version, published, trained=batch.prompt_ids, discarded=discarded)
        self._observer.note(self.outstanding.delays.read())
        return counts, discarded
