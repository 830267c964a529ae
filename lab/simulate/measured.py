"""Speeds and lengths of a run, from what its folder holds, for a simulation of other shapes of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evenkeel.actors.config import RunConfig
from evenkeel.actors.metrics.step_metrics import StepMetrics, members
from evenkeel.actors.record.config_that_ran import config_that_ran
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.errors import ConfigError
from lab.simulate.costs import AnswerLengths, DecodeSpeed, RunCosts, RunShape
from lab.simulate.run import simulate

# Metrics that a step must have to be measured from. A step whose answers were all cut and left out trained nothing and lacks some.
_NEEDED = {"time/train_s", "wait/rollout_share", "throughput/rollout_tokens_per_s", "length/trained_tokens"}
_FEWEST_STEPS = 5
# Training on a token costs a forward pass, and a backward pass that is twice that; reading it, on like hardware, is one.
_TRAINING_PASSES = 3
# Most rounds of the fit, and the relative error at which it ends.
_ROUNDS, _CLOSE = 6, 0.002


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Speeds and lengths measured from a run."""

    shape: RunShape
    costs: RunCosts
    lengths: AnswerLengths
    prompt_tokens: int


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
    )


def measure(run_dir: Path) -> MeasuredRun:
    """Read a run's folder.

    The decode speed is scaled until engines of a simulated run of the same shape have requests in them for as long as they had.
    Raises: ConfigError for a folder without enough steps, or whose pool changed its size in them.
    """
    folder = RunFolder.view(run_dir)
    config = config_that_ran(folder)
    steps = _steps(folder, config)
    sizes = {round(step["pool/workers"]) for step in steps if "pool/workers" in step}
    if len(sizes) > 1:
        raise ConfigError(f"{run_dir}: its pool had {min(sizes)} to {max(sizes)} workers, so the speed of one can't be told; give --run a "
                          "run whose pool kept its size")  # fmt: skip
    shape = replace(shape_of(config), workers=sizes.pop() if sizes else config.rollout.workers)
    learner_token_s = _mean(steps, "time/train_s") / _learner_tokens(steps)
    costs = RunCosts(
        decode=_first_guess(folder, steps, shape),
        learner_token_s=learner_token_s,
        prompt_token_s=learner_token_s * config.learner.world_size / _TRAINING_PASSES,
        handover_s=_mean(steps, "wait/handover_s"),
        publish_s=max(0.0, _mean(steps, "time/step_s") - _mean(steps, "time/train_s") - _mean(steps, "wait/learner_s")),
        sync_s=_mean(steps, "time/sync_s"),
        pause_s=_mean(steps, "time/pause_s"),
    )
    run = MeasuredRun(shape, costs, _lengths(folder, steps, config), _prompt_tokens(steps, shape))
    return replace(run, costs=_fitted(run, len(steps), _occupied_s(steps, shape)))


def recorded_lengths(run_dir: Path) -> tuple[AnswerLengths, int]:
    """(lengths of a run's answers, mean length of its prompts in tokens). Raises: ConfigError for a folder without enough steps."""
    folder = RunFolder.view(run_dir)
    config = config_that_ran(folder)
    steps = _steps(folder, config)
    return _lengths(folder, steps, config), _prompt_tokens(steps, shape_of(config))


def _steps(folder: RunFolder, config: RunConfig) -> list[StepMetrics]:
    """The steps to measure from: without those that fill the queue. Raises: ConfigError if they are too few."""
    steps = folder.read_metrics()[2 * (config.max_staleness + 1) + 1 :]
    steps = [step for step in steps if step.keys() >= _NEEDED]
    if len(steps) < _FEWEST_STEPS:
        raise ConfigError(
            f"{folder.path}: {len(steps)} steps to measure from, without those in which the run gets going; it takes {_FEWEST_STEPS}"
        )
    return steps


def _lengths(folder: RunFolder, steps: Sequence[StepMetrics], config: RunConfig) -> AnswerLengths:
    found = [length for length in folder.read_answer_lengths(first_step=steps[0].step) if length > 0]
    return AnswerLengths.like(found, f"{len(found)} answers of {folder.path}", max_tokens=config.rollout.sampling.max_tokens)


def _mean(steps: Sequence[StepMetrics], name: str) -> float:
    """Mean of a metric over the steps that have it; 0 if none has."""
    found = [step[name] for step in steps if name in step]
    return statistics.fmean(found) if found else 0.0


def _learner_tokens(steps: Sequence[StepMetrics]) -> float:
    """Tokens that a step trains, prompts included; mean."""
    return statistics.fmean(step["throughput/learner_tokens_per_s"] * step["time/train_s"] for step in steps)


def _prompt_tokens(steps: Sequence[StepMetrics], shape: RunShape) -> int:
    """Mean prompt length of a trained answer, tokens."""
    all_answers = shape.groups_per_step * shape.samples_per_group
    tokens = answers = 0.0
    for step in steps:
        length = step["length/trained_tokens"]
        trained = sum(members(step, "staleness/tokens/").values()) or all_answers * length
        tokens += trained
        answers += trained / length
    return max(0, round((_learner_tokens(steps) * len(steps) - tokens) / answers))


def _occupied_s(steps: Sequence[StepMetrics], shape: RunShape) -> float:
    """Seconds of a step in which an engine had a request, all engines together."""
    return shape.workers * statistics.fmean((1 - step["wait/rollout_share"]) * step["time/step_s"] for step in steps)


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
    rates = {}
    for evaluation in folder.read_evaluations():
        if evaluation.step in (0, steps[-1].step) and (seconds := evaluation.get("held_out/seconds", 0.0)) > 0:
            number = round(evaluation["held_out/problems"] / shape.workers)
            rates[number] = evaluation["held_out/response_tokens"] * number / seconds
    few = {number: rate for number, rate in rates.items() if 0 < number <= most // 2}
    if few:
        points.insert(0, max(few.items(), key=lambda point: point[1]))
    return DecodeSpeed(tuple(points))


def _fitted(run: MeasuredRun, steps: int, occupied_s: float) -> RunCosts:
    """The costs, with a decode speed at which a simulation of the run keeps its engines busy for `occupied_s` a step, all together."""
    costs = run.costs
    for _ in range(_ROUNDS):
        found = simulate(run.shape, costs, run.lengths.afresh(), prompt_tokens=run.prompt_tokens, steps=min(steps, 20))
        ratio = found.occupied_s / found.steps / occupied_s
        if abs(ratio - 1) < _CLOSE:
            break
        *few, (number, rate) = costs.decode.points
        costs = replace(costs, decode=DecodeSpeed((*few, (number, rate * ratio))))
    return costs
