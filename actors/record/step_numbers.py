"""Gathers the numbers of a step from its sources, by metric name."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING

from evenkeel.actors.carriers import Example, PreparedBatch
from evenkeel.actors.metrics.catalogue import DIAGNOSTIC_PLACES, LOSS_PLACES, SKIPPED, STALENESS_PLACES
from evenkeel.correction.diagnostics.batch_numbers import kept_numbers, staleness_numbers
from evenkeel.learner.results import SkipReason
from evenkeel.rollout.prompt_place import task_of
from evenkeel.rollout.trajectory import (
    AnswerFacts,
    FailureKind,
    FinishReason,
    GroupFacts,
    SyncReceipt,
    WorkerLoad,
    have_one_reward,
    workers_wait,
)

if TYPE_CHECKING:
    from evenkeel.learner.results import StepResult
    from evenkeel.rollout.tasks.mixture import Mixture

_UNSCORED = ("reward/exceptions_total", "trajectories without a reward")
FAILED_TRAJECTORIES = {
    FailureKind.ENGINE: _UNSCORED,
    FailureKind.REWARD: _UNSCORED,
    FailureKind.REWARD_TIMEOUT: ("reward/timeouts_total", "trajectories whose reward took too long"),
}
"""Counter and words, in the plural, for each kind."""
# Versions of the last bucket of staleness/tokens/, which is of older tokens, too.
_OLDEST = 8


def batch_metrics(prepared: PreparedBatch, *, correct_at: Mapping[str, float], has_tools: bool = False) -> dict[str, float]:
    """Rewards, lengths, staleness and group outcomes of a batch. If all answers were left out, there is no length or age of a trained one.

    Args: correct_at: reward of a right answer, by task. has_tools: some environment has; its calls are told also where there are none.
    """
    groups, of_groups = prepared.groups, [group.valid for group in prepared.groups]
    valid = [t for answers in of_groups for t in answers]
    tasks = [task_of(group.prompt_id) for group in groups]
    scored = [[t.reward for t in answers if t.reward is not None] for answers in of_groups]
    right = [[reward >= correct_at[task] for reward in of_group] for of_group, task in zip(scored, tasks, strict=True)]
    alike = [are_right[0] for are_right, answers in zip(right, of_groups, strict=True) if have_one_reward(answers)]
    rewards = list(chain.from_iterable(scored))
    numbers = {
        "reward/mean": statistics.fmean(rewards),
        "reward/accuracy": sum(map(sum, right)) / len(rewards),
        "reward/std": _deviation(rewards),
        "reward/group_std": statistics.fmean(map(_deviation, scored)),
        "time/generate_s": statistics.fmean([g.generate_s for g in groups]),
        "time/reward_s": statistics.fmean([g.reward_s for g in groups]),
        "time/correct_s": prepared.correct_s,
        "length/max_tokens": max(t.response_tokens for t in valid),
        "length/truncated_share": sum(t.finish_reason is FinishReason.LENGTH for t in valid) / len(valid),
        "groups/all_correct": sum(alike),
        "groups/all_wrong": len(alike) - sum(alike),
        "sync/read_again_tokens": sum(t.read_again_tokens for t in valid),
    }
    if ids := sum(t.kept_ids for t in valid):
        numbers["length/kept_set_tokens"] = ids / sum(t.response_tokens for t in valid)
    if any(t.tool_s for t in valid):
        numbers |= {
            "turns/mean": statistics.fmean([t.turns for t in valid]),
            "turns/max": max(t.turns for t in valid),
            "turns/sequences": statistics.fmean([t.sequence_count for t in valid]),
            "turns/read_tokens": statistics.fmean([t.later_tokens for t in valid]),
            "turns/tool_s": statistics.fmean([t.tool_s for t in valid]),
        }
    if has_tools:
        numbers |= {
            "turns/tool_calls": statistics.fmean([t.tool_calls for t in valid]),
            "turns/tool_errors": statistics.fmean([t.tool_errors for t in valid]),
        }
    numbers |= _trained_metrics(prepared.trained, prepared.version)
    for name in sorted(set(tasks) - {""}):
        its = [task == name for task in tasks]
        numbers |= {
            f"task/accuracy/{name}": statistics.fmean(chain.from_iterable(compress(right, its))),
            f"task/reward/{name}": statistics.fmean(chain.from_iterable(compress(scored, its))),
            f"task/groups_share/{name}": statistics.fmean(its),
        }
    for name in sorted({name for t in valid for name in t.reward_components}):
        parts = [t.reward_components[name] for t in valid if name in t.reward_components]
        numbers[f"reward/component/{name}"] = statistics.fmean(parts)
    if prepared.proximal_s:
        numbers["time/proximal_s"] = prepared.proximal_s
    if prepared.split_s:
        numbers["time/split_s"] = prepared.split_s
    return numbers


def mixture_metrics(tasks: Mixture) -> dict[str, float]:
    """Of each of several tasks, what share of the prompts it is given, and how often its questions were asked."""
    if len(tasks.tasks) == 1:
        return {}
    shares = {f"task/prompts_share/{name}": share for name, share in tasks.shares().items()}
    return shares | {f"task/epochs/{name}": passes for name, passes in tasks.passes().items()}


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation of all there is (divisor n). statistics.pstdev computes with fractions, in five times the time."""
    mean = statistics.fmean(values)
    return math.sqrt(statistics.fmean([(value - mean) ** 2 for value in values]))


def _trained_metrics(trained: Sequence[AnswerFacts], version: int) -> dict[str, float]:
    """Lengths and staleness. Args: version: the learner's."""
    if not trained:
        return {}
    ages, by_age = _token_ages(trained, version), Counter[int]()
    for age, n in ages.items():
        by_age[min(age, _OLDEST)] += n
    told = staleness_numbers(ages, sequences=len(trained), mixed=sum(t.is_mixed for t in trained))
    return {
        "length/trained_tokens": statistics.fmean([t.response_tokens for t in trained]),
        **_placed("staleness/", told, STALENESS_PLACES),
        **{f"staleness/tokens/{age}{'+' if age == _OLDEST else ''}": float(n) for age, n in sorted(by_age.items())},
    }


def _token_ages(trajectories: Sequence[AnswerFacts], version: int) -> Counter[int]:
    """Response tokens by staleness at `version`."""
    ages: Counter[int] = Counter()
    for trajectory in trajectories:
        for span in trajectory.version_spans:
            ages[version - span.version] += span.end - span.start
    return ages


def learner_metrics(result: StepResult) -> dict[str, float | None]:
    """Loss, gradient and entropy of the step."""
    return {
        "learner/loss": result.loss,
        "learner/grad_norm": result.grad_norm,
        **{f"learner/group_grad_norm/{group}": norm for group, norm in result.group_norms.items()},
        "learner/learning_rate": result.learning_rate,
        "learner/loss_scale": result.loss_scale,
        "learner/entropy": result.entropy,
        "learner/routing_agreement_share": result.routing_agreement,
        "learner/optimizer_steps": result.optimizer_steps,
        **{SKIPPED + reason: result.skipped.count(reason) for reason in SkipReason},
        "learner/microbatches": result.microbatches,
        **objective_metrics(result),
    }


def objective_metrics(result: StepResult) -> dict[str, float]:
    """The objective's own numbers."""
    return _placed("loss/", result.metrics, LOSS_PLACES)


def undiagnosed(result: StepResult) -> dict[str, float]:
    """Numbers of a step's tokens that the learner itself has, for a step that the correction service doesn't diagnose. Empty without
    tokens."""
    if not result.trained_tokens:
        return {}
    told = kept_numbers(tokens=result.trained_tokens, kept=result.kept_tokens, broken=result.broken_tokens)
    return diagnostic_metrics(told)


def learner_share(phases: Mapping[str, float], tokens: int, seconds: float) -> dict[str, float | None]:
    """The learner's part of a step.

    Args:
        phases: seconds, by the names that the controller gives its Stopwatch.
        tokens: of the batch.
        seconds: of the step.
    """
    train_s, wait_s = phases.get("train", 0.0), phases.get("wait_learner", 0.0)
    return {
        "time/train_s": train_s,
        "wait/learner_s": wait_s,
        "wait/learner_share": min(1.0, wait_s / seconds) if seconds > 0 else None,
        "throughput/learner_tokens_per_s": tokens / train_s if train_s > 0 else None,
    }


def diagnostic_metrics(diagnostics: Mapping[str, float]) -> dict[str, float]:
    """The correction's numbers by name of the catalogue."""
    return _placed("correction/", diagnostics, DIAGNOSTIC_PLACES)


def _placed(group: str, numbers: Mapping[str, float], places: Mapping[str, str | None]) -> dict[str, float]:
    """Numbers by name of the catalogue: each in its own place, or in the group."""
    named = ((places.get(name, group + name), value) for name, value in numbers.items())
    return {name: value for name, value in named if name is not None}


def sync_metrics(receipts: Sequence[SyncReceipt], differences: Sequence[float]) -> dict[str, float]:
    """The receipts, and the probes' differences, that came since the last step."""
    numbers = {"sync/probe_max_abs_difference": max(differences)} if differences else {}
    if receipts:
        numbers |= {
            "sync/receipts": len(receipts),
            "sync/bytes": sum(r.bytes for r in receipts),
            "time/sync_s": max(r.seconds for r in receipts),
            "time/pause_s": max(r.pause_s for r in receipts),
        }
    return numbers


def worker_metrics(finished: Mapping[str, Sequence[GroupFacts]], versions: Mapping[str, int]) -> dict[str, float]:
    """What each worker finished since the last step, and the version of its weights at the end.

    Args:
        finished: the groups of each worker.
        versions: of the workers that have joined; -1 for one that holds none.
    """
    numbers: dict[str, float] = {f"worker/weight_version/{name}": version for name, version in versions.items() if version >= 0}
    for name in [*versions, *(name for name in finished if name not in versions)]:
        groups = finished.get(name, ())
        numbers |= {f"worker/tokens/{name}": sum(group.response_tokens for group in groups), f"worker/groups/{name}": len(groups)}
    return numbers


def rollout_metrics(
    finished: Mapping[str, Sequence[GroupFacts]],
    loads: Mapping[str, WorkerLoad],
    before: Mapping[str, WorkerLoad] | None,
    seconds: float,
    *,
    by_turn: bool = False,
) -> dict[str, float]:
    """Throughput and waiting of the rollout side, each worker over the time between its last two answers.

    Args:
        finished: the groups of each worker since the last step.
        loads: of the workers that answered now. One that has joined since counts from its start; one that has left, no more.
        before: each worker's last answer before; None: there is nothing to compare with yet.
        seconds: of the step, of which `wait/rollout_s` is the workers' share; throughput and shares are by their own time.
        by_turn: advantages are.
    """
    numbers: dict[str, float] = {"rollout/requests_in_flight": sum(load.requests_in_flight for load in loads.values())}
    if loads:
        numbers["time/rollout_late_s"] = max(load.late_s for load in loads.values())
    lengths = [answer.response_tokens for groups in finished.values() for group in groups for answer in group.trajectories]
    if lengths:
        numbers["length/sampled_tokens"] = statistics.fmean(lengths)
    if scored := [group for groups in finished.values() for group in groups if group.is_trainable]:
        numbers["groups/no_gradient_share"] = sum(group.is_uniform(by_turn=by_turn) for group in scored) / len(scored)
    if before is not None:
        since = {name: load.since(before.get(name)) for name, load in loads.items()}
        # By each worker's own time: the loads of a step come at other moments than its end.
        numbers["throughput/rollout_tokens_per_s"] = sum(part.generated_tokens / part.up_s for part in since.values() if part.up_s > 0)
        numbers |= {f"worker/wait_share/{name}": workers_wait([part]) for name, part in since.items() if part.up_s > 0}
        if any(part.up_s > 0 for part in since.values()):
            share = workers_wait(since.values())
            numbers["wait/rollout_share"] = share
            numbers["wait/rollout_s"] = share * seconds
    return numbers


def first_lengths(groups: Sequence[GroupFacts]) -> list[int]:
    """Response tokens of one answer per group. One is enough: answers to one prompt have similar lengths."""
    return [group.example.response_tokens for group in groups]


def trajectories_text(groups: Sequence[GroupFacts], examples: Sequence[Example], *, step: int) -> str:
    """One trajectory of each of the first groups, as a person reads it. Args: examples: those of these groups."""
    lines = [f"step {step}"]
    for group, example in zip(groups, examples, strict=False):
        trajectory = group.example
        spans = ", ".join(f"v{s.version}: {s.start}-{s.end}" for s in trajectory.version_spans)
        lines += [
            "",
            f"prompt {group.prompt_id}, group {group.group_id}, rewards {[t.reward for t in group.trajectories]}",
            f"  question: {example.prompt.text}",
            f"  answer:   {example.prompt.answer}",
            f"  sampled:  {example.text!r}  ({trajectory.finish_reason}, {trajectory.response_tokens} tokens, {spans})",
            f"  reward:   {trajectory.error or trajectory.reward}",
        ]
    return "\n".join(lines) + "\n"
