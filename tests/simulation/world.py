"""One simulated run from its first start to its last step: drivers come, crash and are resumed, and the books are checked all the while."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import shutil
import tempfile
import traceback
import zlib
from collections import Counter
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import ray.exceptions
import torch

from evenkeel.actors.carriers import StoredGroup
from evenkeel.actors.checkpoints import reader as checkpoint_reader
from evenkeel.actors.checkpoints.state import TrainingState
from evenkeel.actors.checkpoints.writer import ATTEMPTS
from evenkeel.actors.driver.controller import Controller
from evenkeel.actors.driver.recovery import MOST_ROLLBACKS
from evenkeel.correction.errors import DataError, EngineDirty, EvenkeelError, LedgerError
from evenkeel.rollout.tasks.mixture import Mixture
from tests.simulation import faults, parts
from tests.simulation.books import Books, ViolationError
from tests.simulation.clock import Clock, NothingLeftError, VirtualLoop, installed
from tests.simulation.disk import Disk, in_thread
from tests.simulation.edges import doubles
from tests.simulation.faults import RANK, WORKER, Fate, Faults, damage
from tests.simulation.learner import SimulatedRank, Weights
from tests.simulation.processes import DRIVER, HERE, Process, SimulatedRay, in_place_of_ray, make_task
from tests.simulation.schedule import ENDS_A_RUN, TAKES_BACK, FaultSchedule

FINISH_S = 3000.0
"""Virtual seconds after the last fault within which a run has to be through."""
_RESTART_S = 5.0
# So often a run may end with an error after the last fault: what was under way may still fail by its deadline.
_RESUMES_UNDISTURBED = 2


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """Of one simulated run."""

    violation: str
    """What was wrong; empty: nothing."""
    where: str
    """The end of the traceback, or of the events."""
    virtual_s: float
    drivers: int
    steps: int
    trace: tuple[str, ...]

    @property
    def fingerprint(self) -> int:
        return zlib.crc32("\n".join(self.trace).encode())


class DriverEnded(BaseException):
    """kill -9 of the driver: nothing of it runs on."""


class World:
    def __init__(self, schedule: FaultSchedule, root: Path) -> None:
        self.schedule, self._root = schedule, root
        config = schedule.config
        self.books = Books(
            max_staleness=config.max_staleness,
            groups_per_step=config.groups_per_step,
            dynamic_sampling=config.dynamic_sampling,
            is_disturbed=bool(schedule.faults),
        )
        self._clock = Clock()
        self.disk = Disk(self._clock.time)
        # Weight updates that workers were asked for, by worker.
        self._updates = Counter[str]()
        self.trace: list[str] = []
        self.faults = Faults(schedule.faults, self.disk, lambda text: self.tells("fault", text))
        self._drivers = self._rejected = 0
        self._damaged: list[str] = []
        self.flushed_since = 0.0
        """All lines were tried from then on, the last time."""
        self._folder = root / "run"
        self.steps = 0
        self.cluster: Any = None
        self._controller: Any = None

    # -- what is heard -----------------------------------------------------------------------------------------------

    def tells(self, level: str, text: str) -> None:
        self.books.heard(text)
        if "ledger.jsonl is damaged" in text:
            self.books.refuse(f"nobody touched the ledger's file, and a resume finds it damaged: {text}")
        self.trace.append(f"{self._clock.now:.4f} {level}: {text}".replace(str(self._root), ""))

    def died(self, process: Process) -> None:
        self.tells("world", f"{process.name} is dead")

    def came_up(self, process: Process) -> None:
        self.tells("world", f"{process.name} is up")

    def start_is_held_up(self, process: Process) -> float:
        return self.faults.start_is_held_up(process)

    @property
    def learner_slowness(self) -> float:
        return self.faults.learner_slowness

    def rejects_batch(self) -> bool:
        """Never so many in a row that the run would end."""
        is_one = self.faults.rejected > 0 and self._rejected < ATTEMPTS - 1
        self.faults.rejected -= is_one
        self._rejected = self._rejected + 1 if is_one else 0
        return is_one

    def called(self, caller: Process | None, process: Process, method: str, args: tuple[Any, ...], ref: Any) -> Fate:
        self.trace.append(f"{self._clock.now:.4f} {caller.name if caller else 'driver'} -> {process.name}.{method}")
        if caller is None and process.kind == WORKER:
            if method in ("generate_group", "answer"):
                self.books.gets_work(process.name, self._controller._sync.version)
                ref.on_done = partial(self._worked, process.name)
            elif method in ("update_weights", "receive_weights"):
                self._updates[process.name] += 1
                ref.on_done = partial(self._synced, process.name, self._updates[process.name], self._controller._generation)
        elif caller is None and method == "pull":
            self.books.are_drawn(args[2])
            ref.on_done = partial(self._pulled, args[2])
        return self.faults.fate_of(process, method, args)

    def are_lost(self, group_ids: list[int]) -> None:
        """The driver has heard that these groups' tokens are gone."""
        self.tells("world", f"groups are lost: {group_ids}")
        self.faults.are_lost(group_ids)

    def computes(self, function: str) -> None:
        if function == "checksums_of":
            self.books.is_hashed(self._controller._sync.version)

    def _pulled(self, groups: list[StoredGroup], why: dict[int, str] | None, error: BaseException | None) -> None:
        if error is None and why:
            self.books.can_not_be_read([group for group in groups if group.group_id in why])

    def _worked(self, worker: str, _: Any, error: BaseException | None) -> None:
        if isinstance(error, EngineDirty):
            self.books.receipts[worker] = -1

    def _synced(self, worker: str, number: int, generation: int, receipt: Any, error: BaseException | None) -> None:
        if error is not None and number < self._updates[worker]:
            return  # a broadcast that was given up, and whose end the engine says after it has got other weights
        if error is not None and "stay" in str(error):
            return  # the call came after one for other weights, and was refused: nothing has changed
        if generation == self._controller._generation:  # of weights that were not withdrawn meanwhile
            self.books.receipts[worker] = receipt.version if error is None else -1

    def rolled_back(self) -> None:
        """The run goes on at a checkpoint in the same process; book, service and learner are new, the workers are not."""
        self.steps = self._controller._step
        self.tells("world", f"back at step {self.steps}")
        self._begin_books(self.steps)

    def _begin_books(self, step: int) -> None:
        """Of a driver, or of a generation of its weights."""
        self.books.resumed(step, self._damaged, self._folder)
        self.books.receipts, self.books.exports = {}, Counter()

    def checkpoint_saved(self, path: Path) -> None:
        self.tells("world", f"{path.name} is told to be complete")
        step, mark = int(path.name.rpartition("_")[2]), TrainingState.load(path / "state").ledger
        self.books.is_written(step, self._folder, mark, is_flushed=self.disk.was_full_until < self.flushed_since)
        self.books.is_saved(path.name, step, keep=self.schedule.config.checkpoint.keep)

    def step_ended(self, number: int) -> None:
        self.steps = number
        self.tells("world", f"step {number} is settled")
        if (book := self._book) is not None:
            self.books.step_ended(number, self._ledger, book)

    @property
    def _ledger(self) -> bytes:
        """The file, and what is on its way there."""
        path = self._folder / "ledger.jsonl"
        on_their_way = self._controller._source.ledger._unwritten
        return b"".join([path.read_bytes() if path.exists() else b"", *on_their_way])

    @property
    def _book(self) -> Any:
        """The book of the present driver, once it has one."""
        source = getattr(self._controller, "_source", None)
        return source.book if source is not None else None

    def weights_of(self, model: Path) -> Weights:
        return Weights.load(model) if (model / "weights.json").exists() else Weights(1, 0)

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> PlayedRun:
        violation, where = "", ""
        SimulatedRank.world = self
        logger = logging.getLogger("evenkeel")
        before = logger.level, logger.propagate
        logger.setLevel(logging.CRITICAL + 1)
        torch.set_num_threads(1)  # its batches are of a few tokens
        try:
            to_thread, edges = in_thread(self.disk, lambda: HERE.get() is None), doubles(self.schedule, self.disk, self.faults, self.books)
            with installed(self._clock, self.schedule.seed, to_thread), self.disk.in_place(self._root), edges:
                self._play()
        except (ViolationError, NothingLeftError) as error:
            violation = self.books.violation or str(error)
        except Exception as error:
            violation = f"{type(error).__name__}: {error}"
            where = "".join(traceback.format_exception(error)[-6:])
        finally:
            logger.setLevel(before[0])
            logger.propagate = before[1]
        return PlayedRun(violation, where, self._clock.now, self._drivers, self.steps, tuple(self.trace))

    def _play(self) -> None:
        resumes_left = _RESUMES_UNDISTURBED
        while True:
            point = self._resume_point() if self._drivers else None
            before = len(self.faults.played)
            began = self._clock.now
            ended = self._one_driver(point)
            self.tells("world", f"driver {self._drivers} has ended: {ended}")
            self._drivers += 1
            if ended == "":
                return
            played = {fault.kind for fault in self.faults.played[before:]}
            taken_back = sum(fault.kind in TAKES_BACK for fault in self.faults.played[before:])
            is_limit = taken_back > MOST_ROLLBACKS and f"the {MOST_ROLLBACKS + 1}th death after step" in ended
            if ended not in ("crash", "stopped") and not played & ENDS_A_RUN and not is_limit:
                if began < self.faults.last_end or resumes_left == 0 or not self.faults.played:
                    self.books.refuse(f"the run ended, though nothing befell it that may end it: {ended}")
                resumes_left -= 1
            self._clock.now += _RESTART_S
            self.disk.make_room()  # whoever resumes has done so
            self.disk.is_slow, self.disk.hangs_until = False, 0.0

    def _resume_point(self) -> Any:
        """As `evenkeel train --resume` finds it."""
        folder = parts.SimulatedFolder(self._folder, self.tells)
        folder.clear_partial_checkpoints()
        if not folder.checkpoints():
            folder.rewind(-1)
            return None
        try:
            point = checkpoint_reader.newest_readable(folder)
        except DataError:
            if len(self._damaged) < len(folder.checkpoints()):
                raise
            for checkpoint in folder.checkpoints():
                shutil.rmtree(checkpoint.path)
            folder.rewind(-1)
            return None
        point, _ = checkpoint_reader.take_back(folder, point, self._tasks())
        return point

    def _tasks(self) -> Mixture:
        names = [entry.name for entry in self.schedule.config.rollout.entries]
        tasks: Any = {name: parts.SimulatedTask(name, number, len(names)) for number, name in enumerate(names)}
        return Mixture(tasks)

    def _one_driver(self, point: Any) -> str:
        """Returns: why it ended with a step left to do; empty: all steps are done."""
        self._begin_books(point.checkpoint.step if point else 0)
        loop = VirtualLoop(self._clock, self._after_step)
        loop.set_exception_handler(lambda *_: None)  # of tasks that nobody waits for any more; what matters, the books see
        loop.set_task_factory(make_task)  # type: ignore[arg-type]
        self.cluster = SimulatedRay(loop, f"{self.schedule.seed}/{self._drivers}", {RANK: SimulatedRank}, self, self.faults.may_freeze)
        self._ends = max(self._clock.now, self.faults.last_end) + FINISH_S
        with in_place_of_ray(self.cluster):
            try:
                return self._until_its_end(loop, point)
            finally:
                self._end(loop)

    def _until_its_end(self, loop: VirtualLoop, point: Any) -> str:
        self.cluster.draining = {} if self.faults.drains else None
        self.faults.begin(self.cluster)
        self.faults.has_scored = bool(point and point.checkpoint.step)
        self.faults.resize = self._resize
        stands_still = faults.DRIVER in self.cluster.may_freeze
        self.cluster.driver = Process(self.cluster, "driver", faults.DRIVER, overlaps=True) if stands_still else None
        context = copy_context()
        context.run(DRIVER.set, self.cluster.driver)
        try:
            summary = loop.run_until_complete(context.run(loop.create_task, self._driver(point)))
        except DriverEnded:
            gone = self._root / f"of driver {self._drivers}"
            self._folder.rename(gone)  # what the dead one still does, it does elsewhere
            self._dead = gone
            return "crash"
        except asyncio.CancelledError:
            if self._controller.ended_by is None:
                raise
            return "stopped"
        except LedgerError:
            raise
        except (EvenkeelError, ray.exceptions.RayError) as error:
            if not isinstance(error, EvenkeelError):
                self.books.refuse(f"an error that says nothing to a person ends the run: {error!r}")
            return f"{type(error).__name__}: {error}"
        self.tells("world", f"exit code {summary.exit_code}")
        if summary.steps < self.schedule.steps:
            return "stopped" if summary.ended_by is not None else f"done after {summary.steps} steps"
        self._check_end()
        return ""

    def _resize(self, workers: int) -> None:
        pool = getattr(self._controller, "_pool", None)
        if pool is not None and not pool.tasks.is_stopping:
            pool.resize(workers, "by its load")

    async def _driver(self, point: Any) -> Any:
        folder = parts.SimulatedFolder(self._folder, self.tells)
        notes: Any = parts.Notes(self, folder)
        resume_from = (point.checkpoint, point.state) if point else None
        self._controller = Controller(self.schedule.config, folder, self._tasks(), notes, resume_from=resume_from)
        try:
            return await self._controller.run()
        finally:
            notes.close()

    def _check_end(self) -> None:
        """All steps are done, and the last checkpoint has the state of the end."""
        checkpoints = parts.SimulatedFolder(self._folder, self.tells).checkpoints()
        if not checkpoints or checkpoints[-1].step != self.schedule.steps:
            self.books.refuse(f"the run is through, and its newest checkpoint is {checkpoints[-1] if checkpoints else 'none'}")
        if self._book is not None:
            self.books.step_ended(self.steps, self._ledger, self._book)

    def _end(self, loop: VirtualLoop) -> None:
        """The driver's actors end with it, and so does whatever waits."""
        loop._after_step = lambda: None
        self.faults.end()
        HERE.set(None)
        if self.cluster.driver is not None:
            self.cluster.driver.thaw()
        for process in self.cluster.processes:
            process.kill()
        now = self._clock.now
        for _ in range(3):
            if not (left := asyncio.all_tasks(loop)):  # that aren't done
                break
            for task in left:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                task.cancel()
            with contextlib.suppress(NothingLeftError):
                loop.run_until_complete(asyncio.wait(left, timeout=60.0))
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._clock.now = now
        loop.close()
        if self.faults.crash is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._dead.rename(self._folder)
            self._tear(self.faults.crash.what)

    def _tear(self, how: str) -> None:
        checkpoints = parts.SimulatedFolder(self._folder, self.tells).checkpoints()
        if how and checkpoints:
            with self.disk.not_full():  # a full one has room for another bit, too
                damage(checkpoints[-1].path, how)
            self._damaged.append(checkpoints[-1].path.name)
            self.tells("world", f"{checkpoints[-1].path.name}: {how}")

    # -- after each step of the loop ---------------------------------------------------------------------------------

    def _after_step(self) -> None:
        if self.books.violation:
            raise ViolationError(self.books.violation)
        if (book := self._book) is not None:
            self.books.check_book(book)
        if self.faults.crash is not None:
            raise DriverEnded
        if self._clock.now > self._ends:
            self.books.refuse(f"not through {FINISH_S:g} s after the last fault; step {self.steps} of {self.schedule.steps} is done")


@cache
def _imports_are_no_garbage() -> None:
    """A full garbage collection would walk through all that torch and Ray have made, dozens of times a second."""
    gc.collect()
    gc.freeze()


def play(schedule: FaultSchedule) -> PlayedRun:
    """Play a schedule to its end, or to the first thing that must not be."""
    _imports_are_no_garbage()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None, prefix="evenkeel-sim-") as root:
        return World(schedule, Path(root)).run()
