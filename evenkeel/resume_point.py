"""Where and how an earlier run goes on: the newest checkpoint that can be read, and settings that may change.

The run folder's recipe.yaml, with the resume's settings merged in, is resolved anew; the result is compared with what the checkpoint ran
with. Looked at before anything is started, and nothing in the folder is changed until all of it has been found right.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evenkeel.actors.carriers import Ticket
from evenkeel.actors.checkpoints.reader import ResumePoint, newest_readable, read_at_start
from evenkeel.actors.cluster.hub import outline_folder
from evenkeel.actors.config import DeadlinesConfig, HubName, RunConfig, absolute
from evenkeel.actors.processes.disk import MODEL_OR_RUN, by_disk_at_start
from evenkeel.actors.record.run_folder import Checkpoint, RunFolder
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.errors import ConfigError, DataError, counted
from evenkeel.correction.settings.schedule import needs_topk
from evenkeel.engines.machine import is_open
from evenkeel.explain import flat
from evenkeel.recipe import COMMAND_LINE, Recipe, as_recipe, read_recipe
from evenkeel.rollout.config import EnvironmentConfig, FileTask, FoldersTask, FunctionReward, HuggingFaceTask, TaskEntry

_MOVABLE_TASK_SETTINGS = ("rollout.task.path", "rollout.task.held_out_path")
# Settings by which groups are sampled and scored, or prefixes of such settings.
_OF_SAMPLES = ("rollout.", "learner.routing_replay", "true_on_policy")
# Those of them that say how an engine works, not what it is asked. If one has changed, groups are sampled again without --discard-groups.
_OF_ENGINES = ("rollout.engine.",)
# Those of them that change neither an answer nor its score. The reward's limits (time, memory, files) do: beyond one, an answer has no
# score.
_NOT_OF_SAMPLES = (
    *("rollout.weight", "rollout.solve_rate_floor"),
    *("rollout.workers", "rollout.min_workers", "rollout.max_workers"),
    *("rollout.gpus_per_worker", "rollout.slots", "rollout.reward.processes"),
    "rollout.overlong",  # settled as a group is packed into a batch
    *("rollout.engine.max_running_requests", "rollout.engine.max_total_tokens", "rollout.engine.memory_fraction"),
    *("rollout.engine.gpu_share", "rollout.engine.deadlines"),
    *("rollout.engine.tensor_parallel", "rollout.engine.expert_parallel"),
    *("rollout.engine.attention_data_parallel", "rollout.engine.threads", "rollout.engine.prefix_cache"),
    *("rollout.engine.weight_group_backend", "rollout.engine.weight_group_timeout_s", "rollout.engine.log_level"),
    *_MOVABLE_TASK_SETTINGS,
    *(
        "rollout.reward.folder",
        "rollout.environment.folder",
        "rollout.environment.processes",
        "rollout.agent.folder",
        "rollout.agent.processes",
    ),
)
# Derived settings that change what is trained: a resume on another machine has to be told that it is meant.
_NEVER_BY_ITSELF = ("learner.dtype", "learner.learning_rate")


@dataclass(frozen=True, slots=True)
class Resume:
    """A run that goes on: its recipe with this resume's settings merged in, and where it goes on."""

    recipe: Recipe[RunConfig]
    """Its configuration isn't resolved yet."""
    deadlines: DeadlinesConfig
    """Deadlines that the run had; its checkpoints are as large as ever."""
    point: ResumePoint | None
    """The newest whole checkpoint; None: the run has none."""


def find_resume_point(folder: RunFolder, overrides: Sequence[str]) -> Resume:
    """Where a run goes on, and with which recipe; nothing is changed yet. Once it is resolved, with_settings compares the result with what
    the checkpoint ran with.

    Raises: ConfigError for settings that the run can't go on with; OtherVersionError if the newest whole checkpoint is of another version
    of evenkeel; DataError if no checkpoint can be read; DeadlineExceeded if the folder's disk hangs.
    """
    recipe = by_disk_at_start(lambda: run_recipe(folder, overrides), "the run's recipe.yaml")
    ran = by_disk_at_start(lambda: _config_that_was(folder), "the run's config.yaml")
    deadlines = deadlines_that_were(ran)
    point = read_at_start(lambda reading: newest_readable(folder, reading=reading) if folder.checkpoints() else None, deadlines)
    then = point.state.settings or ran if point else ran
    config = _on_the_same_devices(recipe, then)
    recipe = replace(recipe, config=config)
    if point is None:
        return Resume(recipe, deadlines, None)
    _refuse_lost_settings(config, changed_settings(then, config), folder)
    by_disk_at_start(
        partial(_check_reference, config, point.checkpoint),
        "headers of the reference policy",
        disk=MODEL_OR_RUN,
        limit_s=lambda: deadlines.disk_s,
    )
    if point.checkpoint.step > config.steps:  # at the last step the evaluation may be left, see evenkeel/doctor/run_doctor.py
        raise ConfigError(
            f"steps = {config.steps}, but {folder.path} has done {point.checkpoint.step}: nothing is left. "
            f"Add steps={point.checkpoint.step + 100} to train on"
        )
    for name in ("groups_per_step", "max_staleness"):
        value, saved = getattr(config, name), int(then.get(name, 0))
        if value < saved:
            raise ConfigError(
                f"{name} = {value}, but {folder.path} ran with {saved}: groups that are under way could become older than allowed. "
                f"Resume with {saved} or more"
            )
    return Resume(recipe, deadlines, point)


def _config_that_was(folder: RunFolder) -> dict[str, Any]:
    """What config.yaml says; nothing, if it is damaged: recipe and checkpoint have all that a resume needs, and it is written anew."""
    try:
        return folder.read_config()
    except ConfigError:
        return {}


def deadlines_that_were(ran: Mapping[str, Any]) -> DeadlinesConfig:
    """The deadlines of a run by its config.yaml; the defaults, if that doesn't say them."""
    try:
        return DeadlinesConfig.model_validate(ran.get("deadlines", {}))
    except ValueError:
        return DeadlinesConfig()


def _on_the_same_devices(recipe: Recipe[RunConfig], ran: Mapping[str, Any]) -> RunConfig:
    """The settings with devices that the recipe leaves open as they were, whatever is there now: the nodes with the GPUs of a cluster may
    still have to come. An `auto` on the command line leaves them open again."""
    config, were = recipe.config, flat(ran)
    learner, rollout = config.learner, config.rollout
    if _goes_on(recipe, "learner.device", learner.device, were):
        learner = learner.model_copy(update={"device": were["learner.device"]})
    if _goes_on(recipe, "rollout.engine.device", rollout.engine.device, were):
        engine = rollout.engine.model_copy(update={"device": were["rollout.engine.device"]})
        rollout = rollout.model_copy(update={"engine": engine})
    return config.model_copy(update={"learner": learner, "rollout": rollout})


def _goes_on(recipe: Recipe[RunConfig], key: str, device: str, were: Mapping[str, Any]) -> bool:
    return is_open(device) and key in were and recipe.source.exact(key) != COMMAND_LINE


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same run, whatever folder it is resumed in: model and data by their absolute paths."""
    return config.model_copy(update={"model": absolute(config.model), "rollout": config.rollout.with_entries(_with_absolute_paths)})


def _with_absolute_paths(entry: TaskEntry) -> TaskEntry:
    task, reward, environment, agent = entry.task, entry.reward, entry.environment, entry.agent
    if isinstance(task, FileTask):
        held_out = task.held_out_path and task.held_out_path.absolute()
        task = task.model_copy(update={"path": task.path.absolute(), "held_out_path": held_out})
    elif isinstance(task, FoldersTask):
        held_out = task.held_out_path and task.held_out_path.absolute()
        programs = tuple(folder.absolute() for folder in task.programs)
        task = task.model_copy(update={"path": task.path.absolute(), "held_out_path": held_out, "programs": programs})
    elif isinstance(task, HuggingFaceTask) and Path(task.path).exists():  # otherwise a name on the hub
        task = task.model_copy(update={"path": str(Path(task.path).absolute())})
    if isinstance(reward, FunctionReward):
        reward = reward.model_copy(update={"folder": _folder_of(reward)})
    if environment is not None:
        environment = environment.model_copy(update={"folder": _folder_of(environment)})
    if agent is not None:
        agent = agent.model_copy(update={"folder": (agent.folder or Path.cwd()).absolute()})
    return entry.model_copy(update={"task": task, "reward": reward, "environment": environment, "agent": agent})


def _folder_of(reward: FunctionReward | EnvironmentConfig) -> Path:
    """The folder with the module: the one that is given, or was when the run began, unless only that of this start has it."""
    name, here = reward.path.partition(":")[0].partition(".")[0], Path.cwd()
    given = (reward.folder or here).absolute()
    has_module = [folder for folder in (given, here) if (folder / name).exists() or (folder / f"{name}.py").exists()]
    return next(iter(has_module), given)


def with_settings(
    folder: RunFolder, point: ResumePoint, recipe: Recipe[RunConfig], config: RunConfig, *, discard_groups: bool = False
) -> ResumePoint:
    """The point of a run that goes on with this configuration, compared with what its checkpoint ran with: what has changed is said, and
    groups that were sampled otherwise are sampled again.

    Args:
        folder: its config.yaml is still that of the run so far.
        recipe: of which the configuration was made.
        config: resolved.
        discard_groups: throw away finished groups that can't be trained on with these settings; their prompts are sampled again.
    Raises: ConfigError for what changes tokens, loss or optimizer without having been asked for, or for such settings without
        discard_groups; OSError.
    """
    then = point.state.settings or folder.read_config()
    changed = changed_settings(then, config)
    derived = flat(config.model_dump(mode="json")).keys() - flat(as_recipe(recipe.config)).keys()
    asked = {key: values for key, values in changed.items() if key not in derived}
    follows = {key: values for key, values in changed.items() if key in derived and not key.endswith("_s")}
    for key in _NEVER_BY_ITSELF:
        if key in follows:
            was, now = map(short, follows[key])
            raise ConfigError(
                f"{key} = {now}, but {folder.path} ran with {was}: nobody has asked for that, it follows from the machine or the model",
                remedy=f"Add {key}={was} to go on as before, or {key}={now} if it is meant",
            )
    told = {"settings other than the run's own so far": asked, "settings that follow from others, and have changed": follows}
    for what, found in told.items():
        if found:
            point = replace(point, notes=(*point.notes, ("info", f"{what}: {listed(found)}")))
    return _with_groups_of_these_settings(point, then, config, changed, discard_groups=discard_groups)


def run_recipe(folder: RunFolder, overrides: Sequence[str]) -> Recipe[RunConfig]:
    """The run's recipe with overrides on top.

    Raises: ConfigError if recipe.yaml is missing or damaged (what is missing there would silently be a default), or for an override as
        read_recipe.
    """
    path = folder.recipe_path
    folder.check_recipe()
    recipe = read_recipe(RunConfig, path, overrides)
    return replace(recipe, config=with_absolute_paths(recipe.config))


def recipe_as_kept(recipe: Recipe[RunConfig], config: RunConfig) -> dict[str, Any]:
    """A recipe as a run folder keeps it: a resume may be asked for in another folder, and takes the hub's files at the same commits.

    Args: config: of the recipe, with absolute paths and the hub's commits.
    """
    given = copy.deepcopy(recipe.given)
    given["model"] = str(config.model)
    for entry, written in zip(config.rollout.entries, given["rollout"].get("tasks") or [given["rollout"]], strict=True):
        found = {"task": {name: getattr(entry.task, name, None) for name in ("path", "held_out_path", "revision")}}
        for section in ("reward", "environment", "agent"):
            if (own_code := getattr(entry, section)) is not None:
                found[section] = {"folder": getattr(own_code, "folder", None)}
        for section, values in found.items():
            written[section] |= {name: str(value) for name, value in values.items() if value is not None}
    return given


def _refuse_lost_settings(config: RunConfig, changed: Mapping[str, tuple[Any, Any]], folder: RunFolder) -> None:
    """Raises: ConfigError for changes that a resumed run couldn't follow, or only by being another run."""
    if "run_dir" in changed:
        raise ConfigError(f"run_dir = {config.run_dir}: a resumed run goes on in its own folder, {folder.path}. Leave it out")
    anew = "start a new run from a checkpoint: model=RUN_DIR/checkpoints/step_.../hf"
    if "model" in changed:
        began_with = Path(changed["model"][0])
        has_moved = config.needs_reference and not (HubName.of(began_with) or began_with.exists())
        if not has_moved:
            raise ConfigError(
                f"model = {config.model}: a resumed run has weights, config and tokenizer from its checkpoint, so another model would be "
                f"ignored (the run began with {began_with}). Leave it out; to train another model, start a new run"
            )
    for key in changed:
        of_task = _as_of_one_task(key)
        if of_task.startswith(("rollout.task.", "rollout.name")) and of_task not in _MOVABLE_TASK_SETTINGS:
            old, new = changed[key]
            raise ConfigError(
                f"{key} = {new}, but {folder.path} ran with {old}: a resume counts on in the run's own questions, and would take some "
                f"twice or never. Leave it; for other questions {anew}"
            )


def _check_reference(config: RunConfig, checkpoint: Checkpoint) -> None:
    """With a KL term on it, or where the KL is reported, the model that the run began with is the reference.

    Raises: DataError if it can't be.
    """
    if not config.needs_reference:
        return
    from evenkeel.learner.hf.folder import check_trainable, expected_shapes

    reference, has_weights = outline_folder(config.model)
    if not reference.exists():
        raise DataError(
            f"model = {config.model}: no such folder, but with correction.kl.coefficient = {config.correction.kl.coefficient:g} and "
            f"learner.report_kl_every = {config.learner.report_kl_every} it is the reference policy. Put it back, or say where it is: "
            f"model=FOLDER"
        )
    if expected_shapes(check_trainable(reference, has_weights=has_weights)) != expected_shapes(check_trainable(checkpoint.hf)):
        raise DataError(f"model = {config.model}: the reference policy has other shapes than the run's model, {checkpoint.hf}")


def _with_groups_of_these_settings(
    point: ResumePoint, then: Mapping[str, Any], config: RunConfig, changed: Mapping[str, tuple[Any, Any]], *, discard_groups: bool
) -> ResumePoint:
    """Groups that were sampled with other settings, whole or in part, are sampled again: trained with these, their ratios would be wrong.

    Raises: ConfigError for settings that make them useless, unless they may be discarded.
    """
    book = point.state.book
    reasons = [key for key in changed if key.startswith(_OF_SAMPLES) and not _as_of_one_task(key).startswith(_NOT_OF_SAMPLES)]
    if needs_topk(config.correction) > needs_topk(CorrectionConfig.model_validate(then.get("correction", {}))):
        reasons.append("correction (it looks at the most likely tokens)")
    if not reasons or not (book.finished or book.so_far):
        return point
    useless = [reason for reason in reasons if not reason.startswith(_OF_ENGINES)]
    if useless and book.finished and not discard_groups:
        diff = ", ".join(f"{key} ({short(changed[key][0])} -> {short(changed[key][1])})" if key in changed else key for key in useless)
        groups = f"{counted(len(book.finished), 'finished group')} of {point.checkpoint.path}"
        raise ConfigError(
            f"{diff}: {groups} can't be trained on with that. Leave it as it was, or add --discard-groups: their "
            "answers are thrown away and their prompts asked again"
        )
    again = [Ticket(group.group_id, group.prompt, group.admitted_version) for group in book.finished]
    in_flight = tuple(sorted([*book.in_flight, *again], key=lambda ticket: ticket.group_id))
    parts = f" and {len(book.so_far)} begun" if book.so_far else ""
    note = f"{len(again)} finished{parts} groups of the checkpoint are sampled again, because of {', '.join(reasons)}"
    state = replace(point.state, book=replace(book, in_flight=in_flight, finished=(), so_far=()))
    return replace(point, state=state, notes=(*point.notes, ("info", note)))


def changed_settings(then: Mapping[str, Any], now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value then, value now), of the settings that differ. Args: then: as config.yaml has them."""
    old, new = flat(_numbered(then)), flat(_numbered(now.model_dump(mode="json")))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def _numbered(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the list of tasks as a mapping by number, so that each key of a task is one."""
    rollout = dict(settings.get("rollout", {}))
    rollout["tasks"] = {str(number): task for number, task in enumerate(rollout.get("tasks") or ())}
    return {**settings, "rollout": rollout}


def _as_of_one_task(key: str) -> str:
    """The key that a setting of one of several tasks has where there is one; others as they are."""
    return re.sub(r"^rollout\.tasks\.\d+\.", "rollout.", key)


def listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Each key with its value before and its value now, shortened."""
    return "; ".join(f"{key} {short(old)} -> {short(new)}" for key, (old, new) in changed.items())


def short(value: Any) -> str:
    """A value as a sentence shows it, in YAML's words."""
    text = "empty" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def run_dir_of(recipe: Path | None, words: Sequence[str], resume: Path | None) -> Path:
    """The folder that the run will have. Raises: ConfigError for what can't be read; OSError; DiskLate."""
    if resume is None:
        from evenkeel.actors.record.run_folder import fresh_path

        config = recipe_of(recipe, words).config
        return config.run_dir or fresh_path(Path("runs"), config.name)
    for word in words:
        if "=" not in word and Path(word).suffix in (".yaml", ".yml"):
            raise ConfigError(f"{word}: --resume takes no recipe, {resume} holds the one that it was started with; leave it out")
    from evenkeel.actors.record.run_folder import RunFolder
    from evenkeel.resume_point import run_recipe

    by_disk_at_start(lambda: run_recipe(RunFolder.view(resume), words), "the run's settings")
    return resume


def recipe_of(recipe: Path | None, words: Sequence[str]) -> Recipe[RunConfig]:
    """The recipe of a new run. Raises: ConfigError; OSError; DiskLate."""
    return by_disk_at_start(lambda: read_recipe(RunConfig, recipe, words), f"the recipe {recipe}", disk="its disk")
