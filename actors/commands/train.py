"""One training run as the command line knows it: checks, folder, controller, summary, report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from actors import interrupts
from actors.cluster import Cluster, check_ray
from actors.commands.init_model import read_record
from actors.commands.recipe import load_config
from actors.config import RunConfig
from actors.controller import Controller, RunSummary
from actors.devices import check_devices
from actors.record.observer import Observer
from actors.record.report import write_report
from actors.record.run_folder import Checkpoint, RunFolder
from actors.record.terminal import TerminalView
from actors.resume import TrainingState
from actors.supervision import counted
from actors.true_on_policy import with_both_sides
from correction.errors import ConfigError, DataError, EvenkeelError
from rollout.chat import ChatEncoder, load_tokenizer
from rollout.rewards import RewardPool
from rollout.tasks import Demonstration, Task, build_task, check_task_names


def train_run(recipe: Path | None, overrides: Sequence[str], resume: Path | None) -> RunSummary:
    """Run a recipe, or go on with a run folder; prints as it goes.

    Raises: EvenkeelError kinds for whatever is wrong with the input; the folder keeps what there is by then.
    """
    if resume is not None:
        folder = RunFolder.open(resume)
    else:
        config = load_config(RunConfig, recipe, overrides)
        check_ray(config.ray)
        task, notes = prepare_task(config)  # before a folder is made: most mistakes show here
        folder = RunFolder.create(config.run_dir, config.name)
        checkpoint = None
        if folder.is_reused:
            notes.append(f"{folder.path} held what a start that failed had left, without a step or a checkpoint: it is used anew")
    try:
        if resume is not None:
            config = load_config(RunConfig, folder.path / "config.yaml", overrides)
            check_ray(config.ray)
            checkpoint = folder.latest_checkpoint() if folder.checkpoints() else None
            task, notes = prepare_task(config)
            notes += _make_resumable(config, folder, checkpoint)
        folder.write_config(config)
        return _run_in(folder, config, task, notes, checkpoint)
    finally:
        folder.close()


def prepare_task(config: RunConfig) -> tuple[Task, list[str]]:
    """The task of a run and what to say about it. Raises: DataError, ConfigError."""
    check_devices(config)
    check_model_folder(config.model)
    check_task_names(config.rollout.task)
    config.learner.check_model(model_config(config.model))
    with_both_sides(config)  # refuses what true_on_policy can't honour
    tokenizer = load_tokenizer(config.model)
    longest_prompt = config.rollout.max_prompt_tokens(model_config(config.model).max_position_embeddings)
    encoder = ChatEncoder.for_task(tokenizer, config.rollout.task, longest_prompt)
    task = build_task(config.rollout.task, encoder)
    asyncio.run(_try_reward(config, task))
    report = task.check(demonstrations=warmup_demonstrations(config.model))
    return task, [str(report), *report.warnings, *(f"skipped {row}" for row in report.skipped[:5])]


async def _try_reward(config: RunConfig, task: Task) -> None:
    """Score one held-out question, so that a broken reward function shows before anything is started. Raises: ConfigError, DataError."""
    sample = task.held_out_sample()
    if config.rollout.reward.kind == "function":
        pool = RewardPool(config.rollout.reward, config.rollout.task)
        try:
            await pool.check(sample)
        finally:
            await pool.close()


def warmup_demonstrations(model: Path) -> tuple[Demonstration, ...]:
    """The questions that a model of `evenkeel init-model` has seen in its supervised start; none for other models."""
    record = read_record(model)
    if record is None:
        return ()
    return build_task(record.task).demonstrations(record.init.warmup.steps * record.init.warmup.sequences_per_step)


def check_model_folder(path: Path) -> None:
    """Raises: DataError if this is no model folder."""
    if not (path / "config.json").is_file():
        reason = "is not there" if not path.exists() else "has no config.json"
        raise DataError(
            f"model = {path}: {reason}; a model is a Hugging Face folder with config.json, safetensors and a tokenizer. "
            f"`evenkeel init-model RECIPE` makes a small one"
        )
    if not any(path.glob("*.safetensors")):
        raise DataError(f"model = {path}: no *.safetensors in it; save the weights in that format (save_pretrained does)")


def model_config(path: Path) -> Any:
    """The text model's Hugging Face config."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path).get_text_config()


def _make_resumable(config: RunConfig, folder: RunFolder, checkpoint: Checkpoint | None) -> list[str]:
    """Take back what came after the checkpoint. Returns: what to say about it."""
    if checkpoint is None:
        taken = folder.rewind(-1)
        lines = f"; {counted(taken, 'line')} of the steps before went to rewound.jsonl" if taken else ""
        return [f"{folder.path} has no checkpoint: starting from step 0 with its config.yaml{lines}"]
    if checkpoint.step >= config.steps:
        raise ConfigError(
            f"{folder.path} has done {checkpoint.step} of {config.steps} steps: nothing is left. "
            f"Add steps={checkpoint.step + 100} to train on"
        )
    before = folder.read_config()
    for name in ("groups_per_step", "max_staleness"):
        value, saved = getattr(config, name), before.get(name)
        if isinstance(saved, int) and value < saved:
            raise ConfigError(
                f"{name} = {value}, but {folder.path} ran with {saved}: groups that are under way could become older than allowed. "
                f"Resume with {saved} or more"
            )
    folder.rewind(checkpoint.step)
    return []


def _run_in(folder: RunFolder, config: RunConfig, task: Task, notes: list[str], checkpoint: Checkpoint | None) -> RunSummary:
    view = TerminalView(config.steps, f"{config.name}: {config.model} -> {folder.path}")
    totals = TrainingState.load(checkpoint.state).totals if checkpoint else None
    observer = Observer(config, folder, view, totals)
    try:
        observer.event("info", config.batch_arithmetic())
        for note in notes:
            observer.event("info", note)
        if checkpoint:
            observer.event("info", f"going on from step {checkpoint.step} ({checkpoint.path})")
        controller = Controller(config, folder, task, observer, resume_from=checkpoint)
        with _log_as_events(observer):
            observer.phase("starting Ray")
            with Cluster(config) as cluster:  # outside the event loop, so that a Ctrl-C ends this, too, at once
                observer.event("info", f"output of the actors: {cluster.log_folder}")
                if shortage := cluster.gpu_shortage():
                    observer.event("warning", shortage)
                summary = _run_controller(controller)
    except BaseException as error:
        folder.event("error", _said(error))  # the terminal has it from whoever catches it
        saved = folder.checkpoints()
        if saved and saved[-1].step < config.steps:
            error.add_note(f"to go on: evenkeel train --resume {folder.path}")
        view.close()
        raise
    finally:
        observer.close()
        report = None if interrupts.is_ending() else _report(folder)
    view.close(_summary_text(summary, folder, report, temperature=config.evaluation.temperature, steps=config.steps))
    return summary


def _run_controller(controller: Controller) -> RunSummary:
    """Raises: Interrupted if a signal has ended it at once."""
    try:
        return asyncio.run(controller.run())
    except asyncio.CancelledError:
        if controller.ended_by is None:
            raise
        raise interrupts.Interrupted(controller.ended_by) from None


@contextlib.contextmanager
def _log_as_events(observer: Observer) -> Iterator[None]:
    """What this process logs about the run is an event of it: above the live panel, and in events.log."""
    logger = logging.getLogger("evenkeel")
    handler, before = _EventHandler(observer), (logger.level, logger.propagate)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _EventHandler(logging.Handler):
    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        level = "info" if record.levelno < logging.WARNING else "warning" if record.levelno < logging.ERROR else "error"
        self._observer.event(level, record.getMessage())


def _said(error: BaseException) -> str:
    """A run's last event when it did not reach its end."""
    if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError, interrupts.Interrupted)):
        by = str(error) if isinstance(error, interrupts.Interrupted) else "Ctrl-C"
        return f"ended at once by {by}, without a checkpoint of what came after the last one"
    return str(error) if isinstance(error, EvenkeelError) else f"{type(error).__name__}: {error}"


def _report(folder: RunFolder) -> Path | None:
    """The report, also of a run that failed after its first numbers; its own failure must not hide the run's."""
    if not (folder.metrics_path.exists() or folder.evaluations_path.exists()):
        return None
    try:
        return write_report(folder)
    except Exception as error:
        folder.event("warning", f"no report: {type(error).__name__}: {error}")
        return None


def _summary_text(summary: RunSummary, folder: RunFolder, report: Path | None, *, temperature: float, steps: int) -> str:
    lines = [f"{'stopped after' if summary.stopped_early else 'done:'} {counted(summary.steps, 'step')} in {summary.seconds:.0f} s"]
    if summary.alarm:
        lines.append(summary.alarm)
    how = "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"
    for when, evaluation in (("before", summary.before), ("after", summary.after)):
        if evaluation is not None:
            lines.append(f"held-out accuracy {when}: {evaluation} (95% Wilson, {how})")
    lines.append(f"run folder:  {folder.path}")
    checkpoints = folder.checkpoints()
    if checkpoints:
        lines.append(f"model:       {checkpoints[-1].hf}")
        best = folder.best_checkpoint()
        if best is not None and best != checkpoints[-1]:
            lines.append(f"best model:  {best.hf}")
    if report is not None:
        lines.append(f"report:      {report}")
    if summary.stopped_early and checkpoints and summary.steps < steps:
        lines.append(f"to go on:    evenkeel train --resume {folder.path}")
    return "\n".join(lines)
