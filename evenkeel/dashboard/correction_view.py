"""The view of the correction: where its bounds are and where the tokens of a step lie, what it dropped and cut, and where mismatch sits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from evenkeel.actors.carriers import ScatterSample, TokenSample
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.diagnostics.quantities import BUCKET_EDGES
from evenkeel.correction.settings.choices import Level, Ratio, WeightMode
from evenkeel.correction.settings.parts import CriterionConfig, ImportanceConfig, gate_of
from evenkeel.correction.settings.schedule import effective_ratio
from evenkeel.dashboard import facts
from evenkeel.dashboard.charts import chart_of, slice_of
from evenkeel.dashboard.columns import StepColumns
from evenkeel.dashboard.curves import CORRECTION_CURVES
from evenkeel.dashboard.open_run import OpenRun
from evenkeel.dashboard.tokens import kept_steps, load_tokens

_FAMILY = "correction/rejected_by_"
_OF_BUCKETS = (("proximal", "correction/bucket_"), ("behavior", "correction/bucket_behavior_"))
BUCKETS = tuple(prefix for _, prefix in _OF_BUCKETS)
"""How metrics by a token's probability begin."""
_NEAREST = 1e-8  # nats; smaller distances, 0 among them, are drawn there


def correction(run: OpenRun, asked: Mapping[str, str]) -> dict[str, Any]:
    """Args: asked: `step` (the newest of which tokens are kept), `from` and `to` as the overview."""
    steps, configured, left_out = run.steps, _config(run.config.get("correction", {}), "config.yaml"), list[str]()
    kept = kept_steps(run)["step"]
    step = int(asked["step"]) if asked.get("step") else max(kept, default=None)
    sample = None
    if step is not None and step in kept:
        try:
            sample, _ = load_tokens(run.folder.tokens_path(step))
        except (ValueError, OSError) as error:  # bounds, curves and other steps are worth looking at
            left_out.append(" ".join(str(error).split()))
    # The step's own: an alarm may have put others in the place of the run's settings, and a resume may have changed these.
    config = configured if sample is None or sample.correction is None else _config(sample.correction, f"step {step}")
    bounds = bounds_of(config)
    by_turn = any(one["level"] == Level.TURN for one in bounds)
    scatter = facts.readable(run.folder.scatter_path, ScatterSample.load, left_out.append)
    return {
        "kept": kept,
        "step": step,
        "preset": config.preset or "settings of its own",
        "is_replaced": config != configured,
        "bounds": bounds,
        "tokens": None if sample is None else _tokens(sample),
        "by_turn": by_turn,
        "units": None if sample is None else _units(sample, by_turn=by_turn),
        "rejected": _rejected(steps, step, sample, config),
        "buckets": _buckets(steps, step),
        "scatter": None if scatter is None else _scatter(scatter, steps.last.step if steps.last else 0),
        "charts": [chart for curves in CORRECTION_CURVES if (chart := chart_of(curves, steps, slice_of(asked))) is not None],
        "steps": [1, max(1, steps.last.step if steps.last else 1)],
        "left_out": left_out,
    }


def _config(settings: Any, where: str) -> CorrectionConfig:
    """Raises: ValueError for settings of another version."""
    try:
        return CorrectionConfig.model_validate(settings)
    except ValidationError as error:
        raise ValueError(f"{where}: correction: not settings of this version: {error.errors()[0]['msg']}") from error


def bounds_of(config: CorrectionConfig) -> list[dict[str, Any]]:
    """Bounds on ratios that the settings have, each with its part, its ratio (what it means in this run), and its level. Bounds of other
    statistics, which no axis of ratios shows, are told with what they are of."""
    found: list[dict[str, Any]] = []

    def add(part: str, ratio: Ratio | None, level: str, lower: float | None, upper: float | None, statistic: str = "ratio") -> None:
        meant = None if ratio is None else effective_ratio(ratio, config).value
        if lower is not None or upper is not None:
            found.append({"part": part, "ratio": meant, "level": level, "lower": lower, "upper": upper, "statistic": statistic})

    def add_part(name: str, part: ImportanceConfig | CriterionConfig, statistic: str, *, has_lower: bool = True) -> None:
        lowers, uppers = part.lower_by_staleness or (part.lower,), part.upper_by_staleness or (part.upper,)
        for age in range(count := max(len(lowers), len(uppers))):
            lower, upper = (ends[min(age, len(ends) - 1)] for ends in (lowers, uppers))
            of_age = f", staleness {age}{'+' * (age == count - 1)}" if count > 1 else ""
            add(name + of_age, part.ratio, part.level.value, lower if has_lower else None, upper, statistic)

    weights, objective = config.importance, config.objective
    if weights.mode not in (WeightMode.OFF, WeightMode.RAW):
        add_part(f"importance weight: {weights.mode.value}", weights, "ratio", has_lower=weights.mode is not WeightMode.TRUNCATE)
    for criterion in config.rejection:
        add_part(f"rejection: {criterion.label}", criterion, criterion.statistic.value)
    if config.veto is not None:
        ratio = config.veto.ratio if config.veto.quantity == "ratio" else None
        add("veto of a sequence", ratio, "token", config.veto.lower, config.veto.upper, config.veto.quantity)
    if objective.kind == "clip":
        add("clip of the objective", objective.ratio, objective.level.value, 1 - objective.clip_low, 1 + objective.clip_high)
    if objective.kind == "geometric_clip":
        add("clip of the objective", objective.ratio, "token", math.exp(-objective.log_clip), math.exp(objective.log_clip))
    if objective.kind == "prefix_clip":
        what = f"log of the product over n^{objective.power:g}, n tokens,"
        add("clip of the objective", objective.ratio, "prefix", -objective.log_low, objective.log_high, what)
    if objective.kind == "score":
        add("coefficient of the objective", objective.ratio, objective.level.value, objective.lower, objective.upper)
    gate = gate_of(objective)
    if gate is not None and gate.kind == "clip":
        add("gate of the objective", gate.ratio, "token", 1 - gate.low, 1 + gate.high)
    if gate is not None and gate.kind == "divergence":
        add("gate of the objective", gate.ratio, "token", None, gate.threshold, gate.divergence.value)
    return found


def _log_ratios(sample: TokenSample) -> dict[str, np.ndarray]:
    """[n] each: log ratios of a sample by their names; those of a policy that the run has no logprobs of are left out."""
    of = sample.columns
    pairs = {ratio.value: ratio.policies for ratio in Ratio if set(ratio.policies) <= of.keys()}
    return {name: of[numerator] - of[denominator] for name, (numerator, denominator) in pairs.items()}


def _tokens(sample: TokenSample) -> dict[str, Any]:
    """[n] trained tokens of the sample: log mu, the log ratios, weight and what became of them."""
    of, own = sample.columns, sample.columns["sampled"]
    return {
        "mu": of["behavior"][own],
        **{name: values[own] for name, values in _log_ratios(sample).items()},
        "weight": of["importance_weight"][own],
        "fate": [("kept", "dropped", "clipped", "cut")[k] for k in _fates(of)[own]],
    }


def _fates(of: Mapping[str, np.ndarray]) -> np.ndarray:
    """[n] 0: kept, 1: dropped or of weight 0, 2: clipped, 3: weight cut to a bound."""
    gone = ~of["kept"] | (of["importance_weight"] == 0)
    return np.where(gone, 1, np.where(of["clipped"], 2, np.where(of["is_cut"], 3, 0)))


def _units(sample: TokenSample, *, by_turn: bool) -> dict[str, list[Any]]:
    """[u] sequences of the sample, or turns of them, that have trained tokens: how many, the sums of their log ratios, and whether all are
    dropped."""
    own = np.flatnonzero(sample.columns["sampled"])
    sequence = np.searchsorted(sample.offsets, own, side="right")
    unit = np.stack([sequence, sample.columns["turns"][own] if by_turn else np.zeros_like(sequence)])
    starts = np.flatnonzero(np.any(np.diff(unit, axis=1, prepend=-1) != 0, axis=0))
    if not len(starts):
        return {"tokens": [], "dropped": []}
    gone = _fates(sample.columns)[own] == 1
    return {
        "tokens": np.diff(starts, append=len(own)).tolist(),
        "dropped": np.logical_and.reduceat(gone, starts).tolist(),
        **{name: np.add.reduceat(values[own].astype(np.float64), starts).tolist() for name, values in _log_ratios(sample).items()},
    }


def _rejected(steps: StepColumns, step: int | None, sample: TokenSample | None, config: CorrectionConfig) -> list[dict[str, Any]]:
    """For each criterion: the share of the step's trained tokens that it drops, and of the kept sample's how many lie below and above 1, in
    the criterion's own ratio; None: the sample has no such ratio, as where the criterion was that of another correction."""
    of = {criterion.label: effective_ratio(criterion.ratio, config).value for criterion in config.rejection}
    if config.veto is not None:
        of["veto"] = effective_ratio(config.veto.ratio, config).value
    rows, ratios = [], {} if sample is None else _log_ratios(sample)
    for label in dict.fromkeys([*steps.members(_FAMILY), *(sample.labels if sample else ())]):
        share = _at(steps, _FAMILY + label, step)
        below = above = None
        if sample is not None and (x := ratios.get(of.get(label, Ratio.RHO.value))) is not None:
            by = sample.columns["dropped_by"] == (sample.labels.index(label) + 1 if label in sample.labels else -1)
            below, above = int((x[by] < 0).sum()), int((x[by] > 0).sum())
        if share is not None or below or above:
            rows.append({"label": label, "share": share, "below": below, "above": above})
    return rows


def _buckets(steps: StepColumns, step: int | None) -> dict[str, Any]:
    """Mean and spread of rho by the token's probability, of the step: under pi_prox and under mu."""
    edges = (0.0, *BUCKET_EDGES, 1.0)
    names = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    found: dict[str, Any] = {"names": names}
    for of, prefix in _OF_BUCKETS:
        found[of] = {
            kind: [_at(steps, f"{prefix}{kind}_{i}", step) for i in range(len(names))] for kind in ("tokens", "rho_mean", "rho_std")
        }
    return found


def _at(steps: StepColumns, name: str, step: int | None) -> float | None:
    """A metric's value at a step; None: the last one, where no step is given."""
    x, y = steps.series(name)
    if not len(x):
        return None
    if step is None:
        return float(y[-1])
    at = int(np.searchsorted(x, step))
    return float(y[at]) if at < len(x) and x[at] == step else None


def _scatter(sample: ScatterSample, newest: int) -> dict[str, Any] | None:
    """Tokens of the recent steps, drawn at random: log mu, and the distance of both policies; not those of steps that a resume took back,
    which are in the file until the run ends again. None: there are none."""
    there = sample.step <= newest
    if not there.any():
        return None
    mu, proximal = sample.behavior_logprobs.astype(np.float64), sample.proximal_logprobs.astype(np.float64)
    finite = there & np.isfinite(mu) & np.isfinite(proximal)
    distance = np.maximum(np.abs(proximal - mu), _NEAREST)[finite]
    fresh = (sample.staleness <= 0)[finite]
    parts = {"fresh": fresh, "older": ~fresh}
    steps = [int(sample.step[there].min()), int(sample.step[there].max())]
    return {
        "steps": steps,
        **{
            name: {"mu": mu[finite][chosen].astype(np.float32), "distance": distance[chosen].astype(np.float32)}
            for name, chosen in parts.items()
        },
    }
