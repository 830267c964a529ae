"""The correction's settings as a whole; a preset names a combination of them.

`preset` is read first, and keys that are given with it override its values: {preset: tis-token, importance: {upper: 3}}.
Combinations that make no sense are refused here, with the reason.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator

from .errors import ConfigError
from .presets.methods import preset_settings
from .settings.choices import Population, ProximalSource, WeightMode
from .settings.parts import CorrectionSettings, gate_of
from .settings.schedule import Schedule, Stage, effective_ratio, fold_obstacle, ratios_of, second_moments

REPORT_ONLY = 1e-6
"""A KL coefficient up to which the penalty is there to be reported, not to be felt."""


class CorrectionConfig(CorrectionSettings):
    """How a batch is corrected and what is optimised."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        preset = values.get("preset")
        return merged({"objective": {"kind": "clip"}} if preset is None else preset_settings(preset), values)

    @model_validator(mode="after")
    def _validate_combination(self) -> CorrectionConfig:
        validate_combination(self)
        return self

    def resolve(self) -> CorrectionConfig:
        """The same settings with every value spelled out and no preset left."""
        return CorrectionConfig.model_validate({**self.model_dump(), "preset": None})


def merged(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Override inside base, key by key; a part of another kind replaces the base's part as a whole."""
    result = dict(base)
    for key, value in override.items():
        old = result.get(key)
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        is_same_kind = isinstance(old, dict) and isinstance(value, dict) and value.get("kind", old.get("kind")) == old.get("kind")
        result[key] = merged(old, value) if is_same_kind else value  # type: ignore[arg-type]  # both are dicts, by is_same_kind
    return result


def validate_combination(config: CorrectionConfig) -> None:
    """Refuse combinations that would be silently wrong.

    Raises: ConfigError with the reason and the remedy.
    """
    _refuse_parts_of_rho_without_it(config)
    _refuse_counting_twice(config)
    _refuse_ratios_without_gradient(config)
    _refuse_a_penalty_without_pull(config)
    if config.normalize.population is not Population.OFF and config.importance.mode is WeightMode.OFF:
        raise ConfigError(
            f"normalize.population = {config.normalize.population}: there are no importance weights to normalise. "
            "Set importance.mode, or normalize.population: off."
        )
    if len(moments := second_moments(config, Schedule.of(config, is_deferred=False), Stage.LATE)) > 1:
        raise ConfigError(
            f"rejection has {' and '.join(criterion.label for criterion in moments)}: one budget of an optimizer step is settled. Keep the "
            "smaller one."
        )
    if moments and config.covariance is not None:
        raise ConfigError(
            f"covariance with rejection by {moments[0].label}: one choice of an optimizer step is settled. Set covariance: null, or leave "
            "that criterion out."
        )
    obstacle = fold_obstacle(config, is_deferred=False)
    if obstacle is not None:
        raise ConfigError(
            f"proximal = {config.proximal}: parts on the target policy run inside the training forward, but {obstacle}. "
            "Put these parts on ratio rho with proximal: recompute, or drop the term."
        )


def _refuse_counting_twice(config: CorrectionConfig) -> None:
    """An importance weight must hold no policy that the objective's ratio holds already."""
    if config.importance.mode is WeightMode.OFF or config.objective.ratio is None:
        return
    weight = effective_ratio(config.importance.ratio, config)
    inside = effective_ratio(config.objective.ratio, config)
    if not weight.factors & inside.factors:
        return  # such as rho outside, r inside: together q, each once
    raise ConfigError(
        f"importance.ratio = {config.importance.ratio} with objective.ratio = {config.objective.ratio} and proximal = {config.proximal}: "
        f"the objective contains {inside} already, and a weight on {weight} would apply it twice. "
        "Set importance.mode: off, or proximal: recompute with a weight on rho and an objective on r (or mismatch and since_sampling), or "
        "objective {kind: score}."
    )


def _refuse_parts_of_rho_without_it(config: CorrectionConfig) -> None:
    """Without a recomputed proximal policy there is no rho to tell apart, and nothing to stand for tokens of the present weights."""
    named = [ratio for ratio in ratios_of(config) if "at_sampling" in ratio.policies]
    if named and config.proximal is not ProximalSource.RECOMPUTE:
        raise ConfigError(
            f"ratio = {named[0]} with proximal = {config.proximal}: mismatch and staleness are told apart by the learner's own logprobs, "
            "those of the present weights among them. Set proximal: recompute (no forward with one optimizer step per batch), or ratio: q."
        )


def _refuse_ratios_without_gradient(config: CorrectionConfig) -> None:
    gate, penalty = gate_of(config.objective), config.kl
    if gate is not None and not gate.ratio.has_target:
        raise ConfigError(
            f"objective.gate.ratio = {gate.ratio}: a gate stops what an update moves too far, and {gate.ratio} does not contain the target "
            "policy. Take r, q or since_sampling, or a criterion of rejection."
        )
    places = {"objective.ratio": config.objective.ratio}
    if penalty.coefficient > 0 and penalty.estimator == "unbiased_k3":
        places["kl.ratio"] = penalty.ratio
    for place, ratio in places.items():
        if ratio is not None and not ratio.has_target:
            raise ConfigError(
                f"{place} = {ratio}: it has no gradient, since {ratio} does not contain the target policy. Take r, q or since_sampling."
            )


def _refuse_a_penalty_without_pull(config: CorrectionConfig) -> None:
    """E over theta of grad (log theta - log anchor) is 0."""
    if config.kl.level == "sequence" and config.kl.estimator != "k2":
        raise ConfigError(
            f"kl.level = sequence with kl.estimator = {config.kl.estimator}: a sequence's square is that of k2. Set kl.estimator: k2, or "
            "kl.level: token."
        )
    if config.kl.estimator == "k1" and config.kl.coefficient > REPORT_ONLY:
        raise ConfigError(
            f"kl.estimator = k1 with kl.coefficient = {config.kl.coefficient}: its expected gradient is 0 on-policy, so that it adds noise "
            f"and pulls nowhere. Take k2, or unbiased_k3 where tokens are stale; only to have the KL reported, at most {REPORT_ONLY}."
        )
