"""Settings that concern engines and learner alike, and for true on-policy the comparison of each batch."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from actors.config import OnDifference, RunConfig
from actors.processes.event_level import EventLevel
from actors.settings.derived import with_derived
from correction.engines.contract import Contract, SideSettings
from correction.errors import ActorLost, ConfigError, EngineError
from correction.settings.base import DerivedSettings
from learner.config import LearnerConfig
from rollout.engine_settings.engine_config import EngineConfig

if TYPE_CHECKING:  # the settings are resolved by commands that answer at once: without torch
    from correction.batch import PackedBatch
    from correction.engines.agreement import Agreement
    from learner.results import StepValues


def resolved(config: RunConfig, model: Path | None = None) -> RunConfig:
    """The configuration that a run is given, and that its folder shows.

    With true_on_policy it has the contract's settings on both sides; with the engines' routing to be replayed, engines that report it.

    Args:
        config: with devices and types (derived.py).
        model: folder of the weights that training starts from; on a resume a checkpoint's. None: config.model.
    Raises: ConfigError naming what can't be honoured.
    """
    refuse_contradictions(config)
    config = _with_settings(config, {"return_routed_experts": config.learner.routing_replay == "rollout"}, {})
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
    contract = contract_of(model or config.model, config.rollout.engine, config.learner)
    return _with_settings(config, contract.engine_settings, contract.learner_settings)


def refuse_contradictions(config: RunConfig) -> None:
    """Raises: ConfigError if the recipe gives a setting that follows from another one, and gives it another value."""
    engine, replay = config.rollout.engine, config.learner.routing_replay
    _refuse_given({"rollout.engine": engine}, "return_routed_experts", replay == "rollout", f"learner.routing_replay: {replay}")
    _refuse_other_operators(config, {"learner": config.learner, "rollout.engine": engine})


def refuse_contradictions_of_engines(config: RunConfig) -> None:
    """The same for engines without a learner: what decides their operators alone. Experts that they would report are left unused."""
    _refuse_other_operators(config, {"rollout.engine": config.rollout.engine})


def _refuse_other_operators(config: RunConfig, sides: Mapping[str, DerivedSettings]) -> None:
    _refuse_given(sides, "batch_invariant", config.true_on_policy, f"true_on_policy: {str(config.true_on_policy).lower()}")
    if config.true_on_policy:
        engine, ranks = {"rollout.engine": config.rollout.engine}, config.learner.tensor_parallel
        _refuse_given(engine, "projection_parts", ranks, f"true_on_policy: true and learner.tensor_parallel: {ranks}")


def _with_settings(config: RunConfig, of_engine: dict[str, Any], of_learner: dict[str, Any]) -> RunConfig:
    """The configuration with these derived values. Raises: ConfigError if other settings of the recipe contradict them."""
    rollout = config.rollout.model_copy(update={"engine": with_derived(config.rollout.engine, of_engine, "rollout.engine")})
    return config.model_copy(update={"rollout": rollout, "learner": with_derived(config.learner, of_learner, "learner")})


def _refuse_given(sections: Mapping[str, DerivedSettings], name: str, needed: bool | int, setting: str) -> None:
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


def contract_of(model: Path, engine: EngineConfig, learner: LearnerConfig) -> Contract:
    """The contract of a model, engine and learner, whose devices and types are decided. Raises: ConfigError naming everything that can't be
    honoured."""
    return Contract.of(
        json.loads((model / "config.json").read_text()),
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


class BatchObserver(Protocol):
    """Takes what the comparison of a batch has found."""

    def event(self, level: EventLevel, text: str) -> None: ...

    def note(self, numbers: dict[str, float]) -> None: ...


async def check_batch(
    compared: Callable[[], Awaitable[Agreement | None]], on_difference: OnDifference, *, step: int, observer: BatchObserver
) -> None:
    """With true on-policy: before the new weights go anywhere. Args: compared: asks who has the batch to compare it.

    Raises: EngineError at the first difference, if that ends the run; ActorLost then, too, if the batch is gone with who had it.
    """
    found = await compared()
    if found is None:
        lacking = f"step {step}: its batch is gone with the correction service, and can't be compared bit by bit"
        if on_difference == "stop":
            raise ActorLost(lacking)
        return observer.event("warning", lacking)
    raise_on_difference(found, on_difference, step=step)
    if found.first is not None:
        observer.event("warning", f"step {step}: {describe_difference(found)}")
    observer.note(metrics_of(found))


def compare_batch(batch: PackedBatch, values: StepValues) -> Agreement:
    """Compare the sampled logprobs of a batch with the trained ones, at the weights from which its update started.

    Args: values: of the step, which say which tokens were in a forward pass at those weights: with one optimizer step all.
    """
    from correction.diagnostics.diagnose import proximal_of
    from correction.engines.agreement import compare

    before_update = values.decided.before_update
    if before_update is None:
        return compare(batch, values.target_logprobs)
    trained, known = proximal_of(batch, values.target_logprobs, before_update)
    return compare(batch if known is None else replace(batch, loss_mask=batch.loss_mask & known), trained)


def raise_on_difference(agreement: Agreement, on_difference: OnDifference, *, step: int) -> None:
    """Raises: EngineError naming the first token that differs, if that ends the run."""
    if agreement.first is not None and on_difference == "stop":
        raise EngineError(f"step {step}: {describe_difference(agreement)}. To go on with correction: true_on_policy_on_difference: correct")


def describe_difference(agreement: Agreement) -> str:
    """What differs, in one sentence without the full stop."""
    return (
        f"true_on_policy: {agreement.differing} of {agreement.tokens} tokens of staleness 0 have other bits in training than in sampling, "
        f"by up to {agreement.largest_difference:.3g} nats; the first is {agreement.first}"
    )


def metrics_of(agreement: Agreement) -> dict[str, float]:
    """Numbers by their names in the catalogue; without a token to compare there is no share."""
    if not agreement.tokens:
        return {"true_on_policy/tokens": 0.0}
    return {
        "true_on_policy/tokens": float(agreement.tokens),
        "true_on_policy/equal_share": agreement.equal_share,
        "true_on_policy/max_abs_difference": agreement.largest_difference,
    }
