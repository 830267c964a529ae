"""The model folder of a recipe: published weights, or a nano model from nothing, warmed up on demonstrations of the run's task."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel
from rich.progress import Progress

from evenkeel.actors.config import HubName, InitConfig, RunConfig
from evenkeel.correction.errors import ConfigError, one_line
from evenkeel.learner.hf.folder import INIT_RECORD
from evenkeel.learner.hf.nano import build_nano_model
from evenkeel.learner.results import EncodedDemonstration
from evenkeel.learner.warmup import warm_up
from evenkeel.published_weights import Source, published_folder
from evenkeel.questions import questions
from evenkeel.rollout.config import TaskConfig
from evenkeel.rollout.tasks.chat import ChatEncoder


class InitRecord(BaseModel):
    """How a model folder was made. It is kept in the folder, so that one knows which questions the supervised start has seen."""

    init: InitConfig
    task: TaskConfig
    source: Source | None = None
    """Of published weights; None: the model was made from nothing."""

    def is_of(self, config: RunConfig) -> bool:
        """Whether a recipe asks for this model. The task of published weights plays no part in them."""
        return self.init == config.init and (self.source is not None or self.task == config.rollout.task)


def init_model_folder(config: RunConfig, *, if_missing: bool, say: Callable[[str], None]) -> None:
    """Make `config.model` as `config.init` says.

    Args:
        if_missing: leave a folder that is there as it is.
    Raises: ConfigError if the recipe has no section `init`, or the folder is there and would be overwritten.
    """
    if HubName.of(config.model):
        raise ConfigError(f"model = {config.model}: that is a model of the hub; to make one, name a folder, such as models/mine")
    if config.init is None:
        raise ConfigError("the recipe has no section `init`, which says what model to make; or name a model folder of yours in `model`")
    if (config.model / "config.json").exists():
        _check_existing(config, if_missing, say)
        return
    began = time.monotonic()
    partial = config.model.with_name(config.model.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    source = None
    if config.init.is_published:
        source = published_folder(config.init, partial, config.model.parent / "downloads", config.checkpoint, say)
    else:
        _build(config, config.init, partial, say)
    record = InitRecord(init=config.init, task=config.rollout.task, source=source)
    (partial / INIT_RECORD).write_text(record.model_dump_json(indent=2))
    config.model.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(config.model)
    say(f"model folder {config.model} made in {time.monotonic() - began:.0f} s")


def read_record(folder: Path) -> InitRecord | None:
    """How a model folder was made; None if it wasn't made here."""
    path = folder / INIT_RECORD
    try:
        return InitRecord.model_validate_json(path.read_text()) if path.exists() else None
    except ValueError as error:  # pydantic's, of JSON or of keys that this version doesn't have
        reason = one_line(error)
        raise ConfigError(f"{path}: not what this version writes about a model that it makes ({reason}). Make the model anew") from error


def _check_existing(config: RunConfig, if_missing: bool, say: Callable[[str], None]) -> None:
    folder = config.model
    if not if_missing:
        raise ConfigError(f"model = {folder} is there already: remove it to make it anew, or pass --if-missing to keep it")
    record = read_record(folder)
    is_it = record is not None and record.is_of(config)
    remark = "" if is_it else ", made with other settings than this recipe's; remove it to make it anew"
    say(f"model folder {folder} is there{remark}")


def _build(config: RunConfig, init: InitConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Make a random model and its tokenizer, train it on demonstrations, and write the result into the folder."""
    from evenkeel.learner.learner_rank import LearnerRank  # it imports Megatron, which a run's driver doesn't need

    blank = folder.with_suffix(".blank")
    shutil.rmtree(blank, ignore_errors=True)
    unencoded = questions(config.rollout.task, config.deadlines.start_s).demonstrations(init.tokenizer_texts)
    parameters = build_nano_model(blank, [d.prompt_text for d in unencoded], init.architecture)
    encoder = ChatEncoder.of_folder(blank, config.rollout.task)
    say(f"nano model: {parameters / 1e6:.2f}M parameters, vocabulary of {len(encoder.tokenizer)}")
    task = questions(config.rollout.task, config.deadlines.start_s, encoder)
    worked = task.demonstrations(init.warmup.steps * init.warmup.sequences_per_step)
    say(str(task.check(demonstrations=worked)))
    learner = LearnerRank(init.learner)
    learner.load(blank)
    with Progress(transient=True) as progress:
        bar = progress.add_task("supervised warm-up", total=init.warmup.steps)
        losses = warm_up(
            learner,
            [EncodedDemonstration(*encoder.encode_demonstration(d.prompt, d.answer)) for d in worked],
            init.warmup,
            on_step=lambda step, loss: progress.update(bar, completed=step + 1),
        )
    learner.save_hf(folder)
    learner.close()
    shutil.rmtree(blank)
    if losses:
        say(f"supervised warm-up: {len(losses)} steps, loss {losses[0]:.2f} -> {losses[-1]:.3f} nats a token")
