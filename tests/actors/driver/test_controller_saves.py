"""The emergency save: after SIGTERM a checkpoint waits neither for tokens on nodes that are gone nor for a diagnosis under way."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.carriers import StoredGroup
from evenkeel.actors.driver.batches import _LAST_TOKENS_S
from evenkeel.actors.driver.controller import Controller
from evenkeel.actors.groups.ledger import imbalance_of
from evenkeel.rollout.trajectory import UnfinishedGroup
from tests.actors.cases import FakeActor, group, prompts, stored
from tests.actors.driver.controller_cases import EventsRecorder, controller, nothing, source
from tests.actors.simulated_time import simulate

KNOWN = {"series": {}, "states": {}}
"""What the driver has of the early warning, from the last diagnosis that it has heard of."""


class OnADeadNode:
    """A reference to a group; whoever reads it waits for ever."""

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.get_running_loop().create_future().__await__()


class Service:
    """Diagnoses for 100 s, and would answer after that."""

    async def switch(self, *_: Any) -> Any:
        await asyncio.sleep(100.0)


async def run_with_groups(recorder: EventsRecorder) -> Controller:
    """At a step's end: three groups are finished, of which one lies on a node that doesn't answer; a fourth is being sampled, of which one
    worker has told, and what another one has told lies on that node."""
    run = controller(recorder)
    run._source, run._task = source(run, FakeActor(Service())), SimpleNamespace(fingerprint="0f", state={})  # type: ignore[assignment]
    run._source.monitor, book = KNOWN, run._source.book
    *finished, begun = (group(ticket) for ticket in book.admit(prompts(0, 4), now=0.0))
    for one in (*stored(*finished[:2]), StoredGroup(finished[2].facts, OnADeadNode())):
        book.finish(one, now=0.0)
    told = asyncio.get_running_loop().create_future()
    told.set_result({3: UnfinishedGroup(3, begun.trajectories)})
    late = asyncio.get_running_loop().create_future()  # which the pool reads, too
    run._pool.turns_so_far = lambda: [OnADeadNode(), told, late]  # type: ignore[method-assign]
    run._learner = SimpleNamespace(abort=nothing)  # type: ignore[assignment]
    recorder.totals = dict  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("comes_at", [0.0, 100.0], ids=["before", "while a checkpoint waits for them already"])
def test_sigterm_leaves_tokens_seconds_and_asks_no_service(comes_at: float) -> None:
    async def scenario() -> None:
        recorder = EventsRecorder()
        run = await run_with_groups(recorder)
        loop = asyncio.get_running_loop()
        run._shutdown.is_training = True
        main = asyncio.current_task()
        assert main is not None
        if comes_at:
            loop.call_later(comes_at, run._shutdown._take, signal.SIGTERM, main)
        else:
            run._shutdown._take(signal.SIGTERM, main)
        state = await run._training_state()
        assert comes_at + _LAST_TOKENS_S <= loop.time() <= comes_at + _LAST_TOKENS_S + 1.0
        assert [one.group_id for one in state.book.finished] == [0, 1]
        assert [ticket.group_id for ticket in state.book.in_flight] == [2, 3], "a resume samples it again"
        assert [one.group_id for one in state.book.so_far] == [3]
        assert imbalance_of(state.book, None) is None
        assert state.monitor == KNOWN
        said = "the tokens of 1 finished group can't be read: the checkpoint has their prompts, to be sampled again"
        assert recorder.events.count(said) == 1
        said = "the turns that 2 workers told of can't be read: in the checkpoint their rollouts go on from earlier ones"
        assert recorder.events.count(said) == 1
        assert not run._pool.turns_so_far()[-1].cancelled(), "a save that gives up takes it from nobody else"

    simulate(scenario)


def test_ctrl_c_has_time() -> None:
    """Nobody kills seconds after it: tokens are waited for, as in any checkpoint."""

    async def scenario() -> None:
        run = await run_with_groups(EventsRecorder())
        main = asyncio.current_task()
        assert main is not None
        run._shutdown.is_training = True
        run._shutdown._take(signal.SIGINT, main)
        state = await run._training_state()
        assert state.monitor == KNOWN
        assert asyncio.get_running_loop().time() >= run._config.deadlines.checkpoint_s

    simulate(scenario)


def test_an_alarm_s_answer_does_not_hold_the_save_up() -> None:
    """The correction is the new one, in the checkpoint too, and the early warning begins anew with it."""

    async def scenario() -> None:
        run = await run_with_groups(EventsRecorder())
        replacement = SimpleNamespace(correction=None)
        action = SimpleNamespace(text="", replacement=replacement)
        run._alarms = SimpleNamespace(has_some=True, decide=lambda: action, replacement=replacement)  # type: ignore[assignment]
        run._shutdown.is_hurried.set()
        await run._answer_alarms()
        state = await run._training_state()
        assert asyncio.get_running_loop().time() <= _LAST_TOKENS_S + 1.0
        assert state.replacement is replacement and state.monitor is None  # type: ignore[comparison-overlap]

    simulate(scenario)


class DiagnosingRecorder(EventsRecorder):
    """The lines of the last step wait a minute for their diagnosis, unless they are to wait no more."""

    def __init__(self) -> None:
        super().__init__()
        self._waits_no_more = asyncio.Event()

    def stop_waiting(self) -> None:
        self._waits_no_more.set()

    async def flush(self) -> None:
        await asyncio.wait({asyncio.ensure_future(self._waits_no_more.wait())}, timeout=60.0)
        await super().flush()


def test_a_signal_while_the_learner_waits_for_its_batch_saves_at_once() -> None:
    """Whoever sends SIGTERM may kill in a few seconds. No step is under way, and the batch may take long, as may the last step's diagnosis;
    what is being sampled is in the checkpoint by its prompts."""

    async def scenario() -> None:
        recorder = DiagnosingRecorder()
        run = controller(recorder)
        saved: list[int] = []

        async def begin(step: int, *_: Any) -> None:
            saved.append(step)

        run._shutdown.is_training = True
        run._source, run._learner = source(run, None), SimpleNamespace(abort=nothing)  # type: ignore[assignment]
        asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGTERM)
        run._checkpoints = SimpleNamespace(  # type: ignore[assignment]
            finished=nothing, save_with_retries=lambda _, save: save(), begin=begin, saved_step=1
        )
        with run._shutdown.handled():
            await run._train_and_save()
        assert saved == [2] and run._step == 2 and not recorder.pending
        assert recorder.events[-1] == (
            "[ending] interrupted (SIGTERM): ending with a checkpoint of the last finished step, or of the one under way if it can't "
            "be aborted (next time: at once); "
            "until that is on disk, a resume goes on from step 1"
        )

    asyncio.run(asyncio.wait_for(scenario(), 20.0))
