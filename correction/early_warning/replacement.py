"""Another correction in the middle of a run: that of a preset, or the same one with narrower bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

from ..config import CorrectionConfig
from ..errors import ConfigError
from ..presets.methods import preset_settings
from ..settings.base import Settings
from ..settings.choices import Level, RejectionLevel, Statistic, WeightMode
from ..settings.parts import CriterionConfig, Objective
from ..settings.schedule import needs_logprobs_at_sampling, needs_reference_logprobs, needs_topk

P = TypeVar("P", bound=Settings)

LARGEST_KL = 0.1
"""Nats between engine and learner up to which a correction should hold: the end of what is published for runs (LEVELS in monitor.py)."""
# What a run optimises, rather than how it is corrected: kept where the new preset says nothing about it.
_OF_THE_RUN = ("advantage", "kl", "step_size", "missing", "entropy_coefficient")


def switched(config: CorrectionConfig, preset: str) -> CorrectionConfig:
    """A preset as published, with the run's own advantages, KL penalty and entropy bonus unless the preset sets them.

    Raises: ConfigError if there is no such preset, or it doesn't go with what is kept.
    """
    settings = preset_settings(preset)
    kept = {name: getattr(config, name) for name in _OF_THE_RUN if name not in settings}
    try:
        return CorrectionConfig.model_validate({"preset": preset, **kept})
    except ValidationError as error:
        raise ConfigError(f"{preset} with this run's {', '.join(kept)}: {reason_of(error)}") from error


def tightened(config: CorrectionConfig, factor: float) -> CorrectionConfig:
    """Every bound nearer to "nothing has changed": ratios by the power `factor` (0.5 and 2 become 0.71 and 1.41 at a half), distances by
    the factor itself (PPO's clip, divergences and their gates). The veto, which is for broken tokens, stays.

    Args: factor: in (0, 1).
    Raises: ConfigError if there is no bound.
    """
    narrower = config.model_copy(
        update={
            "importance": _with_powers(config.importance, factor, "lower", "upper", "lower_by_staleness", "upper_by_staleness"),
            "rejection": tuple(_narrower_criterion(criterion, factor) for criterion in config.rejection),
            "objective": _narrower_objective(config.objective, factor),
        }
    )
    if narrower == config:
        raise ConfigError("correction has no bound that could be tightened: no clip, gate, criterion or bounded importance weight")
    return narrower


def check_replaceable(before: CorrectionConfig, after: CorrectionConfig) -> None:
    """Refuse a correction that needs what engines and learner were not set up for when the run began, with `before`.

    Raises: ConfigError naming what it needs.
    """
    if needs_reference_logprobs(after) and not needs_reference_logprobs(before):
        raise ConfigError(
            "its KL penalty needs a reference model, which the learner loads at the start, and only if the correction that the run "
            "begins with has such a penalty. Choose a preset without one"
        )
    if needs_logprobs_at_sampling(after) and not needs_logprobs_at_sampling(before):
        raise ConfigError(
            "it tells mismatch and staleness apart by earlier weights, of which the learner keeps copies from the start, and only if the "
            "correction that the run begins with does so. Choose a preset on rho, such as tis-token"
        )
    if needs_topk(after) > needs_topk(before):
        raise ConfigError(
            "it needs the engines' top-K logprobs, which they keep from the start, and only if the correction that the run begins with "
            "needs them. Choose a binary form, such as dppo-binary-tv"
        )


def breaks_at_an_alarm(config: CorrectionConfig) -> str | None:
    """Why this correction would leave out most of a batch when the KL has grown, in one sentence; None: it wouldn't.

    benchmarks/remedies.py has the shares: of bands on geometric means nothing is left at a KL beyond them, of products of ratios hardly
    anything at a KL times the length above 1.
    """
    for criterion in config.rejection:
        if criterion.statistic is Statistic.K3 and criterion.level is RejectionLevel.GEOMETRIC and (criterion.upper or 1) < LARGEST_KL:
            return (
                f"its bound on mean k3 leaves out nearly every answer once the KL exceeds {criterion.upper:.2g} nats; "
                "take a preset on tokens, such as dppo-binary-tv or tis-token"
            )
        if criterion.statistic is not Statistic.RATIO or criterion.usual_kl is not None:
            continue
        if criterion.level is RejectionLevel.GEOMETRIC and criterion.lower is not None and criterion.lower > math.exp(-LARGEST_KL):
            return (
                f"its band on geometric means leaves out nearly every answer once the KL exceeds {-math.log(criterion.lower):.2g} nats; "
                "take a preset on tokens, such as dppo-binary-tv or tis-token"
            )
    products = [criterion.level is RejectionLevel.SEQUENCE and criterion.statistic is Statistic.RATIO for criterion in config.rejection]
    if any(products) or (config.importance.mode is not WeightMode.OFF and config.importance.level is Level.SEQUENCE):
        return (
            "it weighs or bounds products of ratios, which leave next to nothing of answers of more than 1 / KL tokens; "
            "take a preset on tokens, such as dppo-binary-tv or tis-token"
        )
    return None


def reason_of(error: ValidationError) -> str:
    """The first problem in the validator's own words."""
    problem = error.errors()[0]
    return str(problem.get("ctx", {}).get("error", problem["msg"]))


def _narrower_criterion(criterion: CriterionConfig, factor: float) -> CriterionConfig:
    change = _with_powers if criterion.statistic is Statistic.RATIO else _with_products
    return change(criterion, factor, "lower", "upper", "lower_by_staleness", "upper_by_staleness")


def _narrower_objective(objective: Objective, factor: float) -> Objective:
    if objective.kind == "clip":
        band = None if objective.band is None else _with_products(objective.band, factor, "delta")
        narrower = _with_powers(_with_products(objective, factor, "clip_low", "clip_high"), factor, "dual_clip")
        return narrower.model_copy(update={"band": band})
    if objective.kind == "geometric_clip":
        return _with_products(objective, factor, "log_clip")
    if objective.kind == "prefix_clip":
        return _with_products(objective, factor, "log_low", "log_high", "log_dual")
    if objective.kind == "score":
        gate = objective.gate
        if gate is not None:
            gate = _with_products(gate, factor, *(("low", "high") if gate.kind == "clip" else ("threshold",)))
        return _with_powers(objective, factor, "lower", "upper").model_copy(update={"gate": gate})
    return objective


def _with_powers(part: P, factor: float, *names: str) -> P:
    return _changed(part, lambda bound: bound**factor, names)


def _with_products(part: P, factor: float, *names: str) -> P:
    return _changed(part, lambda bound: bound * factor, names)


def _changed(part: P, change: Callable[[float], float], names: tuple[str, ...]) -> P:
    """The part with those of these bounds that it has changed, tables by staleness entry by entry."""
    present = {name: getattr(part, name) for name in names if getattr(part, name) is not None}
    return part.model_copy(
        update={name: tuple(map(change, bound)) if isinstance(bound, tuple) else change(bound) for name, bound in present.items()}
    )
