"""The book of groups with its ledger, and the correction service: where the driver's batches come from, and what they leave.

A service that dies is replaced: the draw that it had is taken back, and the new one packs again; learner, engines and objects in the store
are not touched. What is lost are the diagnostics of batches that the old one held.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from evenkeel.actors.carriers import DiscardedGroup, PreparedBatch, Ticket
from evenkeel.actors.checkpoints.state import open_ledger
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.batch_ahead import BatchAhead
from evenkeel.actors.driver.lost_parts import lost_among, while_they_answer
from evenkeel.actors.driver.parts import SERVICE, StartingPoint, start_service
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.groups.changes import Changes
from evenkeel.actors.groups.ledger import Ledger
from evenkeel.actors.groups.snapshot import QueueSnapshot
from evenkeel.actors.groups.tokens import whole_snapshot
from evenkeel.actors.pool.pool import RolloutPool
from evenkeel.actors.processes.supervision import kill, lost_if_late, unless_set, wait_for
from evenkeel.actors.ranks.learner_group import LearnerGroup
from evenkeel.actors.record.disk_waits import ByDisk
from evenkeel.actors.record.observer import Observer
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.settings.deadlines import new_parts_s
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.errors import ActorLost, EvenkeelError

if TYPE_CHECKING:
    from evenkeel.engines.agreement import Agreement
    from evenkeel.learner.results import StepResult

_LOOK_S = 0.1
_SHORTEST_S, _LONGEST_S = 0.25, 1.0
_SHARE = 0.25
"""Of a step: how long a drawn group waits for others, between the shortest and the longest time, while the learner is at work."""
_LAST_TOKENS_S = 5.0
"""For the tokens of finished groups after SIGTERM. A preemption leaves half a minute, in which the learner's copy and the disk have to
come, too. Its nodes go together: tokens on one that is gone would be waited for until the kill. From one that lives they come at once."""


class BatchSource:
    """Book and service of a run from one starting point on. The book exists from the beginning, the service after `start`."""

    def __init__(self, config: RunConfig, point: StartingPoint, ledger: Ledger, observer: Observer) -> None:
        self._config, self._observer, self.ledger = config, observer, ledger
        self.changes = Changes()
        self.book = GroupBook(
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            dynamic_sampling=config.dynamic_sampling,
            snapshot=point.state.queue if point.state else None,
            changed=self.changes.tell,
        )
        self.monitor: Mapping[str, Any] | None = point.state.monitor if point.state else None
        """State of the early warning after the last batch that was diagnosed."""
        self.correction = config.correction
        """Of the next batch that is begun."""
        self._unfinished = self.book.in_flight
        self._ahead: BatchAhead | None = None
        self._asked_at, self._gather_s = time.monotonic(), _SHORTEST_S
        self.service: Any = None

    @classmethod
    async def opened(cls, config: RunConfig, point: StartingPoint, folder: RunFolder, observer: Observer, by_disk: ByDisk) -> BatchSource:
        """A source with the ledger of the run folder. Its file is read, and cut to the checkpoint, once all earlier lines are written.

        Raises: LedgerError; DeadlineExceeded if the disk hangs.
        """
        opening = partial(open_ledger, folder.path / "ledger.jsonl", point.state, observer.event, observer.disk.do)
        source = cls(config, point, await by_disk(observer.disk.result(opening), "the ledger's checksum"), observer)
        source.ledger.compare(source.book.contents())
        return source

    @property
    def parts(self) -> dict[str, Any]:
        """The service, once it is started, by its name in messages."""
        return {SERVICE: self.service} if self.service is not None else {}

    def start(self, correction: CorrectionConfig) -> None:
        """Start the service. Args: correction: the run's, or the one that an alarm has put in its place."""
        self.correction = correction
        self.service = start_service(self._config, self.monitor)

    def replace(self, correction: CorrectionConfig, version: int) -> None:
        """Kill the service, take back what was drawn for the batches of `version` and later, and start a new one."""
        self.stop()
        kill(self.service)
        self.book.take_back(version)
        self.start(correction)

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
        """What a checkpoint has of both: the book's contents, and the early warning's state, which is None if it is to begin anew.

        Args: is_hurried: set, now or meanwhile, when the process may be killed in seconds. Then finished groups whose tokens are not here
            in _LAST_TOKENS_S are among those in flight.
        Raises: LedgerError if the book has lost or doubled a prompt.
        """
        contents = self.book.contents()
        self.ledger.compare(contents)
        take = partial(whole_snapshot, contents, tell=partial(self._observer.event, "info"))
        whole = await unless_set(is_hurried, take(tokens_s=self._config.deadlines.checkpoint_s))
        return whole or await take(tokens_s=_LAST_TOKENS_S), self.monitor

    async def ask(self, method: Any, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Make a call of the service that may be repeated. Args: deadline_s: None: it is a short one."""
        what, limit_s = f"{method._method_name} <- correction service", deadline_s or self._config.deadlines.sync_s
        call, notify = partial(method.remote, *arguments), self._observer.event
        return await while_they_answer(self.parts, call, what, deadline_s=limit_s, notify=notify)

    async def compared(self, version: int, result: StepResult) -> Agreement | None:
        """Ask the correction service to compare the batch. If it dies meanwhile, its replacement is asked, which lacks the batch.

        Raises: as `ask`, if it is there; ActorLost if the next one is late.
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
            kill(*lost)  # so that one that was only out of reach is replaced, too
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
        deadlines, delays, now = self._config.deadlines, self.book.delays, time.monotonic()
        delays.asked(now)

        async def waiting_for() -> str:
            return self.book.waiting_for(version)

        in_time = partial(
            wait_for,
            what=f"batch of version {version} <- rollout workers",
            deadline_s=deadlines.batch_s,
            counts_from=pool.last_progress,
            notice_s=deadlines.notice_s,
            notice=self._observer.waiting,
            detail=waiting_for,
        )
        ahead = self._ahead if self._ahead is not None and self._ahead.version == version else self._begin(version)
        batch = await ahead.completed(learner, step=step, in_time=in_time)
        self._gather_s = min(max(_SHARE * (now - self._asked_at), _SHORTEST_S), _LONGEST_S)
        self._asked_at = now
        self._begin(version + 1)
        delays.given(self.book.finished_at(batch.group_ids), time.monotonic())
        return batch

    def _begin(self, version: int) -> BatchAhead:
        async def ask_service(method: str, *arguments: Any, deadline_s: float) -> Any:
            return await self.ask(getattr(service, method), *arguments, deadline_s=deadline_s)

        service = self.service
        self._ahead = BatchAhead(version, self.correction, self._config, self.book, self.changes, ask_service, gather_s=self._gather_s)
        return self._ahead

    def settle(self, step: int, batch: PreparedBatch, *, version: int, published: int) -> tuple[dict[str, int], list[DiscardedGroup]]:
        """Record a finished step in the book and in the ledger.

        Args:
            version: of the learner after it.
            published: version that the engines get.
        Returns: the book's counts, and what was discarded since the step before.
        Raises: LedgerError if the book has lost or doubled a prompt.
        """
        discarded = self.book.settle(version, published, batch.group_ids, now=time.monotonic())
        self.ledger.settle(step, trained=batch.prompt_ids, discarded=discarded, contents=self.book.contents())
        self._observer.note(self.book.delays.read())
        return self.book.counts(), discarded
