"""Speeds and lengths of a run, from what its folder holds, for a simulation of other shapes of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actors.config import RunConfig
from actors.metrics.step_metrics import StepMetrics, members
from actors.queue.delays import ADMISSION, CALL, HANDOVER
from actors.record.config_that_ran import config_that_ran
from actors.record.run_folder import RunFolder
from actors.simulation.costs import AnswerLengths, DecodeSpeed, RunCosts, RunShape
from actors.simulation.run import simulate
from correction.errors import ConfigError

_NEEDED = {"time/train_s", "wait/rollout_share", "throughput/rollout_tokens_per_s", "length/trained_tokens"}
"""Metrics that a step must have to be measured from. A step whose answers were all cut and left out trained nothing and lacks some."""
_FEWEST_STEPS = 5
_FEWEST_LENGTHS = 40
_TRAINING_PASSES = 3
"""Training on a token costs a forward pass, and a backward pass that is twice that; reading it, on like hardware, is one."""
_ROUNDS, _CLOSE = 6, 0.002
"""Most rounds of the fit, and the relative error at which it ends."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Speeds and lengths measured from a run."""

    shape: RunShape
    costs: RunCosts
    lengths: AnswerLengths
    prompt_tokens: int
    steps: int
    """Number of steps measured."""
    step_s: float
    """Their mean."""
    staleness: float
    """Their mean."""

    @classmethod
    def of(cls, run_dir: Path, *, cores: float, other_cores: float = 0.0) -> MeasuredRun:
        """Read a run's folder.

        The decode speed is scaled until engines of a simulated run of the same shape have requests in them for as long as they had.
        Args: cores, other_cores: see RunCosts; the learner's and the engines' threads are those of the run.
        Raises: ConfigError for a folder without enough steps, or whose pool changed its size in them.
        """
        folder, config, steps = _recorded(run_dir)
        shape = shape_of(config)
        if config.rollout.is_elastic:
            shape = replace(shape, workers=_constant_workers(run_dir, steps, shape.workers))
        lengths = _lengths(folder, steps, config.rollout.sampling.max_tokens)
        learner_tokens = _learner_tokens(steps)
        learner_token_s = _mean(steps, "time/train_s") / learner_tokens
        factors = [1 / (step["throughput/learner_tokens_per_s"] * learner_token_s) for step in steps]
        prompt_tokens = _prompt_tokens(steps, shape, learner_tokens * len(steps))
        costs = RunCosts(
            decode=_first_guess(folder, steps, shape),
            learner_token_s=learner_token_s / statistics.fmean(factors),
            learner_factors=tuple(factors),
            prompt_token_s=learner_token_s * config.learner.world_size / _TRAINING_PASSES,
            **_delays_s(steps, shape),
            publish_s=max(0.0, _mean(steps, "time/step_s") - _mean(steps, "time/train_s") - _mean(steps, "wait/learner_s")),
            sync_s=_mean(steps, "time/sync_s"),
            pause_s=_mean(steps, "time/pause_s"),
            cores=cores,
            learner_threads=config.learner.threads * config.learner.world_size,
            engine_threads=config.rollout.engine.threads,
            other_cores=other_cores,
        )
        run = cls(shape, costs, lengths, prompt_tokens, len(steps), _mean(steps, "time/step_s"), _mean(steps, "staleness/mean"))
        return replace(run, costs=_fitted(run, _occupied_s(steps, shape)))


def recorded_lengths(run_dir: Path) -> tuple[AnswerLengths, int]:
    """(lengths of a run's answers, mean length of its prompts in tokens), as `MeasuredRun` has them.

    Raises: ConfigError for a folder without enough steps.
    """
    folder, config, steps = _recorded(run_dir)
    prompt_tokens = _prompt_tokens(steps, shape_of(config), _learner_tokens(steps) * len(steps))
    return _lengths(folder, steps, config.rollout.sampling.max_tokens), prompt_tokens


def _recorded(run_dir: Path) -> tuple[RunFolder, RunConfig, list[StepMetrics]]:
    """A run's folder, its settings, and the steps to measure from. Raises: ConfigError if they are too few."""
    folder = RunFolder.view(run_dir)
    config = config_that_ran(folder)
    steps = folder.read_metrics()[2 * (config.max_staleness + 1) + 1 :]
    steps = [step for step in steps if step.keys() >= _NEEDED]
    if len(steps) < _FEWEST_STEPS:
        raise ConfigError(
            f"{run_dir}: {len(steps)} steps to measure from, without those in which the run gets going; it takes {_FEWEST_STEPS}"
        )
    return folder, config, steps


def shape_of(config: RunConfig) -> RunShape:
    """The settings of a recipe that decide how work flows; of an elastic pool the workers that it begins with."""
    rollout = config.rollout
    return RunShape(
        workers=rollout.workers,
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        samples_per_group=rollout.sampling.samples_per_group,
        slots=rollout.slots_per_worker,
        max_running_requests=rollout.engine.max_running_requests,
        retracts=rollout.engine.weight_update_mode == "retract",
        every_steps=config.weight_sync.every_steps,
    )


def _constant_workers(run_dir: Path, steps: Sequence[StepMetrics], first: int) -> int:
    """Number of an elastic pool's workers in these steps. Args: first: used if no step has it. Raises: ConfigError if it changed."""
    sizes = sorted({round(step["pool/workers"]) for step in steps if "pool/workers" in step}) or [first]
    if len(sizes) > 1:
        raise ConfigError(
            f"{run_dir}: its pool had {sizes[0]} to {sizes[-1]} workers in the {len(steps)} steps to measure from, so the speed of one "
            "can't be told; give --run a run with a fixed pool (rollout.workers alone), or one whose pool kept its size"
        )
    return sizes[0]


def _mean(steps: Sequence[StepMetrics], name: str) -> float:
    """Mean of a metric over the steps that have it; 0 if none has."""
    found = [step[name] for step in steps if name in step]
    return statistics.fmean(found) if found else 0.0


def _learner_tokens(steps: Sequence[StepMetrics]) -> float:
    """Tokens that a step trains, prompts included; mean."""
    return statistics.fmean(step["throughput/learner_tokens_per_s"] * step["time/train_s"] for step in steps)


def _prompt_tokens(steps: Sequence[StepMetrics], shape: RunShape, learner_tokens: float) -> int:
    """Mean prompt length of a trained answer, tokens. Args: learner_tokens: trained in all steps, prompts included."""
    all_answers = shape.groups_per_step * shape.samples_per_group
    tokens = answers = 0.0
    for step in steps:
        length = step["length/trained_tokens"]
        trained = sum(members(step, "staleness/tokens/").values()) or all_answers * length
        tokens, answers = tokens + trained, answers + trained / length
    return max(0, round((learner_tokens - tokens) / answers))


def _lengths(folder: RunFolder, steps: Sequence[StepMetrics], max_tokens: int) -> AnswerLengths:
    """Lengths of one answer of each trained group; if there are too few (a run of an older version), the mean length of each step."""
    found = [length for length in folder.read_answer_lengths(first_step=steps[0].step) if length > 0]
    if len(found) >= _FEWEST_LENGTHS:
        return AnswerLengths.like(found, f"{len(found)} answers of {folder.path}", max_tokens=max_tokens)
    means = [max(1, round(step.get("length/sampled_tokens", step["length/trained_tokens"]))) for step in steps]
    return AnswerLengths.like(means, f"{folder.path}, each as long as its step's mean", max_tokens=max_tokens)


def _occupied_s(steps: Sequence[StepMetrics], shape: RunShape) -> float:
    """Seconds of a step in which an engine had a request, all engines together."""
    return shape.workers * statistics.fmean((1 - step["wait/rollout_share"]) * step["time/step_s"] for step in steps)


def _delays_s(steps: Sequence[StepMetrics], shape: RunShape) -> dict[str, float]:
    """Delays of groups on their way, as the run's driver measured them. Of a run of an older version only the hand-over is known."""
    measured = [step for step in steps if {ADMISSION, CALL, HANDOVER} <= step.keys()]
    if len(measured) < _FEWEST_STEPS:
        return {"handover_s": _handover_s(steps, shape)}
    one_way_s = _mean(measured, CALL) / 2
    return {
        "admission_s": _mean(measured, ADMISSION),
        "dispatch_s": one_way_s,
        "answer_s": one_way_s + _mean(measured, "time/reward_s"),
        "handover_s": _mean(measured, HANDOVER),
    }


def _handover_s(steps: Sequence[StepMetrics], shape: RunShape) -> float:
    """Estimate of the hand-over from the learner's waits. In an asynchronous run a step with a short wait waited for the hand-over alone;
    in a synchronous run it is the wait less sampling and sync."""
    waits = sorted(step["wait/learner_s"] for step in steps)
    if shape.max_staleness:
        return waits[len(waits) // 10]
    occupied_s = [(1 - step["wait/rollout_share"]) * step["time/step_s"] for step in steps]
    return max(0.0, statistics.median(waits) - _mean(steps, "time/sync_s") - statistics.median(occupied_s))


def _first_guess(folder: RunFolder, steps: Sequence[StepMetrics], shape: RunShape) -> DecodeSpeed:
    """Decode speed at as many requests as an engine can have; and at fewer, from an evaluation before or after training that had at most
    half as many.

    Raises: ConfigError if the engines sampled nothing.
    """
    tokens = statistics.fmean(step["throughput/rollout_tokens_per_s"] * step["time/step_s"] for step in steps)
    occupied_s = _occupied_s(steps, shape)
    if min(tokens, occupied_s) <= 0:
        raise ConfigError(f"{folder.path}: its engines sampled nothing in the last {len(steps)} steps, so their speed can't be measured")
    places = (shape.max_staleness + 1) * shape.groups_per_step * shape.samples_per_group
    most = max(1, min(shape.max_running_requests, shape.slots * shape.samples_per_group, places // shape.workers))
    points = [(most, tokens / occupied_s)]
    alone = [e for e in folder.read_evaluations() if e.step in (0, steps[-1].step) and e.get("held_out/seconds", 0.0) > 0]
    asked = [(round(e["held_out/problems"] / shape.workers), e) for e in alone]
    if few := [(number, e) for number, e in asked if 0 < number <= most // 2]:
        rates = [(number, e["held_out/response_tokens"] * number / e["held_out/seconds"]) for number, e in few]
        points.insert(0, max(rates, key=lambda point: point[1]))
    return DecodeSpeed(tuple(points))


def _fitted(run: MeasuredRun, occupied_s: float) -> RunCosts:
    """The costs, with a decode speed at which a simulation of the run keeps its engines busy for `occupied_s` a step, all together."""
    costs = run.costs
    for _ in range(_ROUNDS):
        found = simulate(run.shape, costs, run.lengths.afresh(), prompt_tokens=run.prompt_tokens, steps=min(run.steps, 20))
        ratio = found.occupied_s / found.steps / occupied_s
        if abs(ratio - 1) < _CLOSE:
            break
        *few, (number, rate) = costs.decode.points
        costs = replace(costs, decode=DecodeSpeed((*few, (number, rate * ratio))))
    return costs
