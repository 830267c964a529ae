"""An observer with all that it writes to, and steps for it to write."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evenkeel.actors.carriers import Observation
from evenkeel.actors.config import RunConfig
from evenkeel.actors.metrics.exporter import MetricsEndpoint
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.observer import Observer
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.terminal import TerminalView
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.early_warning.monitor import Event, State
from evenkeel.recipe import load_config

RECIPE = Path(__file__).parents[2] / "e2e" / "small.yaml"
WATCH = Event(2, "k3_kl", State.WATCH, 2e-3, 2.0, "k3_kl = 0.002, 2.0 times the level")
ALARM = Event(3, "k3_kl", State.ALARM, 8e-3, 8.0, "k3_kl = 0.008, 8.0 times the level")
BROKEN = Event(3, "broken_tokens", State.ALARM, math.inf, math.nan, "broken_tokens = inf")
OVER = Event(4, "k3_kl", State.OK, 1e-3, 1.0, "k3_kl = 0.001 is back where it was")


@dataclass
class Seen:
    """An observer and what it writes to."""

    observer: Observer
    folder: RunFolder
    screen: io.StringIO

    def settle(self) -> None:
        """Until all is written."""
        asyncio.run(self.observer.disk.done())

    def line(self, step: int) -> dict[str, float]:
        return dict(next(metrics for metrics in self.folder.read_metrics() if metrics.step == step))


def observe(folder: RunFolder, totals: dict[str, float] | None = None) -> Seen:
    screen = io.StringIO()
    view = TerminalView(10, "a run", console=Console(file=screen, width=200))
    observer = Observer(with_devices(load_config(RunConfig, RECIPE), has_gpu=False), folder, view, totals)
    observer._endpoint._own = MetricsEndpoint("controller", "0")
    observer._endpoint._open.callback(observer._endpoint._own.close)
    return Seen(observer, folder, screen)


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Seen]:
    with RunFolder.create(tmp_path / "run", "x") as folder:
        folder.write_text("config.yaml", "name: x\nsteps: 10\n")
        seen = observe(folder)
        yield seen
        seen.observer.close()


def diagnosed(*events: Event, state: State) -> Observation:
    return Observation({"k3_kl": 1e-3}, events, state, 0.01)


async def write(observer: Observer, *steps: tuple[int, Observation | None]) -> None:
    """Finished steps, whose observations come last first."""
    waits, writer = [asyncio.get_running_loop().create_future() for _ in steps], observer.steps
    for (step, _), wait in zip(steps, waits, strict=True):
        metrics, loads = StepMetrics(step, {"time/step_s": 1.0}), asyncio.sleep(0, {})
        own = {"correction/kept_share": 0.75, "correction/broken_tokens": 2.0}
        writer._writing = asyncio.create_task(writer._write_when_known(metrics, own, {}, loads, wait, writer._writing))
    for (_, observation), wait in reversed(list(zip(steps, waits, strict=True))):
        await asyncio.sleep(0.01)
        wait.set_result(observation)
    await writer.flush()


class StandInReference:
    """To an object that never comes, or whose reading fails as nobody expects."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def __await__(self) -> Generator[Any, None, Any]:
        if self._error is not None:
            raise self._error
        return asyncio.Event().wait().__await__()
