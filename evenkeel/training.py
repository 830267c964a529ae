"""One training run as the command line knows it: checks, folder, controller, summary, report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from evenkeel.actors.carriers import EventLevel, WaitNotice
from evenkeel.actors.checkpoints.reader import ResumePoint, steps_without_a_line, take_back
from evenkeel.actors.cluster.cluster import Cluster
from evenkeel.actors.cluster.head_watch import ends_with_own_ray, ends_with_the_head
from evenkeel.actors.cluster.hub import config_folder, pinned
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.controller import Controller, RunSummary, run_controller
from evenkeel.actors.processes import signals
from evenkeel.actors.processes.disk import MODEL_OR_RUN, DaemonThreads, DiskLate, by_disk_at_start, is_disk_late
from evenkeel.actors.processes.output import put
from evenkeel.actors.processes.supervision import HALF_OVER
from evenkeel.actors.record.recorder import Recorder
from evenkeel.actors.record.run_folder import EventKind, RunFolder
from evenkeel.actors.record.stack_collector import StackCollector
from evenkeel.actors.record.terminal import TerminalView, usual_mismatch
from evenkeel.correction.errors import DeadlineExceeded, EvenkeelError, counted
from evenkeel.doctor.facts import Nodes
from evenkeel.doctor.gather import nodes_of_cluster, own_machine, when_others_have_left
from evenkeel.doctor.on_nodes import on_nodes, requests
from evenkeel.doctor.on_paper import stop_at_failures
from evenkeel.doctor.run_doctor import EVALUATION, left_after_training
from evenkeel.doctor.surroundings import check_surroundings
from evenkeel.doctor_command import table_of
from evenkeel.plan.shape import ModelShape
from evenkeel.preparation import prepare
from evenkeel.recipe import Recipe
from evenkeel.resume_point import find_resume_point, recipe_as_kept, recipe_of, with_absolute_paths, with_settings
from evenkeel.rollout.stacks import register_stack_dump
from evenkeel.rollout.tasks.mixture import Mixture

T = TypeVar("T")
# Longest time for the report and the end of the process, if something that the run has left hangs or uploads slowly.
_LEFT_S = 600.0
# After a signal.
_LEFT_INTERRUPTED_S = 60.0
# Longest wait for the facts of all nodes of a cluster: their first processes may read packages from a cold disk.
_NODES_S = 60.0
_LISTED_S = 2.0
_AFTER_ALL = "after all was saved"


def train_run(
    recipe: Path | None, overrides: Sequence[str], resume: Path | None, *, discard_groups: bool = False, stays: bool = True
) -> RunSummary:
    """Run a recipe, or go on with a run folder; prints as it goes.

    Args:
        discard_groups: on a resume, see with_settings.
        stays: the folder will be there afterwards, and the last lines name what is in it.
    Raises: EvenkeelError kinds for whatever is wrong with the input; the folder keeps what there is by then.
    """
    if resume is not None:
        folder = by_disk_at_start(lambda: _opened_again(_fixed(resume)), f"{resume}, to be opened")
    else:
        read = recipe_of(recipe, overrides)
        config = with_absolute_paths(read.config)
        check_surroundings(config)
        config, of_hub = pinned(config)
        config, task, notes = prepare(config)  # before a folder is made: most mistakes show here
        notes = [*of_hub, *notes]
        make, limit_s = partial(RunFolder.create, config.run_dir, config.name), config.deadlines.disk_s
        folder = by_disk_at_start(make, "a new run's folder", limit_s=lambda: limit_s)
        if folder.is_reused:
            notes.append(f"{folder.path} held what a start that failed had left, without a step or a checkpoint: it is used anew")
    point: ResumePoint | None = None
    try:
        if resume is not None:
            found = find_resume_point(folder, overrides)
            read, config, point, limit_s = found.recipe, found.recipe.config, found.point, found.deadlines.disk_s
            check_surroundings(config)
            if point and point.checkpoint.step == config.steps:
                look = partial(_complete, folder, config, point)
                done = by_disk_at_start(look, "the run's evaluations and report", computes=True, limit_s=lambda: limit_s)
                if done is not None:
                    signals.all_is_done(0)
                    put(done[1], sys.stdout)
                    return done[0]
            config, task, notes = prepare(config, resumed_from=point.checkpoint.hf if point else None)
        ready = partial(_made_ready, folder, read, config, point, task, is_new=resume is None, discard_groups=discard_groups)
        point, said = by_disk_at_start(ready, "the run's settings, and the lines of its steps", limit_s=lambda: config.deadlines.disk_s)
        return _run_in(folder, config, task, [*(("info", note) for note in notes), *said], point, stays=stays)
    finally:
        with contextlib.suppress(TimeoutError, RuntimeError):  # a disk that hangs, no thread left: the process' end gives the folder back
            DaemonThreads().submit(folder.close).result(_LISTED_S)


def _opened_again(path: Path) -> RunFolder:
    """The folder of a run that goes on; nothing is written to one that no resume can go on with. Raises: ConfigError."""
    RunFolder.view(path).check_recipe()
    return RunFolder.open(path)


def _fixed(path: Path) -> Path:
    """The folder behind a link, which may point elsewhere while the run goes on; a path without links stays as it was given."""
    return real if (real := path.resolve()) != path.absolute() else path


def _made_ready(
    folder: RunFolder,
    recipe: Recipe[RunConfig],
    config: RunConfig,
    point: ResumePoint | None,
    task: Mixture,
    *,
    is_new: bool,
    discard_groups: bool = False,
) -> tuple[ResumePoint | None, list[tuple[EventLevel, str]]]:
    """Take back what the folder has of steps after the point's, and write the settings that it goes on with.

    Args:
        recipe: of which the configuration was made.
    Returns: as take_back. Raises: as that, and as with_settings, which is asked first.
    """
    said: list[tuple[EventLevel, str]] = []
    if point is not None:
        point, taken_back = take_back(folder, with_settings(folder, point, recipe, config, discard_groups=discard_groups), task)
        said += taken_back
        said += steps_without_a_line(folder, point.checkpoint.step)
    elif not is_new:
        said.append(("info", _from_the_start(folder)))
    folder.write_recipe(recipe_as_kept(recipe, config))
    folder.write_config(config)
    return point, said


def _from_the_start(folder: RunFolder) -> str:
    """Take back what a run without a checkpoint has written. Returns: what to say about it."""
    taken = folder.rewind(-1)
    lines = f"; {counted(taken, 'line')} of the steps before went to rewound.jsonl" if taken else ""
    return f"{folder.path} has no checkpoint: starting from step 0 with its recipe.yaml{lines}"


def _complete(folder: RunFolder, config: RunConfig, point: ResumePoint) -> tuple[RunSummary, str] | None:
    """End the resume of a run that is complete already: write its report if that is missing, and the last event. Nothing is started.

    Returns: its summary, and what to say of it; None: its evaluation is missing.
    """
    left, steps = left_after_training(folder, config.steps), point.checkpoint.step
    if EVALUATION in left:
        return None
    report = _report(folder) if left else folder.report_path
    said = f"{folder.path} is complete: all of its {counted(steps, 'step')} are made, saved and evaluated"
    folder.event("info", said)
    summary = RunSummary(steps, None, None, point.state.elapsed_s, stopped_early=False)
    text = _summary_text(summary, folder, report, how=config.evaluation.description, steps=steps)
    return summary, f"{said}. Add steps={steps + 100} to train on\n{text}\n"


def _run_in(
    folder: RunFolder,
    config: RunConfig,
    task: Mixture,
    notes: Sequence[tuple[EventLevel, str]],
    point: ResumePoint | None,
    *,
    stays: bool = True,
) -> RunSummary:
    """Args: notes: what to report first, as (level, sentence)."""
    view = TerminalView(config.steps, f"{config.name}: {config.model}", folder=str(folder.path))
    recorder, collector = _opened(config, folder, view, point.state.totals if point else None)
    is_interrupted, has_report, code, report = False, True, 0, None
    controller: Controller | None = None
    summary: RunSummary | None = None
    try:
        recorder.event("info", config.batch_arithmetic())
        for level, note in notes:
            recorder.event(level, note)
        if point:
            recorder.event("info", f"going on from step {point.checkpoint.step} ({point.checkpoint.path})", EventKind.RESUMED)
        controller = Controller(config, folder, task, recorder, resume_from=(point.checkpoint, point.state) if point else None)
        with _log_as_events(recorder):
            recorder.phase("starting Ray")
            # Outside the event loop, so that a Ctrl-C ends this, too, at once.
            last = partial(folder.event, "error")
            with (
                contextlib.ExitStack() as beyond_its_end,
                Cluster(config) as cluster,
                ends_with_own_ray(cluster.own_daemons, folder.path, last, recorder.event),
            ):
                beyond_its_end.enter_context(ends_with_the_head(cluster.head_address, folder.path, last, recorder.event))
                recorder.event("info", f"output of the actors: {cluster.log_folder}")
                _look_at_nodes(config, folder, recorder, view, point.checkpoint.hf if point else config.model)
                register_stack_dump()
                HALF_OVER.set(collector.half_over)
                summary = run_controller(controller, silence_s=config.deadlines.driver_s)
                code = summary.exit_code
    except BaseException as error:
        is_interrupted = isinstance(error, signals.Interrupted)
        summary = controller.summary if is_interrupted and controller is not None else None
        if summary is None:
            code = signals.exit_code(error.number) if isinstance(error, signals.Interrupted) else 1
            signals.all_is_done(None)  # a last line that could not be written: what was done isn't all
            _keep_failure(error, recorder, folder, config.steps)
            has_report = not is_disk_late(error)
            view.close()
            raise
        code = summary.exit_code
        recorder.keep_event("info", f"ended by {error} {_AFTER_ALL}")
    finally:
        is_interrupted = is_interrupted or signals.is_ending()  # which knows nothing of a signal that the run's event loop has taken
        try:
            recorder.close(within_s=2.0 if is_interrupted else 30.0)
            if recorder.hangs():
                signals.end_within(_LEFT_INTERRUPTED_S if is_interrupted else _LEFT_S, code, recorder.hangs)
            if has_report and not is_interrupted:
                report = _last_look(partial(_report, folder), "the report", f"evenkeel report {folder.path} writes it", config, view)
        except signals.Interrupted as error:
            if summary is None:
                raise
            _keep_last(folder, f"ended by {error} {_AFTER_ALL}")
    view.close(_last_words(summary, folder, report, config, view) if stays else "")
    return summary


def _last_words(summary: RunSummary, folder: RunFolder, report: Path | None, config: RunConfig, view: TerminalView) -> str:
    tell = partial(_summary_text, summary, folder, report, how=config.evaluation.description, steps=config.steps)
    try:
        text = _last_look(tell, "the newest and the best checkpoint", f"They are in {folder.path}", config, view)
    except signals.Interrupted:
        text = None
    return text or _outcome(summary, config.evaluation.description)


def _last_look(work: Callable[[], T], what: str, remedy: str, config: RunConfig, view: TerminalView) -> T | None:
    """What a run that has ended still reads or writes. If the disk hangs it goes without, and says so.

    Args: remedy: where to find it, or how to get it later.
    Raises: as the work.
    """
    limit_s, say = config.deadlines.disk_s, partial(view.event, "warning")
    try:
        return by_disk_at_start(work, what, computes=True, limit_s=lambda: limit_s, say=lambda notice: say(str(notice)))
    except DiskLate as error:
        error.remedy = remedy
        say(str(error))
        return None


def _opened(config: RunConfig, folder: RunFolder, view: TerminalView, totals: dict[str, float] | None) -> tuple[Recorder, StackCollector]:
    """Both read what the folder has of earlier steps. Raises: ConfigError; DiskLate."""

    def read() -> tuple[Recorder, StackCollector]:
        recorder = Recorder(config, folder, view, totals)
        return recorder, StackCollector(folder, recorder.event)

    limit_s, say = config.deadlines.disk_s, partial(view.event, "warning")
    try:
        return by_disk_at_start(read, "the lines of earlier steps", limit_s=lambda: limit_s, say=lambda notice: say(str(notice)))
    except BaseException:
        view.close()
        raise


def _keep_last(folder: RunFolder, text: str) -> None:
    """Write one more event, if the disk takes it at once."""
    with contextlib.suppress(OSError, RuntimeError):  # a disk that refuses or hangs, a machine without a thread left
        DaemonThreads().submit(folder.event, "info", text).result(_LISTED_S)


def _keep_failure(error: BaseException, recorder: Recorder, folder: RunFolder, steps: int) -> None:
    """Why a run has not come to its end, as its last event; and with the error how it can go on."""
    if isinstance(error, DeadlineExceeded) and error.what:
        recorder.keep_event("warning", WaitNotice(error.what, round(error.seconds)))
    recorder.keep_event("error", *_said(error))  # the terminal has it from whoever catches it
    with contextlib.suppress(OSError, RuntimeError):  # a disk that refuses or hangs, or a machine without a thread left, hides no error
        saved, is_left = DaemonThreads().submit(_saved_and_left, folder, steps).result(_LISTED_S)
        if is_left:
            error.add_note(f"to go on: evenkeel train --resume {folder.path}")
        elif not saved and isinstance(error, signals.Interrupted):
            error.add_note(f"run folder: {folder.path}, without a checkpoint")


def _saved_and_left(folder: RunFolder, steps: int) -> tuple[bool, bool]:
    """Whether there is a checkpoint, and whether a resume from it has something to do."""
    saved = folder.checkpoints()
    return bool(saved), bool(saved) and (saved[-1].step < steps or bool(left_after_training(folder, steps)))


def _look_at_nodes(config: RunConfig, folder: RunFolder, recorder: Recorder, view: TerminalView, model: Path) -> None:
    """What the run asks of Ray against what is there, a table on the terminal and a line in events.log; and what else stands in its way.

    Args:
        model: folder that the run starts from: a resumed one's checkpoint, as the first model need not be there any more.
    Raises: ConfigError for what can't work; DiskLate.
    """
    config = config.model_copy(update={"model": model})  # a name of the hub is one here, too: each node looks in its own cache
    limit_s = config.deadlines.disk_s
    by_disk = partial(by_disk_at_start, limit_s=lambda: limit_s, say=recorder.waiting)
    shape = by_disk(lambda: ModelShape.read(config_folder(model)), "the model's config", disk=MODEL_OR_RUN)
    view.compare_with(usual_mismatch(config, has_experts=shape.experts > 0))
    nodes: Nodes
    if config.ray.address is None:
        what = "facts of this machine, and the model's folder"
        look = partial(by_disk, partial(own_machine, config), what, disk=MODEL_OR_RUN, computes=True)
        nodes = when_others_have_left(look, config, shape, lambda text: recorder.event("info", text))
    else:
        nodes = nodes_of_cluster(config, folder.path, within_s=_NODES_S, by_disk=by_disk)
    rows = requests(nodes, config)
    view.show(table_of(rows))
    recorder.keep_event("info", "; ".join(str(row) for row in rows))
    found = on_nodes(nodes, config, shape)
    for one in found:
        if one.severity != "fail":
            recorder.event("warning" if one.severity == "warn" else "info", str(one))
    stop_at_failures(found)


@contextlib.contextmanager
def _log_as_events(recorder: Recorder) -> Iterator[None]:
    """What this process logs about the run is an event of it: above the live panel, and in events.log."""
    logger = logging.getLogger("evenkeel")
    handler, before = _EventHandler(recorder), (logger.level, logger.propagate)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _EventHandler(logging.Handler):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        level: EventLevel = "info" if record.levelno < logging.WARNING else "warning" if record.levelno < logging.ERROR else "error"
        self._recorder.event(level, record.msg if isinstance(record.msg, WaitNotice) else record.getMessage())


def _said(error: BaseException) -> tuple[str, EventKind]:
    """A run's last event when it did not reach its end: text and kind."""
    if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError, signals.Interrupted)):
        by = str(error) if isinstance(error, signals.Interrupted) else "Ctrl-C"
        return f"ended at once by {by}, without a checkpoint of what came after the last one", EventKind.STOPPED
    return (str(error) if isinstance(error, EvenkeelError) else f"{type(error).__name__}: {error}"), EventKind.NONE


def _report(folder: RunFolder) -> Path | None:
    """Write the report, also of a run that failed after its first numbers. An error of the report must not hide the run's error."""
    if not (folder.metrics_path.exists() or folder.evaluations_path.exists()):
        return None
    from evenkeel.dashboard.frozen import write_report  # with packages for which a start doesn't wait

    try:
        return write_report(folder)
    except Exception as error:
        folder.event("warning", f"no report: {type(error).__name__}: {error}")
        return None


def _outcome(summary: RunSummary, how: str) -> str:
    lines = [f"{'stopped after' if summary.stopped_early else 'done:'} {counted(summary.steps, 'step')} in {summary.seconds:.0f} s"]
    if summary.alarm:
        lines.append(summary.alarm)
    for when, evaluation in (("before", summary.before), ("after", summary.after)):
        if evaluation is not None:
            lines.append(f"held-out accuracy {when}: {evaluation} (95% Wilson, {how})")
    return "\n".join(lines)


def _summary_text(summary: RunSummary, folder: RunFolder, report: Path | None, *, how: str, steps: int) -> str:
    lines = [_outcome(summary, how), f"run folder:  {folder.path}"]
    checkpoints = folder.checkpoints()
    if checkpoints:
        lines.append(f"model:       {checkpoints[-1].hf}")
        best = folder.best_checkpoint()
        if best is not None and best != checkpoints[-1]:
            lines.append(f"best model:  {best.hf}")
    if report is not None:
        lines.append(f"report:      {report}")
    if summary.stopped_early and checkpoints and summary.steps < steps:
        lines.append(f"to go on:    {_program()} train --resume {folder.path}")
    lines.append(f"to look:     {_program()} dashboard {folder.path}")
    return "\n".join(lines)


def _program() -> str:
    """What starts evenkeel in the user's shell: after `make train` it is in .venv/bin, which is on no PATH."""
    beside = Path(sys.executable).with_name("evenkeel")
    if shutil.which("evenkeel") is not None or not beside.exists():
        return "evenkeel"
    return shlex.quote(os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside))
