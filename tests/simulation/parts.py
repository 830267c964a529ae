"""The smaller parts that a simulated run has instead of the real ones: questions, the folder's bulk, who is told what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.exceptions

from evenkeel.actors.carriers import ActorInfo, Ticket
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.processes.supervision import abandon, wait_for
from evenkeel.actors.record.disk_writer import DiskWriter
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.errors import EvenkeelError
from evenkeel.rollout.prompt_place import PromptPlace
from evenkeel.rollout.trajectory import GroupFacts, Prompt


class SimulatedTask:
    """Questions without end."""

    name, fingerprint, questions_per_epoch = "questions", "fingerprint", None

    def __init__(self, task: str, number: int, tasks: int) -> None:
        """Args: task: its name among several, which have their prompts in turn; number: among these."""
        self._task, self._number, self._tasks = task, number, tasks

    def train_prompt(self, position: int) -> Prompt:
        return self._prompt("train", position * self._tasks + self._number)  # its place in the run, by which the books know it

    def held_out_prompts(self) -> tuple[Prompt, ...]:
        return tuple(self._prompt("held_out", position) for position in range(6))

    def _prompt(self, source: str, position: int) -> Prompt:
        place = PromptPlace(source, 0, position, self._task)
        return Prompt(str(place), f"question {position}", (1, 2, 3), f"answer {position}")


class SimulatedFolder(RunFolder):
    """On a disk, without a lock and without the files of a model."""

    def __init__(self, path: Path, tell: Callable[[str, str], None]) -> None:
        super().__init__(path)
        self._tell = tell
        for name in ("checkpoints", "trajectories"):
            (path / name).mkdir(parents=True, exist_ok=True)

    def keep_model_files(self, source: Path) -> None: ...

    def event(self, level: str, text: str) -> Any:
        self._tell(level, text)


class Notes:
    """In place of the recorder: it is told everything, and keeps what the run's books are compared with. Its lines are of a number each."""

    def __init__(self, world: Any, folder: RunFolder) -> None:
        self._world, self._folder = world, folder
        self._writing: asyncio.Task[None] | None = None
        self._observing: asyncio.Future[Any] | None = None
        self._waits_no_more = False
        self.disk = DiskWriter(lambda text: self.event("warning", text))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None  # what is only shown to people

    def event(self, level: str, text: Any, kind: str = "") -> None:
        self._world.tells(level, str(text))

    phase = waiting = doing = lambda self, said: self._world.tells("info", str(said))

    def probed(self, target: Any, version: int, difference: float) -> None:
        if difference > 0:
            self._world.books.refuse(f"{target.name} holds other weights than the learner's of version {version}, by its probe")

    def joined(self, info: ActorInfo) -> None:
        self._world.faults.has_scored = self._world.faults.has_scored or info.role == "rollout"

    def roll_back(self, totals: Any, step: int) -> None:
        self._world.rolled_back()

    def saved(self, path: Path, step: int, seconds: float) -> None:
        self._world.checkpoint_saved(path)

    def totals(self) -> dict[str, float]:
        return {}

    def end_step(self, number: int, version: int, batch: Any, result: Any, *rest: Any) -> None:
        self._world.step_ended(number)
        observed = asyncio.ensure_future(rest[-1](number, batch.version, result))
        self._writing = asyncio.create_task(self._report(number, observed, self._writing))

    async def _report(self, step: int, observed: Awaitable[Any], previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await previous
        try:
            self._observing = asyncio.ensure_future(observed)
            if not self._waits_no_more:
                await asyncio.wait_for(self._observing, 300.0)
        except asyncio.CancelledError:
            if not self._waits_no_more:
                raise
        except (EvenkeelError, ray.exceptions.RayError, TimeoutError) as error:
            self.event("warning", f"no diagnostics: {error}")
        self.disk.line(step, self._folder.append_metrics, StepMetrics(step, {"weight_version": step}))

    async def flush(self) -> None:
        began = asyncio.get_running_loop().time()
        if self._writing is not None:
            await asyncio.shield(self._writing)
        await wait_for(self.disk.done(), "lines of the last steps", deadline_s=self._world.schedule.config.deadlines.disk_s)
        self._world.flushed_since = began

    def stop_waiting(self) -> None:
        self._waits_no_more = True
        if self._observing is not None:
            self._observing.cancel()

    def abandon(self) -> None:
        if self._writing is not None:
            abandon(self._writing)
            self._writing = None

    def group_finished(self, group: GroupFacts, worker: str) -> None:
        self._world.books.is_sampled(group)

    def lost(self, tickets: Sequence[Ticket]) -> None:
        self._world.are_lost([ticket.group_id for ticket in tickets])

    def close(self) -> None:
        self.disk.close(within_s=30.0)

    def serve(self) -> None: ...


@dataclass
class Corrected:
    batch: Any


def corrected(batch: Any, correction: Any) -> Corrected:
    """In place of the correction's mathematics."""
    return Corrected(batch)


def diagnosed(*_: Any, **__: Any) -> dict[str, float]:
    return {}


def not_clipped(*_: Any) -> dict[str, Sequence[Any]]:
    return {}
