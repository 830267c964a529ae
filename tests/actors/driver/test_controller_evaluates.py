"""The controller's evaluations: an end of their own, and a run that goes on without one. All parts are played."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayActorError

from evenkeel.correction.errors import ActorLost, DeadlineExceeded, EngineError
from tests.actors.driver.controller_cases import EventsRecorder, Receipts, SilentPool, controller

LATE = "weight sync v2 -> workers 3: no receipt in 390 s"


def test_an_evaluation_during_training_has_a_name_and_an_end() -> None:
    async def scenario() -> None:
        recorder = EventsRecorder()
        run = controller(recorder)
        run._evaluations.begin_if_due(run._step, run._version)
        await asyncio.wait_for(run._evaluations.finished(), 10.0)
        await asyncio.sleep(0)
        *notices, failure = recorder.events
        assert all(notice.endswith("s for evaluation during step 3, weights v2 <- rollout workers") for notice in notices) and notices
        assert "evaluation during step 3, weights v2 <- rollout workers: not done in 0 s" in failure

    asyncio.run(scenario())


def test_the_last_evaluation_waits_for_the_one_under_way_and_has_an_end_of_its_own() -> None:
    async def scenario() -> None:
        recorder = EventsRecorder()
        run = controller(recorder)
        run._evaluations.begin_if_due(run._step, run._version)
        assert await asyncio.wait_for(run._evaluations.whole("after training", 2, 2, run._sync), 10.0) is None, "the run goes on without it"
        assert recorder.events[-1].startswith("left out: evaluation after training, weights v2 <- rollout workers: not done")
        assert any("an evaluation during training failed" in event for event in recorder.events)

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [EngineError("lost three engines with these questions"), ActorLost("gone"), RayActorError()])
def test_an_evaluation_that_can_not_be_made_is_left_out_before_training(error: Exception) -> None:
    """The questions may be what kills engines, or the losses have nothing to do with it: a run needs no number from before."""

    class Dangerous(SilentPool):
        async def answer(self, *_: Any) -> Any:
            raise error

    async def scenario() -> None:
        recorder = EventsRecorder()
        run = controller(recorder)
        run._evaluations._answerer = Dangerous()
        assert await run._evaluations.whole("before training", 2, 2, run._sync) is None
        assert recorder.events[-1].startswith("left out: ")

    asyncio.run(scenario())


def test_an_engine_that_has_no_weights_in_time_keeps_no_evaluation() -> None:
    class Late(Receipts):
        async def receipts(self, version: int, *, deadline_s: float) -> None:
            raise DeadlineExceeded(LATE)

    class Quick(SilentPool):
        async def answer(self, *_: Any) -> Any:
            return [()] * 4

    async def scenario() -> None:
        recorder = EventsRecorder()
        run = controller(recorder)
        run._sync, run._evaluations._answerer = Late(), Quick()  # type: ignore[assignment]
        assert await run._evaluations.whole("before training", 2, 2, run._sync) is not None
        assert recorder.events == [f"the evaluation before training goes without some engines: {LATE}"] and recorder.evaluations == 1

    asyncio.run(scenario())
