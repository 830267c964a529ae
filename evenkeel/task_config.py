"""What a model is asked: the configuration, a recipe's or one made up around the name of a data set; and a task with its questions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from evenkeel.actors.config import RunConfig
from evenkeel.actors.processes.disk import by_disk_at_start
from evenkeel.correction.errors import DataError
from evenkeel.recipe import load_config
from evenkeel.rollout.config import TaskConfig, named
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tasks.mixture import Mixture
from evenkeel.rollout.tasks.tasks import Task, build_task, check_task_names

LONGEST_ANSWER = 256
"""Tokens of an answer to a data set that has no recipe, if that is at most a quarter of the model's context."""


def is_recipe(task: str) -> bool:
    """True if a task is given as a recipe's path, not as a data set's name."""
    return Path(task).suffix in (".yaml", ".yml")


def meant_model(model: Path) -> tuple[Path, Path | None]:
    """The model of a run's folder (its best checkpoint's or, if none was evaluated, the newest's) or of a checkpoint; others as they are.

    Returns: the model's folder; the run's recipe, if it is a run's folder.
    Raises: DataError for a run without a checkpoint; OSError.
    """
    if (model / "hf" / "config.json").is_file():
        return model / "hf", None
    if (model / "config.json").exists() or not (model / "config.yaml").is_file():
        return model, None
    from evenkeel.actors.record.run_folder import RunFolder

    run = RunFolder.view(model)
    chosen = run.best_checkpoint() or next(reversed(run.checkpoints()), None)
    if chosen is None:
        raise DataError(f"{model}: this run has no checkpoint", remedy="name a model's folder, such as the one that its config.yaml names")
    return chosen.hf, run.recipe_path


def task_config(model: Path, task: str, overrides: Sequence[str], *, problems: int) -> RunConfig:
    """The recipe's configuration with enough held-out questions; with a bare name, sizes that fit into the model's context.

    Args:
        model: Hugging Face folder.
        task: a recipe's path, or the name of a reasoning-gym data set, which is scored by its own scorer.
        overrides: "dotted.key=value" over all of that.
    Raises: ConfigError as load_config does.
    """
    wanted = [f"model={model}", f"rollout.task.held_out_size={problems}"]
    if is_recipe(task):
        several = len(load_config(RunConfig, Path(task), [f"model={model}", *overrides]).rollout.tasks)
        sizes = [f"rollout.tasks.{number}.task.held_out_size={problems}" for number in range(several)]
        return load_config(RunConfig, Path(task), [*([f"model={model}", *sizes] if several else wanted), *overrides])
    kinds = ["rollout.task.kind=reasoning_gym", f"rollout.task.dataset={task}", "rollout.reward.kind=reasoning_gym"]
    answer = min(LONGEST_ANSWER, max(1, model_context(model) // 4))
    made_up = ["steps=1", "groups_per_step=1", *kinds, f"rollout.sampling.max_tokens={answer}"]
    return load_config(RunConfig, None, [*made_up, *wanted, *overrides])


def model_context(model: Path) -> int:
    """Tokens that the model's config.json allows for prompt and answer together; four times the longest answer where it does not say."""
    try:
        shape: Any = json.loads((model / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return 4 * LONGEST_ANSWER  # what is wrong with the folder is said where it is read
    shape = shape.get("text_config", shape) if isinstance(shape, dict) else {}
    return int(shape.get("max_position_embeddings", 4 * LONGEST_ANSWER))


DISK_OR_HUB = "their disk, or the hub"
IF_SLOW = "If it is only slow, raise deadlines.start_s; what has been downloaded by now is kept"


def mixture(config: RunConfig, encoders: Mapping[str, ChatEncoder]) -> Mixture:
    """The tasks of a run. Args: encoders: by the task's name; none: its prompts have no token ids. Raises: as `questions`."""
    tasks = {}
    for entry in config.rollout.entries:
        with named(entry):
            check_task_names(entry.task)
            tasks[entry.name] = questions(entry.task, config.deadlines.start_s, encoders.get(entry.name), called=entry.name)
    weights = {entry.name: entry.weight_at for entry in config.rollout.entries}
    return Mixture(
        tasks,
        lambda name, step: weights[name](step),
        groups_per_step=config.groups_per_step,
        floor=config.rollout.solve_rate_floor,
        correct_at=config.correct_at,
    )


def questions(task: TaskConfig, limit_s: float, encoder: ChatEncoder | None = None, *, called: str = "") -> Task:
    """The task; all questions of a file or a data set are in memory then. It is told every half minute what is waited for.

    Args: limit_s: deadline, seconds; some minutes at least. called: its name among several.
    Raises: as build_task; DiskLate.
    """
    what = f"the questions of the task ({getattr(task, 'path', task.kind)})"
    make = partial(build_task, task, encoder, called=called)
    return by_disk_at_start(make, what, disk=DISK_OR_HUB, computes=True, remedy=IF_SLOW, limit_s=lambda: limit_s)
