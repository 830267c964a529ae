"""What the learner refuses of a model: layouts that can't divide it, and settings that its layers can't honour.

Plan and doctor say the same from a config.json, before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from evenkeel.correction.errors import ConfigError
from evenkeel.engines.contract import expert_count
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.families import FAMILIES

_DIVISOR = "Set it to a common divisor, or to 1"


def check_model(config: LearnerConfig, model: Any) -> None:
    """Args: model: its transformers config, or an object with such sizes. Raises: ConfigError: the first of all obstacles."""
    for obstacle in chain(layout_obstacles(config, model), setting_obstacles(config, model)):
        raise obstacle


def layout_obstacles(config: LearnerConfig, model: Any) -> Iterator[ConfigError]:
    """Why the model can't be divided over ranks like this.

    Args: model: as of check_model. A size that it lacks counts as 0: its family is refused elsewhere.
    """
    yield from _tensor_parallel_obstacles(config, model)
    layers, stages = getattr(model, "num_hidden_layers", 0) or 0, config.pipeline_parallel * config.virtual_pipeline
    if layers % stages:
        reason = f"learner.pipeline_parallel x virtual_pipeline = {stages} doesn't divide the model's {layers} layers"
        yield ConfigError(reason, remedy=_DIVISOR)
    experts = _experts(model)
    if not experts and config.expert_parallel > 1:
        yield _without_experts(model, f"expert_parallel = {config.expert_parallel}", "Set it to 1")
    if experts % config.expert_parallel:
        reason = f"learner.expert_parallel = {config.expert_parallel} doesn't divide the model's {experts} experts"
        yield ConfigError(reason, remedy=_DIVISOR)


def _tensor_parallel_obstacles(config: LearnerConfig, model: Any) -> Iterator[ConfigError]:
    ranks, experts, kind = config.tensor_parallel, _experts(model), getattr(model, "model_type", "")
    setting = f"learner.tensor_parallel = {ranks}"
    if ranks > 1 and kind in FAMILIES and FAMILIES[kind].qk_norm == "all_heads":
        yield ConfigError(
            f"{setting}: {kind} normalises queries and keys over the channels of all heads, which would be on several ranks",
            remedy="Set it to 1, and take data_parallel or pipeline_parallel",
        )
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    heads, key_heads, width = (getattr(model, name, None) or 0 for name in names)
    is_divided = {
        "num_attention_heads": heads % ranks == 0,
        "num_key_value_heads": key_heads % ranks == 0 or ranks % key_heads == 0,  # several ranks can use one
        "intermediate_size": bool(experts) or width % ranks == 0,  # an expert is whole on a rank
    }
    if wrong := [f"{name} = {getattr(model, name)}" for name, fits in is_divided.items() if not fits]:
        yield ConfigError(
            f"{setting}: {', '.join(wrong)} in the model's config.json can't be divided equally among {ranks} ranks", remedy=_DIVISOR
        )
    if ranks > 1 and experts and not config.sequence_parallel:
        yield ConfigError(
            f"{setting} without sequence_parallel: {kind} has {experts} experts, to which all these ranks would send the same rows, whose "
            "gradients would count several times",
            remedy="Set learner.sequence_parallel: true",
        )


def setting_obstacles(config: LearnerConfig, model: Any) -> Iterator[ConfigError]:
    """Settings other than the layout that don't go together with the model's experts, or need some. Args: model: as of check_model."""
    experts, kind = _experts(model), getattr(model, "model_type", "")
    if not experts:
        if config.routing_replay != "none":
            yield _without_experts(model, f"routing_replay = {config.routing_replay}", "Set it to none")
        if config.has_auxiliary_loss:
            yield _without_experts(model, f"moe_aux_loss_coefficient = {config.moe_aux_loss_coefficient:g}", "Set it to 0")
        return
    if config.dtype == "float16":
        yield ConfigError(
            f"learner.dtype = float16: {kind} has {experts} experts, whose gradients have an optimizer and so a loss scale of their own: "
            "the two scales would part at the first overflow (Megatron refuses it, too)",
            remedy="Set it to bfloat16",
        )
    if config.batch_invariant:
        yield ConfigError(
            f"learner.batch_invariant = true (true_on_policy): {kind} has {experts} experts, whose rows are not batch-invariant",
            remedy="Set true_on_policy: false, or take a dense model",
        )


def _experts(model: Any) -> int:
    """Experts of each layer; 0: the model is dense."""
    return expert_count(getattr(model, "model_type", ""), getattr(model, "num_experts", None))


def _without_experts(model: Any, setting: str, remedy: str) -> ConfigError:
    return ConfigError(f"learner.{setting}: {getattr(model, 'model_type', '')} has no experts", remedy=remedy)
