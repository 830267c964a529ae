"""A correction service that dies as it compares a batch bit by bit, in a run with true on-policy."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from evenkeel.actors.driver.controller import Controller, StepUnderWay
from evenkeel.correction.errors import ActorLost
from tests.actors.cases import FakeActor
from tests.actors.driver.controller_cases import controller, source
from tests.actors.driver.test_controller_rollback import RollbackRecorder
from tests.actors.simulated_time import simulate


class ComparingService:
    """Of a run with true on-policy; raises what it is given, as does a question whether it is there if its process has died."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error, self.asked = error, 0

    async def __ray_ready__(self) -> None:
        if isinstance(self._error, ActorDiedError):
            raise self._error

    async def compared(self, *_: Any) -> None:
        self.asked += 1
        if self._error is not None:
            raise self._error


def comparing_run(service: ComparingService) -> Controller:
    run = controller(RollbackRecorder())
    run._config = run._config.model_copy(update={"true_on_policy": True, "true_on_policy_on_difference": "correct"})
    run._source = source(run, FakeActor(service))
    return run


def test_a_service_that_dies_as_it_compares_a_batch_is_replaced_and_the_step_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner has made it already. The new service is asked, which hasn't got the batch: that is said, and the weights go out."""
    killed, published = list[Any](), list[int]()
    monkeypatch.setattr("ray.kill", killed.append)

    async def scenario() -> None:
        old, new, result = ComparingService(ActorDiedError()), ComparingService(), SimpleNamespace(values="values")
        run = comparing_run(old)
        monkeypatch.setattr(run, "_learn", lambda _: asyncio.sleep(0, result))
        monkeypatch.setattr(run, "_publish", lambda: asyncio.sleep(0, published.append(1)))
        monkeypatch.setattr("evenkeel.actors.driver.batches.start_service", lambda *_: FakeActor(new))
        step = StepUnderWay(SimpleNamespace(version=2), run._learn_and_publish)  # type: ignore[arg-type]
        await asyncio.sleep(0.3)
        assert (old.asked, published) == (1, []), "it waits for the new service"
        assert [actor.instance for actor in killed] == [old]
        run._source.replace(run._config.correction, 3)
        assert await step.result() is result
        assert (old.asked, new.asked, published) == (1, 1, [1])
        assert run._recorder.events == [  # type: ignore[attr-defined]
            "step 3: its batch is gone with the correction service, and can't be compared bit by bit"
        ]

    asyncio.run(scenario())


def test_a_service_that_nobody_replaces_takes_the_run_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the longest pause before a replacement, and a start; until then it is said what is waited for."""
    monkeypatch.setattr("ray.kill", lambda _: None)
    notices: list[str] = []

    async def scenario() -> None:
        run = comparing_run(ComparingService(ActorDiedError()))
        run._source._recorder.waiting = lambda notice: notices.append(str(notice))  # type: ignore[method-assign]
        comparing = asyncio.wait_for(run._source.compared(2, None), 9000.0)
        with pytest.raises(ActorLost, match=r"^comparison of the batch of version 2 <- a new correction service: not done in 660 s"):
            await comparing
        assert asyncio.get_running_loop().time() == pytest.approx(660.0, abs=1.0)

    simulate(scenario)
    assert {notice.partition(" s for ")[2] for notice in notices} == {"comparison of the batch of version 2 <- a new correction service"}


def test_a_comparison_whose_answer_is_lost_though_all_parts_are_there_takes_the_run_back() -> None:
    """Nobody would replace the service: a wait for that would have no end."""

    async def scenario() -> None:
        lost = ActorLost("what the learner computed of a batch <- rank 0: its answer was lost")
        service = ComparingService(RayTaskError("compared", "a long traceback", lost))
        with pytest.raises(ActorLost, match="its answer was lost"):
            await comparing_run(service)._source.compared(2, None)
        assert service.asked == 1

    asyncio.run(scenario())
