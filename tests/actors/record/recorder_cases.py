"""A recorder with all that it writes to, and steps for it to write."""

from __future__ import annotations

import asyncio
import io
import json
import math
import urllib.request
from collections.abc import Awaitable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evenkeel.actors.carriers import DiscardedGroup, Observation, PreparedBatch
from evenkeel.actors.config import RunConfig
from evenkeel.actors.record.recorder import Recorder
from evenkeel.actors.record.run_folder import RunEvent, RunFolder
from evenkeel.actors.record.terminal import TerminalView
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.early_warning.monitor import Event, State
from evenkeel.learner.results import StepResult
from evenkeel.recipe import load_config
from evenkeel.rollout.trajectory import AnswerPlace, GroupFacts, WorkerLoad
from tests.actors.cases import facts
from tests.actors.metrics.real_prometheus import until

RECIPE = Path(__file__).parents[2] / "e2e" / "small.yaml"
WATCH = Event(2, "k3_kl", State.WATCH, 2e-3, 2.0, "k3_kl = 0.002, 2.0 times the level")
ALARM = Event(3, "k3_kl", State.ALARM, 8e-3, 8.0, "k3_kl = 0.008, 8.0 times the level")
BROKEN = Event(3, "broken_tokens", State.ALARM, math.inf, math.nan, "broken_tokens = inf")
OVER = Event(4, "k3_kl", State.OK, 1e-3, 1.0, "k3_kl = 0.001 is back where it was")


COUNTS = dict.fromkeys(("admitted", "trained", "discarded", "finished", "in_flight", "drawn"), 0)
CONFIG = with_devices(load_config(RunConfig, RECIPE), has_gpu=False)
_DISCOVERY = "Prometheus service discovery at "


@dataclass
class Seen:
    """A recorder and what it writes to."""

    recorder: Recorder
    folder: RunFolder
    screen: io.StringIO

    def settle(self) -> None:
        """Until all is written."""
        asyncio.run(self.recorder.disk.done())

    def line(self, step: int) -> dict[str, float]:
        return dict(next(metrics for metrics in self.folder.read_metrics() if metrics.step == step))

    def told(self) -> list[RunEvent]:
        """What events.log has, but for where Prometheus asks."""
        return [event for event in self.folder.read_events() if not event.text.startswith(_DISCOVERY)]

    def discovered(self) -> list[dict[str, Any]]:
        """Endpoints that Prometheus is told of."""
        found = ""

        def is_told() -> bool:  # written behind
            nonlocal found
            found = next((event.text for event in self.folder.read_events() if event.text.startswith(_DISCOVERY)), "")
            return bool(found)

        assert until(is_told)
        with urllib.request.urlopen(found.removeprefix(_DISCOVERY)) as answer:
            return list(json.load(answer))

    def page(self) -> str:
        """What Prometheus gets of the driver."""
        driver = next(one for one in self.discovered() if one["labels"]["role"] == "controller")
        with urllib.request.urlopen(f"http://{driver['targets'][0]}/metrics") as answer:
            return str(answer.read().decode())


def observe(folder: RunFolder, totals: dict[str, float] | None = None, config: RunConfig = CONFIG) -> Seen:
    """A recorder that serves its numbers, as a run's does."""
    screen = io.StringIO()
    view = TerminalView(10, "a run", console=Console(file=screen, width=200))
    seen = Seen(Recorder(config, folder, view, totals), folder, screen)

    async def serve() -> None:
        seen.recorder.serve()

    asyncio.run(serve())
    return seen


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Seen]:
    with RunFolder.create(tmp_path / "run", "x") as folder:
        folder.write_text("config.yaml", "name: x\nsteps: 10\n")
        seen = observe(folder)
        yield seen
        seen.recorder.close()


def diagnosed(*events: Event, state: State) -> Observation:
    return Observation({"k3_kl": 1e-3}, events, state, 0.01)


def result_of(step: int, **changes: Any) -> StepResult:
    """Of 8 tokens 6 are kept, and 2 were broken."""
    numbers = {"loss": 1.0, "entropy": 0.5, "learning_rate": 1e-3, "loss_scale": None, "routing_agreement": None}
    counts = {"tokens": 14, "trained_tokens": 8, "kept_tokens": 6, "broken_tokens": 2, "optimizer_steps": 1, "microbatches": 1}
    rest = {"metrics": {}, "values": None, "grad_norms": (1.0,), "group_norms": {}, "skipped": ()}
    return StepResult(**{"step": step, **numbers, **counts, **rest, **changes})  # type: ignore[arg-type]


def batch_of(*groups: GroupFacts, version: int = 0, corrected: Any = None) -> PreparedBatch:
    """The first answer of each group is trained."""
    groups = groups or (facts(1, 5), facts(2, 9))
    places = tuple(AnswerPlace(place, 0) for place in range(len(groups)))
    return PreparedBatch(version, CorrectionConfig(preset="tis-token"), corrected, 14, groups, places, 0.0, 0.0)


def end_step(
    recorder: Recorder,
    step: int,
    observed: Awaitable[Observation | None] | None = None,
    *,
    batch: PreparedBatch | None = None,
    result: StepResult | None = None,
    counts: Mapping[str, int] = COUNTS,
    discarded: Sequence[DiscardedGroup] = (),
    loads: Awaitable[dict[str, WorkerLoad]] | None = None,
) -> None:
    """As the controller does. Args: observed: None: the service tells nothing. loads: None: no worker answers."""
    batch, result, loads = batch or batch_of(), result or result_of(step), loads or asyncio.sleep(0, {})
    ask = lambda *_: observed or asyncio.sleep(0, None)  # noqa: E731
    recorder.end_step(step, step, batch, result, {"train": 1.0}, counts, discarded, loads, ask)


async def write(recorder: Recorder, *steps: tuple[int, Observation | None]) -> None:
    """Finished steps, whose observations come last first."""
    waits = [asyncio.get_running_loop().create_future() for _ in steps]
    for (step, _), wait in zip(steps, waits, strict=True):
        end_step(recorder, step, wait)
    flushing = asyncio.create_task(recorder.flush())
    for (_, observation), wait in reversed(list(zip(steps, waits, strict=True))):
        await asyncio.sleep(0.01)
        wait.set_result(observation)
    await flushing


class StandInReference:
    """To an object that never comes, or whose reading fails as nobody expects."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def __await__(self) -> Generator[Any, None, Any]:
        if self._error is not None:
            raise self._error
        return asyncio.Event().wait().__await__()
