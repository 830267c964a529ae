"""When a finished step is reported: during the next one if that takes a moment, else before the end of that one, and at a flush."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.actors.carriers import Observation
from evenkeel.actors.driver.controller import StepReporter
from evenkeel.correction.early_warning.monitor import Event, State
from tests.actors.cases import FakeActor

EVENT = Event(step=3, name="k3_kl", state=State.ALARM, value=1.0, growth=2.0, message="m")


class ReporterScene:
    """A reporter whose observer and service keep a log. Its order is the contract: the learner has its work first, lines come in the order
    of steps, and none is missing at a flush."""

    def __init__(self, observation: Observation | None = None) -> None:
        self.log: list[str] = []
        self.events: list[Event] = []
        self.observation = observation
        self.observed: Any = None
        self.is_cancelled = False
        service = FakeActor(SimpleNamespace(observe=self._observe))
        on_observed = lambda observation: self.events.extend(observation.events)  # noqa: E731
        self.reporter = StepReporter(self, service=lambda: service, on_observed=on_observed)  # type: ignore[arg-type]

    async def _observe(self, step: int, *_: Any) -> Observation | None:
        return self.observation

    def end_step(self, number: int) -> Any:
        self.log.append(f"end {number}")
        batch, result = SimpleNamespace(version=number - 1), SimpleNamespace(values=None)
        return SimpleNamespace(number=number, batch=batch, result=result)

    def report(self, step: Any, observed: Any) -> None:
        self.log.append(f"reported {step.number}")
        self.observed = observed

    async def flush(self) -> None:
        self.log.append("flush")

    def end(self, number: int) -> None:
        self.reporter.end_step(lambda: self.end_step(number))

    async def work(self, seconds: float) -> str:
        self.log.append("work")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        self.log.append("done")
        return "result"


@pytest.mark.parametrize("after_s", [0.0, 0.05], ids=["at once", "when late"])
def test_a_step_is_reported_when_the_next_one_is_under_way_and_once(after_s: float) -> None:
    """The learner has its work first; a terminal that shows the step before last for as long as a batch takes would mislead."""

    async def scenario() -> None:
        scene = ReporterScene()
        scene.end(3)
        assert await scene.reporter.report_during(scene.work(0.3), after_s=after_s) == "result"
        assert scene.log == ["end 3", "work", "reported 3", "done"]
        await scene.reporter.report_during(scene.work(0.3), after_s=after_s)
        assert scene.log.count("reported 3") == 1

    asyncio.run(scenario())


def test_without_such_a_moment_it_is_reported_before_the_next_one_ends() -> None:
    """Lines are written in the order of steps, and the service holds the batch of the step before, no older one."""

    async def scenario() -> None:
        scene = ReporterScene()
        scene.end(3)
        await scene.reporter.report_during(scene.work(0.0), after_s=10.0)
        scene.end(4)
        assert scene.log == ["end 3", "work", "done", "reported 3", "end 4"]

    asyncio.run(scenario())


@pytest.mark.parametrize("after_s", [0.0, 10.0])
def test_a_flush_reports_what_is_unreported_whatever_has_ended_the_work(after_s: float) -> None:
    """What came just before the end of a run is what one wants to read."""

    async def scenario() -> None:
        scene = ReporterScene()
        scene.end(3)

        async def fails() -> None:
            raise RuntimeError("no batch")

        with pytest.raises(RuntimeError, match="no batch"):
            await scene.reporter.report_during(fails(), after_s=after_s)
        await scene.reporter.flush()
        assert scene.log == ["end 3", "reported 3", "flush"]
        await scene.reporter.flush()
        assert scene.log.count("reported 3") == 1

    asyncio.run(scenario())


def test_what_can_not_be_reported_ends_the_run() -> None:
    async def scenario() -> None:
        scene = ReporterScene()

        def full(*_: Any) -> None:
            raise OSError("no space left on device")

        scene.report = full  # type: ignore[method-assign]
        scene.end(3)
        with pytest.raises(OSError, match="no space left"):
            await scene.reporter.report_during(scene.work(0.3), after_s=0.0)
        await asyncio.sleep(0)
        assert scene.is_cancelled, "the work ends with it"

    asyncio.run(scenario())


@pytest.mark.parametrize("is_known", [True, False])
def test_what_the_early_warning_says_is_handed_on_once_it_is_known(is_known: bool) -> None:
    observation = Observation({}, (EVENT,), State.ALARM, 0.0) if is_known else None

    async def scenario() -> None:
        scene = ReporterScene(observation)
        scene.end(3)
        await scene.reporter.flush()
        assert await scene.observed is observation
        assert scene.events == ([EVENT] if is_known else [])

    asyncio.run(scenario())
