"""What is checked of a run before anything of it is made: its devices, its model, its task, its reward."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evenkeel.actors.cluster.cluster import gpus_there
from evenkeel.actors.cluster.hub import outline_folder
from evenkeel.actors.config import RunConfig
from evenkeel.actors.metrics.exporter import check_addresses
from evenkeel.actors.pool.faults import PATIENCE_S
from evenkeel.actors.processes.disk import MODEL_OR_RUN, ON_DISK, by_disk_at_start
from evenkeel.actors.record.metric_views import check_views
from evenkeel.actors.settings.devices import check_devices
from evenkeel.actors.settings.resolve import asks_for_gpus, kept, with_devices
from evenkeel.correction.errors import EvenkeelError
from evenkeel.doctor.facts import Complaint
from evenkeel.doctor.gather import paper_facts
from evenkeel.doctor.on_paper import on_paper, stop_at_failures
from evenkeel.doctor.start_checks import config_for_model
from evenkeel.engines.machine import fast_bfloat16, gc_paused
from evenkeel.init_model import read_record
from evenkeel.rollout.config import BEYOND_LOOPBACK, TaskEntry, named
from evenkeel.rollout.door.agents import check_program
from evenkeel.rollout.environments.environments import EnvironmentPool
from evenkeel.rollout.rewards.reward_trial import WRONG, trial_notes
from evenkeel.rollout.rewards.rewards import RewardError, RewardPool
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tasks.mixture import Mixture
from evenkeel.rollout.tasks.tasks import Task
from evenkeel.rollout.tool_calls import id_of_call
from evenkeel.rollout.trajectory import Demonstration
from evenkeel.task_config import DISK_OR_HUB, IF_SLOW, mixture


@gc_paused()  # it imports transformers and the task's library
def prepare(config: RunConfig, *, resumed_from: Path | None = None) -> tuple[RunConfig, Mixture, list[str]]:
    """Check a run before anything of it is made.

    Args:
        resumed_from: model folder of the checkpoint, which has taken the place of config.model, wherever that may be by now.
    Returns: the resolved configuration, which is what runs; its tasks; and what to say about it.
    Raises: DataError, ConfigError; DiskLate.
    """
    model, has_weights = (resumed_from, True) if resumed_from else outline(config)
    config, of_devices = decide_devices(config)
    check_devices(config)
    look, limit_s = partial(_read_model, config, model, has_weights=has_weights, is_resumed=bool(resumed_from)), config.deadlines.disk_s
    what, disk = f"config of {model}", ON_DISK if resumed_from else MODEL_OR_RUN
    config, of_paper = by_disk_at_start(look, what, disk=disk, computes=True, limit_s=lambda: limit_s)
    inputs = check_inputs(config, model, is_resumed=bool(resumed_from))
    assert inputs.task is not None
    return config, inputs.task, [*of_devices, *map(str, of_paper), *map(str, inputs.found)]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run is given besides its settings and its model, as a start finds it."""

    task: Mixture | None
    """None: there is a reason against it."""
    found: list[Complaint]
    """Notes and warnings."""


@gc_paused()
def check_inputs(config: RunConfig, model: Path | None, *, is_resumed: bool = False, lacking: list[EvenkeelError] | None = None) -> Inputs:
    """Look at all that a run is given besides settings and model, as far as nothing has to be started for it: `train` stops at the first
    reason against the run, `doctor` lists all.

    Args:
        model: folder with its tokenizer; None: it isn't here, so that no prompt is too long.
        is_resumed: the model's folder is a checkpoint's.
        lacking: takes each reason against the run; None: the first is raised.
    Raises: DataError, ConfigError, DiskLate, if nothing takes the reasons.
    """
    encoders, task, found, limit_s = dict[str, ChatEncoder](), None, list[Complaint](), config.deadlines.disk_s
    with kept(lacking):
        check_addresses(config.metrics.bind, config.metrics.discovery_port, has_cluster=config.ray.address is not None)
    with kept(lacking):
        check_views(config.metrics.views)
    if model is not None:
        with kept(lacking):
            what, disk = f"tokenizer of {model}", ON_DISK if is_resumed else MODEL_OR_RUN
            read = partial(ChatEncoder.of_entries, model, config.rollout, is_limited=True)
            encoders = by_disk_at_start(read, what, disk=disk, computes=True, limit_s=lambda: limit_s)
            remarks = dict.fromkeys(encoder.remark for encoder in encoders.values() if encoder.remark is not None)
            found += [Complaint("note", remark) for remark in remarks]
    with kept(lacking):
        task = mixture(config, encoders)
    for entry in config.rollout.entries:
        its = None if task is None else task.tasks[entry.name]
        with kept(lacking), named(entry):
            found += [Complaint("warn", text) for text in asyncio.run(_try_reward(config, entry, its, is_resumed=is_resumed))]
        if entry.agent is not None and entry.agent.is_beyond_loopback:
            found.append(Complaint("note", f"rollout.agent.bind = {entry.agent.bind}: {BEYOND_LOOPBACK}"))
        if entry.environment is not None or entry.agent is not None:
            with kept(lacking), named(entry):
                found += [Complaint("warn", text) for text in asyncio.run(_try_turns(entry, its, encoders.get(entry.name)))]
    if task is not None:
        with kept(lacking):
            # A resumed run has had them checked; what the model was made from need not be there any more.
            demonstrations = () if is_resumed or model is None else warmup_demonstrations(model, config.deadlines.start_s)
            for name, its in task.tasks.items():
                others = {other: held for other, held in task.tasks.items() if other != name}
                report = its.check(demonstrations=demonstrations, others=others)
                found += [Complaint("note", str(report)), *(Complaint("warn", text) for text in report.warnings)]
                found += [Complaint("warn", f"skipped {row}") for row in report.skipped[:5]]
    return Inputs(task, found)


def outline(config: RunConfig) -> tuple[Path, bool]:
    """The folder of outline_folder. Raises: as that; DiskLate."""
    what, limit_s = f"config and tokenizer of {config.model}", config.deadlines.start_s
    look = partial(outline_folder, config.model)
    return by_disk_at_start(look, what, disk=DISK_OR_HUB, computes=True, remedy=IF_SLOW, limit_s=lambda: limit_s)


def _read_model(config: RunConfig, model: Path, *, has_weights: bool, is_resumed: bool) -> tuple[RunConfig, Sequence[Complaint]]:
    """What a start reads of the model's config and weights, and of the disk that the run writes to.

    Returns: the configuration with all that follows from the model, and what is to be said.
    Raises: DataError, ConfigError.
    """
    gives_rate = config.learner.is_given("learning_rate")
    config = config_for_model(config, model, has_weights=has_weights)
    facts = replace(paper_facts(config, model, is_resumed=is_resumed), gives_rate=gives_rate)
    of_paper = on_paper(facts, config)
    stop_at_failures(of_paper)
    return config, of_paper


def decide_devices(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration with every device and type decided, and sentences about it. Raises: ConfigError; EngineError as gpus_there."""
    has_gpu = gpus_there(config) > 0
    notes = []
    if asks_for_gpus(config) and not has_gpu and config.ray.address is not None:
        notes.append(
            f"device: auto is the CPU: no node of the cluster at {config.ray.address} offers a GPU by now. To wait for nodes that do, set "
            "rollout.engine.device and learner.device to cuda"
        )
    decided = with_devices(config, has_gpu=has_gpu)
    if config.learner.dtype == "bfloat16_if_fast" and decided.learner.device == "cpu":
        notes.append(f"learner.dtype: bfloat16_if_fast is {decided.learner.dtype} here: {_of_bfloat16(fast_bfloat16())}")
    return decided, notes


def _of_bfloat16(instructions: str | None) -> str:
    if instructions is None:
        return "this processor has no instructions that multiply in bfloat16"
    return f"this processor multiplies in it ({instructions}). Engine and learner differ by more than in float32; the correction bears that"


async def _try_reward(config: RunConfig, entry: TaskEntry, task: Task | None, *, is_resumed: bool) -> list[str]:
    """Score answers to one held-out question, so that a broken reward function shows before anything is started.

    Args: task: None: none could be read; then the function is only loaded.
    Returns: what to say of its scores; a sentence if a resumed run's function can be loaded but gives no score: it has scored before, and
        its judge is waited for.
    Raises: ConfigError, DataError.
    """
    sample, reward = None if task is None else task.held_out_sample(), entry.reward
    if reward.kind == "function":
        pool = RewardPool(reward, entry.task)
        try:
            scores = await pool.check(sample, WRONG)
        except RewardError as error:
            if not (is_resumed and error.is_set_up):
                raise
            return [f"{error}. The run has had scores, and goes on: its workers try that again for {PATIENCE_S / 60:.0f} minutes"]
        finally:
            await pool.close()
        if sample is not None and not is_resumed:
            right = config.correct_at[entry.name]
            return list(trial_notes(scores, has_answer=bool(sample.answer), extraction=reward.extraction, correct_at=right))
    return []


async def _try_turns(entry: TaskEntry, task: Task | None, encoder: ChatEncoder | None) -> list[str]:
    """Have the chat template go on after a turn, and begin one environment or look for the agent's program, so that a mistake shows before
    anything is started.

    Returns: a sentence if the template shows no tools. Raises: ConfigError, DataError.
    """
    tools: Sequence[Mapping[str, Any]] = ()
    if entry.agent is not None:
        await check_program(entry.agent)
    if entry.environment is not None and task is not None:
        pool = EnvironmentPool(entry.environment)
        try:
            tools = await pool.check(task.held_out_sample())
        finally:
            await pool.close()
    if encoder is None or not encoder.apply_chat_template:
        return []
    said = encoder.tokenizer.encode("1", add_special_tokens=False)
    follows = {"role": "user", "content": "1"}
    if tools:
        assert entry.environment is not None
        name = tools[0]["function"]["name"]
        follows |= {"role": "tool", "tool_call_id": id_of_call(entry.environment.tool_parser, name, 0), "name": name}
    encoder.following("1", said, [follows], tools)
    if not tools or encoder.encode("1") != encoder.encode("1", tools):
        return []
    path = entry.environment.path if entry.environment is not None else ""
    return [f"the model's chat template shows no tools, so the model isn't told of those of {path}; have reset tell it, in a system turn"]


def warmup_demonstrations(model: Path, limit_s: float) -> tuple[Demonstration, ...]:
    """The questions that a model of `evenkeel init-model` has seen in its supervised start; none for other models.

    Args: limit_s: deadline of reading them, seconds.
    """
    record = read_record(model)
    return () if record is None else record.demonstrations(limit_s)
