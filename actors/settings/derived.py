"""Decides what a recipe leaves open, once for both sides: devices from the hardware, types from the devices, sizes from both.

The result is what runs. The run folder's config.yaml has the devices as if the recipe had given them, so that a resumed run computes where
it computed. All else stands there under `derived` (DerivedSettings), and a resume derives it anew: it follows when settings change. Nothing
in it is `auto` but learner.layers in half precision on a GPU, which depends on what is installed where a rank is: the rank decides
(learner/model/layers.py), and says so when it is up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from actors.config import RunConfig
from actors.settings.probe_limits import derived_limit
from correction.early_warning.replacement import reason_of
from correction.engines.device_choice import device_of, dtype_of, group_backend_of, is_open
from correction.errors import ConfigError
from correction.settings.base import DerivedSettings
from learner.config import LearnerConfig
from rollout.engine_settings.engine_config import EngineConfig

Section = TypeVar("Section", bound=DerivedSettings)

GPU_TOKENS_PER_MICROBATCH = 8192
"""Default on a GPU. The 2,048 tokens that suit a CPU would not keep a GPU busy: launching kernels would take longer than running them."""
GPU_RUNNING_REQUESTS = 256
"""As many as SGLang captures graphs for on a GPU of 60 to 160 GB (its cuda_graph_max_bs there, without tensor parallelism)."""


RATE_FROM_NOTHING, RATE_PRETRAINED = 1e-4, 1e-6
"""Default learning rates. The second is what most public recipes for pretrained models of 1 to 32 billion parameters have: a rate that a
model made from nothing needs takes a pretrained one apart within tens of steps."""


def asks_for_gpus(config: RunConfig) -> bool:
    """Whether a device is left open, and depends on the GPUs that there are."""
    return is_open(config.rollout.engine.device, config.learner.device)


def needs_gpu(config: RunConfig) -> bool:
    """Whether a recipe can only be derived for GPUs: it gives the device cuda, or engines of float8, which is made of bfloat16. Asked where
    a run is only planned, on a machine that may have none."""
    return "cuda" in (config.learner.device, config.rollout.engine.device) or config.rollout.engine.has_float8


def derived(config: RunConfig, *, has_gpu: bool) -> RunConfig:
    """The configuration with devices decided, and with what follows from them and from other settings; values derived before are dropped.

    What depends on the model's folder is derived later (actors/doctor/start_checks.py).
    Args:
        has_gpu: whether this machine has a GPU, or the cluster that is joined.
    Raises: ConfigError for settings that can't be honoured on these devices.
    """
    rollout = config.rollout.as_given().model_copy(update={"engine": _engine(config, has_gpu)})
    rollout = with_derived(rollout, {"slots": rollout.slots_per_worker}, "rollout")
    update: dict[str, Any] = {"learner": _learner(config, has_gpu), "rollout": rollout}
    update |= {"ray": config.ray.as_given(), "weight_sync": config.weight_sync.as_given()}
    if config.init is not None and not config.init.is_published:  # those have no learner
        update["init"] = config.init.model_copy(update={"learner": _on_device(config.init.learner, has_gpu, "init.learner")})
    config = config.model_copy(update=update)
    sync = with_derived(config.weight_sync, {"max_probe_difference": derived_limit(config)}, "weight_sync")
    private = {"num_cpus": config.logical_cpus} if config.ray.address is None else {}
    return config.model_copy(update={"weight_sync": sync, "ray": with_derived(config.ray, private, "ray")})


def refusals(config: RunConfig, *, has_gpu: bool) -> Iterator[ConfigError]:
    """Why `derived` would refuse: of learner and engine each its reason."""
    for section in (lambda: _learner(config, has_gpu), lambda: _engine(config, has_gpu)):
        try:
            section()
        except ConfigError as error:
            yield error


def with_optimizer(config: RunConfig, *, has_experts: bool) -> RunConfig:
    """The configuration with the optimizer divided over ranks that hold the same parameters, where a recipe says nothing of it.

    Args:
        config: with devices and types, as `derived` leaves it.
        has_experts: the model is a mixture of experts.
    """
    learner = config.learner
    is_shared = learner.resolved_device == "cuda" and learner.has_copies(has_experts=has_experts)
    return config.model_copy(update={"learner": with_derived(learner, {"distributed_optimizer": is_shared}, "learner")})


def with_learning_rate(config: RunConfig, *, is_pretrained: bool) -> RunConfig:
    """The configuration with a learning rate for the kind of model, where a recipe has none. Raises: ConfigError if what the recipe says of
    the rate's course doesn't go with it."""
    rate = {"learning_rate": RATE_PRETRAINED if is_pretrained else RATE_FROM_NOTHING}
    return config.model_copy(update={"learner": with_derived(config.learner, rate, "learner")})


def _learner(config: RunConfig, has_gpu: bool) -> LearnerConfig:
    learner = _on_device(config.learner, has_gpu, "learner")
    values: dict[str, Any] = {}
    if config.true_on_policy:
        values["layers"] = "local"
    if learner.device == "cuda":
        values["tokens_per_microbatch"] = GPU_TOKENS_PER_MICROBATCH
        values["distributed_optimizer"] = learner.has_copies(has_experts=False)  # with_optimizer looks at the model, too
    return with_derived(learner, values, "learner")


def _on_device(given: LearnerConfig, has_gpu: bool, place: str) -> LearnerConfig:
    """A learner with its device decided, as if it had been given, and the types that follow from that. Args: place: of the section."""
    learner = given.as_given()
    device = device_of(learner.device, has_gpu=has_gpu)
    dtype = dtype_of(learner.dtype, device)
    of_layers = {"layers": "local"} if device == "cpu" or dtype == "float32" else {}
    return with_derived(learner.model_copy(update={"device": device}), {"dtype": dtype} | of_layers, place)


def _engine(config: RunConfig, has_gpu: bool) -> EngineConfig:
    engine = _engine_on_device(config, has_gpu)
    if engine.device == "cpu":
        return engine
    values = {"max_running_requests": GPU_RUNNING_REQUESTS, "gpu_share": config.rollout.gpus_per_worker}
    return with_derived(engine, values, "rollout.engine")


def with_engine_types(config: RunConfig, *, has_gpu: bool) -> RunConfig:
    """The configuration for an engine of its own, without a run: device, type and operators are those of a run's engines, sizes stay as
    they are.

    Args:
        has_gpu: whether this machine has a GPU.
    Raises: ConfigError as `derived`.
    """
    engine = _engine_on_device(config, has_gpu)
    if config.true_on_policy and engine.device == "cpu":  # a run on GPUs would be refused
        values = {"batch_invariant": True, "projection_parts": config.learner.tensor_parallel}
        engine = with_derived(engine, values, "rollout.engine")
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})


def _engine_on_device(config: RunConfig, has_gpu: bool) -> EngineConfig:
    """As _on_device, with the backend of its weight group; a type that is left open is the learner's."""
    engine, learner = config.rollout.engine.as_given(), config.learner.as_given()
    sent = dtype_of(learner.dtype, device_of(learner.device, has_gpu=has_gpu))
    device = device_of(engine.device, has_gpu=has_gpu)
    dtype, backend = dtype_of(engine.dtype, device, learner=sent), group_backend_of(engine.weight_group_backend, device)
    values = {"dtype": dtype, "weight_group_backend": backend}
    return with_derived(engine.model_copy(update={"device": device}), values, "rollout.engine")


def with_derived(settings: Section, values: Mapping[str, Any], place: str) -> Section:
    """The section with these values where it isn't given others, validated as if the recipe had given them.

    Args: place: of the section, for the error.
    Raises: ConfigError for values that the section refuses.
    """
    try:
        return settings.derived(values)
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        remedy = cause.remedy if isinstance(cause, ConfigError) else ""
        reason = cause.reason if isinstance(cause, ConfigError) else reason_of(error)
        raise ConfigError(reason if reason.startswith(place) else f"{place}: {reason}", remedy=remedy) from error
