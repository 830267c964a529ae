"""Resolves a recipe: from what is given to a configuration of plain values, which is what runs and what a run folder's config.yaml says.

In two stages, because doctor and plan tell what they can without the model: with_devices decides devices and types by the hardware, and the
sizes that follow; with_model what follows from the model's folder, deadlines included. Each derives only what isn't given
(Settings.DERIVED), and never looks at a value that another one has derived as if it were open. Nothing in the result is `auto` but
learner.layers in half precision on a GPU, which depends on what is installed where a rank is: the rank decides
(learner/model/layers.py), and says so when it is up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from evenkeel.actors.config import RunConfig, WeightSyncConfig
from evenkeel.actors.settings.deadlines import engine_deadlines, run_deadlines
from evenkeel.actors.settings.probe_limits import ProbeLimits
from evenkeel.correction.early_warning.replacement import reason_of
from evenkeel.correction.errors import ConfigError, EvenkeelError
from evenkeel.correction.settings.base import Settings
from evenkeel.engines.contract import MOST_THREADS, Contract, SideSettings
from evenkeel.engines.machine import device_of, dtype_of, group_backend_of, is_open
from evenkeel.learner.config import LearnerConfig
from evenkeel.rollout.engine_settings.engine_config import EngineConfig

Section = TypeVar("Section", bound=Settings)

GPU_TOKENS_PER_MICROBATCH = 8192
"""Default on a GPU. The 2,048 tokens that suit a CPU would not keep a GPU busy: launching kernels would take longer than running them."""
GPU_RUNNING_REQUESTS = 256
"""As many as SGLang captures graphs for on a GPU of 60 to 160 GB (its cuda_graph_max_bs there, without tensor parallelism)."""
MOST_CORES = 8
"""Threads of a side that has all cores, at most: products of small models don't fill more."""
RATE_FROM_NOTHING, RATE_PRETRAINED = 1e-4, 1e-6
"""Default learning rates. The second is what most public recipes for pretrained models of 1 to 32 billion parameters have: a rate that a
model made from nothing needs takes a pretrained one apart within tens of steps."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What settings take from the model's folder."""

    config: Mapping[str, Any]
    """Its config.json."""
    weight_bytes: int
    is_pretrained: bool = True
    """Somebody's, and not made from nothing by `evenkeel init-model`."""
    layers: int | None = None
    context: int | None = None
    """Tokens of prompt and answer together. Both None: a model that the learner doesn't train."""
    has_experts: bool = False
    largest_bucket: int = 0
    """Bytes of the largest bucket of weights: no tensor is cut."""


@contextlib.contextmanager
def kept(refused: list[EvenkeelError] | None) -> Iterator[None]:
    """Takes the reason against a run that is raised inside. Args: refused: gets it; None: it is raised."""
    try:
        yield
    except EvenkeelError as error:
        if refused is None:
            raise
        refused.append(error)


# Devices, types, and sizes that follow from them.


def asks_for_gpus(config: RunConfig) -> bool:
    """Whether a device is left open, and depends on the GPUs that there are."""
    return is_open(config.rollout.engine.device, config.learner.device)


def with_devices(config: RunConfig, *, has_gpu: bool) -> RunConfig:
    """The configuration with devices decided, and with what follows from them and from other settings.

    Args:
        has_gpu: whether this machine has a GPU, or the cluster that is joined.
    Raises: ConfigError for settings that can't be honoured on these devices.
    """
    rollout = config.rollout.model_copy(update={"engine": _engine(config, has_gpu)})
    rollout = filled(rollout, {"slots": rollout.slots_per_worker}, "rollout")
    update: dict[str, Any] = {"learner": _learner(config, has_gpu), "rollout": rollout}
    if config.init is not None and not config.init.is_published:  # those have no learner
        update["init"] = config.init.model_copy(update={"learner": _on_device(config.init.learner, has_gpu, "init.learner")})
    config = config.model_copy(update=update)
    private = {"num_cpus": config.logical_cpus} if config.ray.address is None else {}
    return config.model_copy(update={"ray": filled(config.ray, private, "ray")})


def refusals(config: RunConfig, *, has_gpu: bool) -> Iterator[ConfigError]:
    """Why with_devices would refuse: of learner and engine each its reason."""
    for section in (_learner, _engine):
        try:
            section(config, has_gpu)
        except ConfigError as error:
            yield error


def with_engine_types(config: RunConfig, *, has_gpu: bool) -> RunConfig:
    """The configuration for an engine of its own, without a run: device, type and operators are those of a run's engines, sizes stay as
    they are.

    Args:
        has_gpu: whether this machine has a GPU.
    Raises: ConfigError as with_devices.
    """
    engine = _engine_on_device(config, has_gpu)
    if config.true_on_policy and engine.device == "cpu":  # a run on GPUs would be refused
        values = {"batch_invariant": True, "projection_parts": config.learner.tensor_parallel}
        engine = filled(engine, values, "rollout.engine")
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})


def _learner(config: RunConfig, has_gpu: bool) -> LearnerConfig:
    learner = _on_device(config.learner, has_gpu, "learner")
    values: dict[str, Any] = {"layers": "local"} if config.true_on_policy else {}
    if learner.device == "cpu":
        values["threads"] = _threads(config, learner.world_size)
    if learner.device == "cuda":
        values["tokens_per_microbatch"] = GPU_TOKENS_PER_MICROBATCH
        if learner.has_copies(has_experts=False):  # with_model looks at the model, too
            values["distributed_optimizer"] = True
    return filled(learner, values, "learner")


def _threads(config: RunConfig, processes: int) -> int:
    """CPU threads of each of a side's processes. In a synchronous run the sides take turns, so each has all cores of this machine; in an
    asynchronous one they share them."""
    if config.max_staleness > 0 or config.ray.address is not None:  # nodes of a cluster may have other cores, and other ranks
        return 1
    cores = min(len(os.sched_getaffinity(0)), MOST_THREADS if config.true_on_policy else MOST_CORES)
    return max(1, cores // processes)


def _on_device(learner: LearnerConfig, has_gpu: bool, place: str) -> LearnerConfig:
    """A learner with its device decided, and the types that follow from that. Args: place: of the section."""
    device = device_of(learner.device, has_gpu=has_gpu)
    dtype = dtype_of(learner.dtype, device)
    of_layers = {"layers": "local"} if device == "cpu" or dtype == "float32" else {}
    return filled(learner.model_copy(update={"device": device, "dtype": dtype}), of_layers, place)


def _engine(config: RunConfig, has_gpu: bool) -> EngineConfig:
    engine = _engine_on_device(config, has_gpu)
    if engine.device == "cpu":
        return filled(engine, {"threads": _threads(config, config.rollout.most_workers * engine.tensor_parallel)}, "rollout.engine")
    values = {"max_running_requests": GPU_RUNNING_REQUESTS, "gpu_share": config.rollout.gpus_per_worker}
    return filled(engine, values, "rollout.engine")


def _engine_on_device(config: RunConfig, has_gpu: bool) -> EngineConfig:
    """The engine as of _on_device, with the backend of its weight group; a type that is left open is the learner's."""
    engine, learner = config.rollout.engine, config.learner
    sent = dtype_of(learner.dtype, device_of(learner.device, has_gpu=has_gpu))
    device = device_of(engine.device, has_gpu=has_gpu)
    dtype, backend = dtype_of(engine.dtype, device, learner=sent), group_backend_of(engine.weight_group_backend, device)
    values = {"dtype": dtype, "weight_group_backend": backend}
    return filled(engine.model_copy(update={"device": device}), values, "rollout.engine")


# What follows from the model.


def with_model(config: RunConfig, model: ModelFacts, refused: list[EvenkeelError] | None = None) -> RunConfig:
    """The configuration of plain values: what true on-policy and replayed routing set on both sides, whether ranks share the optimizer,
    the learning rate, the probe's limits, the engines' context, and every deadline.

    Args:
        config: with devices and types.
        model: whose weights training starts from; on a resume a checkpoint's.
        refused: takes each reason against the run; None: the first is raised.
    Raises: ConfigError naming what can't be honoured, if nothing takes the reasons.
    """
    with kept(refused):
        config = with_equal_operators(config, model.config)
    learner = config.learner
    is_shared = learner.resolved_device == "cuda" and learner.has_copies(has_experts=model.has_experts)
    learner = filled(learner, {"distributed_optimizer": is_shared}, "learner")
    with kept(refused):
        learner = filled(learner, {"learning_rate": RATE_PRETRAINED if model.is_pretrained else RATE_FROM_NOTHING}, "learner")
    config = config.model_copy(update={"learner": learner, "weight_sync": _with_probe_limits(config, model)})
    if model.context is not None:
        with kept(refused):
            config = config.model_copy(update={"rollout": config.rollout.with_context(model.context)})
    return with_deadlines(config, model.weight_bytes, model.largest_bucket)


def with_equal_operators(config: RunConfig, model: Mapping[str, Any]) -> RunConfig:
    """With true_on_policy: the contract's settings on both sides; with the engines' routing to be replayed: engines that report it.

    Args: model: its config.json.
    Raises: ConfigError naming what can't be honoured.
    """
    refuse_contradictions(config)
    config = _on_both_sides(config, {"return_routed_experts": config.learner.routing_replay == "rollout"}, {})
    if not config.true_on_policy:
        return config
    steps = config.learner.total_optimizer_steps_per_batch
    if steps > 1 and not config.learner.needs_proximal_forward(config.correction):
        raise ConfigError(
            f"true_on_policy: true with {steps} optimizer steps per batch and no forward of its own for proximal logprobs: after the first "
            "step the learner's weights are not those that sampled, and nothing could be compared",
            remedy="Set learner.optimizer_steps_per_batch and learner.epochs_per_batch to 1, or correction.proximal: recompute",
        )
    if config.rollout.engine.has_float8:
        raise ConfigError(
            "true_on_policy: true with rollout.engine.quantization: float8_block: the learner doesn't compute in float8",
            remedy="Set it to none",
        )
    if config.learner.float32_head:
        raise ConfigError("true_on_policy: true with learner.float32_head: true: the engines don't have it", remedy="Set it to false")
    contract = contract_of(model, config.rollout.engine, config.learner)
    return _on_both_sides(config, contract.engine_settings, contract.learner_settings)


def with_deadlines(config: RunConfig, model_bytes: int, largest_bucket: int = 0) -> RunConfig:
    """The configuration with every deadline that isn't set. Args: as of ModelFacts."""
    engine = config.rollout.engine
    values, timeout_s = engine_deadlines(config, model_bytes, largest_bucket)
    engine = engine.model_copy(update={"deadlines": filled(engine.deadlines, values, "rollout.engine.deadlines")})
    engine = filled(engine, {"weight_group_timeout_s": timeout_s}, "rollout.engine")
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
    of_run, collective_s = run_deadlines(config, model_bytes)
    return config.model_copy(
        update={
            "deadlines": filled(config.deadlines, of_run, "deadlines"),
            "learner": filled(config.learner, {"collective_timeout_s": collective_s}, "learner"),
        }
    )


def _with_probe_limits(config: RunConfig, model: ModelFacts) -> WeightSyncConfig:
    if config.weight_sync.max_probe_difference is not None:
        return config.weight_sync
    limits = ProbeLimits.derived(config) if model.layers is None else ProbeLimits.derived(config, model.layers)
    return filled(config.weight_sync, {"max_probe_difference": limits.largest, "max_probe_median": limits.median}, "weight_sync")


# Settings that concern engines and learner alike.


def refuse_contradictions(config: RunConfig) -> None:
    """Raises: ConfigError if the recipe gives a setting that follows from another one, and gives it another value."""
    engine, replay = config.rollout.engine, config.learner.routing_replay
    _refuse_given({"rollout.engine": engine}, "return_routed_experts", replay == "rollout", f"learner.routing_replay: {replay}")
    _refuse_other_operators(config, {"learner": config.learner, "rollout.engine": engine})


def refuse_contradictions_of_engines(config: RunConfig) -> None:
    """The same for engines without a learner: what decides their operators alone. Experts that they would report are left unused."""
    _refuse_other_operators(config, {"rollout.engine": config.rollout.engine})


def _refuse_other_operators(config: RunConfig, sides: Mapping[str, Settings]) -> None:
    _refuse_given(sides, "batch_invariant", config.true_on_policy, f"true_on_policy: {str(config.true_on_policy).lower()}")
    if config.true_on_policy:
        engine, ranks = {"rollout.engine": config.rollout.engine}, config.learner.tensor_parallel
        _refuse_given(engine, "projection_parts", ranks, f"true_on_policy: true and learner.tensor_parallel: {ranks}")


def _refuse_given(sections: Mapping[str, Settings], name: str, needed: bool | int, setting: str) -> None:
    """Args: sections: by their dotted keys, for the message. setting: from which `needed` follows, for the message.

    Raises: ConfigError if the recipe gives another value in some of them.
    """
    values = {f"{key}.{name}": getattr(section, name) for key, section in sections.items() if section.is_given(name)}
    if other := {key: value for key, value in values.items() if value != needed}:
        keys, follows = " and ".join(other), "it follows" if len(other) == 1 else "they follow"
        found, wanted = (str(one).lower() for one in (next(iter(other.values())), needed))  # of several a bool, which is the same in all
        raise ConfigError(
            f"{keys}: {found} with {setting}: {follows} from that, and would be {wanted}",
            remedy=f"Set {keys} to {wanted}, or to null: then {follows}",
        )


def contract_of(model: Mapping[str, Any], engine: EngineConfig, learner: LearnerConfig) -> Contract:
    """The contract of a model, engine and learner, whose devices and types are decided.

    Args: model: its config.json.
    Raises: ConfigError naming everything that can't be honoured.
    """
    return Contract.of(
        dict(model),
        SideSettings(
            name="rollout.engine",
            device=engine.resolved_device,
            dtype=engine.resolved_dtype,
            threads=engine.threads,
            tensor_parallel=engine.tensor_parallel,
            attention_backend=engine.attention_backend,
            weight_update_mode=engine.weight_update_mode,
            arguments=engine.engine_args,
        ),
        SideSettings(
            name="learner",
            device=learner.resolved_device,
            dtype=learner.resolved_dtype,
            threads=learner.threads,
            tensor_parallel=learner.tensor_parallel,
            sequence_parallel=learner.sequence_parallel,
        ),
    )


def _on_both_sides(config: RunConfig, of_engine: Mapping[str, Any], of_learner: Mapping[str, Any]) -> RunConfig:
    """The configuration with these derived values. Raises: ConfigError if other settings of the recipe contradict them."""
    rollout = config.rollout.model_copy(update={"engine": filled(config.rollout.engine, of_engine, "rollout.engine")})
    return config.model_copy(update={"rollout": rollout, "learner": filled(config.learner, of_learner, "learner")})


def filled(section: Section, values: Mapping[str, Any], place: str) -> Section:
    """The section with these values where it isn't given others, validated as if the recipe had given them all.

    Args: place: of the section, for the error.
    Raises: ConfigError for values that the section refuses.
    """
    given = {name: getattr(section, name) for name in section.model_fields_set}
    try:
        return type(section).model_validate(dict(values) | given)
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        remedy = cause.remedy if isinstance(cause, ConfigError) else ""
        reason = cause.reason if isinstance(cause, ConfigError) else reason_of(error)
        raise ConfigError(reason if reason.startswith(place) else f"{place}: {reason}", remedy=remedy) from error
