"""Where and how an earlier run goes on: the newest checkpoint that can be read, and settings that may change.

Looked at before anything is started, and nothing in the folder is changed until all of it has been found right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from actors.carriers import Ticket
from actors.checkpoints.checkpoint_reader import ResumePoint, newest_readable
from actors.checkpoints.reading import read_at_start
from actors.cluster.hub import outline_folder
from actors.commands.recipe import load_config
from actors.commands.run_settings import changed_derived_settings, changed_settings, listed, short
from actors.config import RunConfig
from actors.hub_name import HubName, absolute
from actors.processes.disk_at_start import MODEL_OR_RUN, by_disk_at_start
from actors.record.config_that_ran import config_that_ran
from actors.record.run_folder import Checkpoint, RunFolder
from correction.errors import ConfigError, DataError, counted
from correction.settings.base import read_with_derived
from correction.settings.schedule import needs_topk
from rollout.config import FileTask, FunctionReward, HuggingFaceTask

_MOVABLE_TASK_SETTINGS = ("rollout.task.path", "rollout.task.held_out_path")
_OF_SAMPLES = ("rollout.", "learner.routing_replay", "true_on_policy")
"""Settings by which groups are sampled and scored, or prefixes of such settings."""
_OF_ENGINES = ("rollout.engine.",)
"""Those of them that say how an engine works, not what it is asked. If one has changed, groups are sampled again without
--discard-queue."""
_NOT_OF_SAMPLES = (
    *("rollout.workers", "rollout.min_workers", "rollout.max_workers"),
    *("rollout.gpus_per_worker", "rollout.slots", "rollout.reward.processes"),
    "rollout.overlong",  # settled as a group is packed into a batch
    *("rollout.engine.max_running_requests", "rollout.engine.max_total_tokens", "rollout.engine.memory_fraction"),
    *("rollout.engine.gpu_share", "rollout.engine.deadlines"),
    *("rollout.engine.tensor_parallel", "rollout.engine.expert_parallel"),
    *("rollout.engine.attention_data_parallel", "rollout.engine.threads", "rollout.engine.prefix_cache"),
    *("rollout.engine.weight_group_backend", "rollout.engine.weight_group_timeout_s", "rollout.engine.log_level"),
    *_MOVABLE_TASK_SETTINGS,
    "rollout.reward.folder",
)
"""Those of them that change neither an answer nor its score. The reward's limits (time, memory, files) do: beyond one, an answer has no
score."""


def find_resume_point(folder: RunFolder, overrides: Sequence[str]) -> tuple[RunConfig, ResumePoint | None]:
    """The run's configuration with overrides on top, not yet derived, and the newest whole checkpoint, if the run has any; nothing is
    changed yet. Once all is derived, with_settings compares it with what the checkpoint ran with.

    Raises: ConfigError for settings that the run can't go on with; OtherVersionError if the newest whole checkpoint is of another version
    of evenkeel; DataError if no checkpoint can be read; DeadlineExceeded if the folder's disk hangs.
    """

    def then_and_now() -> tuple[RunConfig, RunConfig]:
        now = run_config(folder, overrides)
        return with_absolute_paths(config_that_ran(folder)), now

    before, config = by_disk_at_start(then_and_now, "the run's config.yaml")
    # Until the run's deadlines are derived anew, those that it had: its checkpoints are as large as ever.
    had = {name: getattr(before.deadlines, name) for name in before.deadlines.DERIVED}
    config = config.model_copy(update={"deadlines": config.deadlines.derived(had)})
    point = read_at_start(lambda reading: newest_readable(folder, reading=reading) if folder.checkpoints() else None, config.deadlines)
    if point is None:
        return config, None
    _refuse_lost_settings(before, config, changed_settings(before, config), folder)
    by_disk_at_start(
        partial(_check_reference, config, point.checkpoint), "headers of the reference policy", disk=MODEL_OR_RUN,
        limit_s=lambda: config.deadlines.disk_s,
    )
    if point.checkpoint.step > config.steps:  # at the last step the evaluation may be left, see actors/reports/completeness.py
        raise ConfigError(
            f"steps = {config.steps}, but {folder.path} has done {point.checkpoint.step}: nothing is left. "
            f"Add steps={point.checkpoint.step + 100} to train on"
        )
    then = _settings_then(point, before)
    for name in ("groups_per_step", "max_staleness"):
        value, saved = getattr(config, name), getattr(then, name)
        if value < saved:
            raise ConfigError(
                f"{name} = {value}, but {folder.path} ran with {saved}: groups that are under way could become older than allowed. "
                f"Resume with {saved} or more"
            )
    return config, point


def _settings_then(point: ResumePoint, before: RunConfig) -> RunConfig:
    """The settings with which the checkpoint's groups were sampled. The run folder has the same ones, unless a resume with others ended
    before it saved."""
    if not point.state.settings:
        return before
    try:
        return with_absolute_paths(read_with_derived(RunConfig, point.state.settings))
    except ValueError:  # another version's
        return before


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same run, whatever folder it is resumed in: model and data by their absolute paths."""
    task = config.rollout.task
    if isinstance(task, FileTask):
        held_out = task.held_out_path and task.held_out_path.absolute()
        task = task.model_copy(update={"path": task.path.absolute(), "held_out_path": held_out})
    elif isinstance(task, HuggingFaceTask) and Path(task.path).exists():  # otherwise a name on the hub
        task = task.model_copy(update={"path": str(Path(task.path).absolute())})
    reward = config.rollout.reward
    if isinstance(reward, FunctionReward):
        reward = reward.model_copy(update={"folder": _folder_of(reward)})
    rollout = config.rollout.model_copy(update={"task": task, "reward": reward})
    return config.model_copy(update={"model": absolute(config.model), "rollout": rollout})


def _folder_of(reward: FunctionReward) -> Path:
    """The folder with the module: the one that is given, or was when the run began, unless only that of this start has it."""
    name, here = reward.path.partition(":")[0].partition(".")[0], Path.cwd()
    given = (reward.folder or here).absolute()
    has_module = [folder for folder in (given, here) if (folder / name).exists() or (folder / f"{name}.py").exists()]
    return next(iter(has_module), given)


def with_settings(folder: RunFolder, point: ResumePoint, config: RunConfig, *, discard_queue: bool = False) -> ResumePoint:
    """The point of a run that goes on with this configuration, compared with what its checkpoint ran with: what has changed is said, and
    groups that were sampled otherwise are sampled again.

    Args:
        folder: its config.yaml is still that of the run so far.
        config: with all that a run derives, as auto and null may come to what ran.
        discard_queue: throw away finished groups that can't be trained on with these settings; their prompts are sampled again.
    Raises: ConfigError for such settings without discard_queue; OSError.
    """
    then = _settings_then(point, with_absolute_paths(config_that_ran(folder)))
    given = changed_settings(then, config)
    derived = changed_derived_settings(then, config)
    told = {"settings other than the run's own so far": given, "settings that follow from others, and have changed": derived}
    for what, changed in told.items():
        if changed:
            point = replace(point, notes=(*point.notes, ("info", f"{what}: {listed(changed)}")))
    return _with_groups_of_these_settings(point, then, config, given | derived, discard_queue=discard_queue)


def run_config(folder: RunFolder, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration with overrides on top; what was derived isn't in it, and follows from that anew.

    Raises: ConfigError if config.yaml is damaged (what is missing there would silently be a default), or for an override as load_config.
    """
    path = folder.path / "config.yaml"
    remedy = f"Put back a whole copy, or write it anew: evenkeel config RECIPE > {path}"
    last = list(RunConfig.model_fields)[-1]
    try:
        content = folder.read_config()
    except ConfigError as error:
        raise ConfigError(f"{error}. {remedy}") from error
    if last not in content:
        raise ConfigError(f"{path}: damaged, it ends before the key {last}, with which the configuration of a run ends. {remedy}")
    return with_absolute_paths(load_config(RunConfig, path, overrides))


def _refuse_lost_settings(before: RunConfig, config: RunConfig, changed: Mapping[str, Any], folder: RunFolder) -> None:
    """Raises: ConfigError for changes that a resumed run couldn't follow, or only by being another run."""
    if "run_dir" in changed:
        raise ConfigError(f"run_dir = {config.run_dir}: a resumed run goes on in its own folder, {folder.path}. Leave it out")
    anew = "start a new run from a checkpoint: model=RUN_DIR/checkpoints/step_.../hf"
    has_moved = config.needs_reference and not (HubName.of(before.model) or before.model.exists())
    if "model" in changed and not has_moved:
        raise ConfigError(
            f"model = {config.model}: a resumed run has weights, config and tokenizer from its checkpoint, so another model would be "
            f"ignored (the run began with {before.model}). Leave it out; to train another model, start a new run"
        )
    for key in changed:
        if key.startswith("rollout.task.") and key not in _MOVABLE_TASK_SETTINGS:
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
    from learner.hf.hf_folder import check_trainable, expected_shapes

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
    point: ResumePoint, before: RunConfig, config: RunConfig, changed: Mapping[str, Any], *, discard_queue: bool
) -> ResumePoint:
    """Finished groups that were sampled with other settings are sampled again: trained with these, their ratios would be wrong.

    Raises: ConfigError for settings that make them useless, unless they may be discarded.
    """
    queue = point.state.queue
    reasons = [key for key in changed if key.startswith(_OF_SAMPLES) and not key.startswith(_NOT_OF_SAMPLES)]
    if needs_topk(config.correction) > needs_topk(before.correction):
        reasons.append("correction (it looks at the most likely tokens)")
    if not reasons or not queue.finished:
        return point
    useless = [reason for reason in reasons if not reason.startswith(_OF_ENGINES)]
    if useless and not discard_queue:
        diff = ", ".join(f"{key} ({short(changed[key][0])} -> {short(changed[key][1])})" if key in changed else key for key in useless)
        groups = f"{counted(len(queue.finished), 'finished group')} of {point.checkpoint.path}"
        raise ConfigError(
            f"{diff}: {groups} can't be trained on with that. Leave it as it was, or add --discard-queue: their "
            "answers are thrown away and their prompts asked again"
        )
    again = [Ticket(group.group_id, group.prompt, group.admitted_version) for group in queue.finished]
    in_flight = tuple(sorted([*queue.in_flight, *again], key=lambda ticket: ticket.group_id))
    note = f"{len(again)} finished groups of the checkpoint are sampled again, because of {', '.join(reasons)}"
    state = replace(point.state, queue=replace(queue, in_flight=in_flight, finished=()))
    return replace(point, state=state, notes=(*point.notes, ("info", note)))
