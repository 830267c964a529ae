"""Decides what a recipe leaves open, once for both sides: devices from the hardware, types from the devices, sizes from both.

The result is what runs and what the run folder's config.yaml shows. Nothing in it is `auto` but learner.layers in half precision on a GPU,
which depends on what is installed where a rank is: the rank decides (learner/model/layers.py), and says so when it is up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from actors.config import RunConfig
from correction.early_warning.replacement import reason_of
from correction.engines.device_choice import device_of, dtype_of, group_backend_of, is_open
from correction.errors import ConfigError
from correction.settings.base import Settings
from learner.config import LearnerConfig
from rollout.engine_settings.engine_config import EngineConfig

Section = TypeVar("Section", bound=Settings)

GPU_TOKENS_PER_MICROBATCH = 8192
"""Default on a GPU. The 2,048 tokens that suit a CPU would not keep a GPU busy: launching kernels would take longer than running them."""
GPU_RUNNING_REQUESTS = 256
"""As many as SGLang captures graphs for on a GPU of 60 to 160 GB (its cuda_graph_max_bs there, without tensor parallelism)."""


def asks_for_gpus(config: RunConfig) -> bool:
    """Whether a device is left open, and depends on the GPUs that there are."""
    return is_open(config.rollout.engine.device, config.learner.device)


def derived(config: RunConfig, *, has_gpu: bool) -> RunConfig:
    """The configuration with a value wherever a recipe says auto or nothing.

    Args:
        has_gpu: whether this machine has a GPU, or the cluster that is joined.
    Raises: ConfigError for settings that can't be honoured on these devices.
    """
    learner, engine = _learner(config, has_gpu), _engine(config, has_gpu)
    rollout = config.rollout.model_copy(update={"engine": engine})
    return config.model_copy(update={"learner": learner, "rollout": rollout})


def refusals(config: RunConfig, *, has_gpu: bool) -> Iterator[ConfigError]:
    """Why `derived` would refuse: of learner and engine each its reason."""
    for section in (lambda: _learner(config, has_gpu), lambda: _engine(config, has_gpu)):
        try:
            section()
        except ConfigError as error:
            yield error


def with_optimizer(config: RunConfig, *, has_experts: bool) -> RunConfig:
    """The configuration with the optimizer divided over ranks that hold the same experts, where a recipe says nothing of it.

    Args:
        config: with devices and types, as `derived` leaves it.
        has_experts: the model is a mixture of experts.
    """
    if config.learner.resolved_device == "cpu":
        return config
    values = _unset(config.learner, distributed_optimizer=config.learner.has_copies(has_experts=has_experts))
    return config.model_copy(update={"learner": with_values(config.learner, values, "learner")})


def _learner(config: RunConfig, has_gpu: bool) -> LearnerConfig:
    learner = config.learner
    device = device_of(learner.device, has_gpu=has_gpu)
    values: dict[str, Any] = {"device": device, "dtype": dtype_of(learner.dtype, device)}
    if is_open(learner.layers) and (device == "cpu" or values["dtype"] == "float32" or config.true_on_policy):
        values["layers"] = "local"
    if device == "cuda":
        values |= _unset(learner, tokens_per_microbatch=GPU_TOKENS_PER_MICROBATCH)
        if learner.has_copies(has_experts=False) or not learner.has_copies(has_experts=True):  # otherwise by the model
            values |= _unset(learner, distributed_optimizer=learner.data_parallel > 1)
    return with_values(learner, values, "learner")


def _engine(config: RunConfig, has_gpu: bool) -> EngineConfig:
    engine = config.rollout.engine
    values = _engine_types(config, has_gpu)
    if values["device"] == "cuda":
        values |= _unset(engine, max_running_requests=GPU_RUNNING_REQUESTS)
        values["gpu_share"] = config.rollout.gpus_per_worker
    return with_values(engine, values, "rollout.engine")


def with_engine_types(config: RunConfig, *, has_gpu: bool) -> RunConfig:
    """The configuration for an engine of its own, without a run: device and type are those of a run's engines, sizes stay as they are.

    Args:
        has_gpu: whether this machine has a GPU.
    Raises: ConfigError as `derived`.
    """
    engine = with_values(config.rollout.engine, _engine_types(config, has_gpu), "rollout.engine")
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})


def _engine_types(config: RunConfig, has_gpu: bool) -> dict[str, Any]:
    """Device, type and backend of an engine; a type that is left open is the learner's."""
    engine, learner = config.rollout.engine, config.learner
    sent = dtype_of(learner.dtype, device_of(learner.device, has_gpu=has_gpu))
    device = device_of(engine.device, has_gpu=has_gpu)
    dtype, backend = dtype_of(engine.dtype, device, learner=sent), group_backend_of(engine.weight_group_backend, device)
    return {"device": device, "dtype": dtype, "weight_group_backend": backend}


def _unset(settings: Settings, **values: Any) -> dict[str, Any]:
    """The values whose setting is not given in the recipe."""
    return {name: value for name, value in values.items() if name not in settings.model_fields_set}


def with_values(settings: Section, values: dict[str, Any], place: str) -> Section:
    """The section with these values, validated as if the recipe had given them. Afterwards these and the recipe's values count as given."""
    known = {name: getattr(settings, name) for name in settings.model_fields_set}
    try:
        return type(settings).model_validate(known | values)
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        remedy = cause.remedy if isinstance(cause, ConfigError) else ""
        reason = cause.reason if isinstance(cause, ConfigError) else reason_of(error)
        raise ConfigError(reason if reason.startswith(place) else f"{place}: {reason}", remedy=remedy) from error
