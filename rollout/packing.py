"""Groups of scored trajectories become one packed batch, with advantages.

What trains: the valid trajectories (scored, complete) of groups that have at least two of them. A failed trajectory is in neither
baseline nor loss. Versions, logprobs and rewards are taken as they come; nothing is corrected here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.batch import NO_VERSION, PackedBatch
from evenkeel.correction.errors import DataError
from evenkeel.correction.wide import WideFields, WidePlace
from evenkeel.rollout.config import MaskOverlong, OverlongConfig, PenaliseOverlong
from evenkeel.rollout.trajectory import AnswerPlace, FinishReason, Group, Trajectory
from evenkeel.rollout.wide_fields import fields_of, tensor_of

Advantage = Callable[[Tensor, Tensor], Tensor]
"""(rewards [S] float32, group_ids [S] int64) -> advantages [S]."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Groups as a batch."""

    batch: PackedBatch
    """Possibly of no sequence at all."""
    places: tuple[AnswerPlace, ...]
    """[S] whose tokens each sequence has, among the groups packed. What has no place is not trained: it failed, or was left out as
    overlong."""


def pack_groups(
    groups: Sequence[Group],
    *,
    learner_version: int,
    advantage: Advantage,
    overlong: OverlongConfig,
    max_tokens: int,
    temperature: float = 1.0,
    wide_of: Mapping[int, Any] | None = None,
) -> Packed:
    """One batch of all trainable groups, in the order given.

    Rewards for the advantages are the raw ones, less an overlong penalty. A masked overlong trajectory is in the baseline and not in
    the batch. Prompt tokens have loss_mask False, version -1 and logprobs 0; the advantage stands at every token of its sequence.
    Args:
        learner_version: of the weights from which the update starts.
        advantage: (rewards [S], group_ids [S]) -> [S].
        overlong: train, mask or penalise what was cut.
        max_tokens: of the sampling; the end of a penalty's ramp.
        wide_of: where groups are without their wide fields: by group id, what holds or refers to those of all trajectories of a group.
    Raises: DataError for a trajectory whose logprobs or versions don't fit its tokens, or an unsuitable advantage.
    """
    trainable = [(g, group.trajectories) for g, group in enumerate(groups) if group.is_trainable]
    places = [AnswerPlace(g, i) for g, answers in trainable for i, one in enumerate(answers) if one.is_valid]
    scored = [(groups[place.group], groups[place.group].trajectories[place.answer]) for place in places]
    penalties = [overlong_penalty(trajectory, overlong, max_tokens) for _, trajectory in scored]
    advantages = _advantages(scored, penalties, advantage)
    kept = [row for row, (_, trajectory) in enumerate(scored) if not is_left_out(trajectory, overlong)]
    pairs = [scored[row] for row in kept]
    batch = _pack(pairs, advantages[kept], learner_version, temperature)
    if wide_of:
        batch = replace(batch, wide=_wide_places(pairs, wide_of))
    return Packed(batch, tuple(places[row] for row in kept))


def is_left_out(trajectory: Trajectory, overlong: OverlongConfig) -> bool:
    """Whether a scored answer counts in its group's baseline only, and is not trained."""
    return isinstance(overlong, MaskOverlong) and _is_overlong(trajectory)


def overlong_penalty(trajectory: Trajectory, overlong: OverlongConfig, max_tokens: int) -> float:
    """What to take off a trajectory's reward for its length, >= 0.

    With L response tokens and a ramp of R: penalty * clip((L - (max_tokens - R)) / R, 0, 1); a cut answer pays all of it.
    Source: Yu et al. (2025), DAPO, equation 13 (there the penalty is 1).
    """
    if not isinstance(overlong, PenaliseOverlong):
        return 0.0
    if _is_overlong(trajectory):
        return overlong.penalty
    if overlong.ramp_tokens == 0:
        return 0.0
    into_ramp = len(trajectory.response_ids) - (max_tokens - overlong.ramp_tokens)
    return overlong.penalty * min(max(into_ramp / overlong.ramp_tokens, 0.0), 1.0)


def _is_overlong(trajectory: Trajectory) -> bool:
    return trajectory.finish_reason is FinishReason.LENGTH


def _advantages(scored: Sequence[tuple[Group, Trajectory]], penalties: Sequence[float], advantage: Advantage) -> Tensor:
    """[S] float32."""
    rewards = [float(trajectory.reward or 0.0) - penalty for (_, trajectory), penalty in zip(scored, penalties, strict=True)]
    if not rewards:
        return torch.zeros(0)
    group_ids = torch.tensor([group.group_id for group, _ in scored], dtype=torch.int64)
    values = advantage(torch.tensor(rewards, dtype=torch.float32), group_ids)
    if values.shape != (len(rewards),) or not bool(torch.isfinite(values).all()):
        raise DataError(
            f"the advantage estimator returned shape {tuple(values.shape)} for {len(rewards)} rewards, or values that are not finite"
        )
    return values.to(torch.float32)


def _pack(kept: Sequence[tuple[Group, Trajectory]], advantages: Tensor, learner_version: int, temperature: float) -> PackedBatch:
    lengths_S = torch.tensor([len(one.prompt_ids) + len(one.response_ids) for _, one in kept], dtype=torch.int64)
    token_ids = torch.empty(int(lengths_S.sum()), dtype=torch.int64)
    mask = torch.zeros(len(token_ids), dtype=torch.bool)
    logprobs = torch.zeros(len(token_ids), dtype=torch.float32)
    versions = torch.full((len(token_ids),), NO_VERSION, dtype=torch.int32)
    first = 0
    for _, trajectory in kept:
        _check_lengths(trajectory)
        start = first + len(trajectory.prompt_ids)
        stop = start + len(trajectory.response_ids)
        token_ids[first:start] = tensor_of(trajectory.prompt_ids)
        token_ids[start:stop] = tensor_of(trajectory.response_ids)
        mask[start:stop] = True
        logprobs[start:stop] = tensor_of(trajectory.behavior_logprobs)
        for span in trajectory.version_spans:
            if span.version > learner_version:
                raise DataError(f"{trajectory.prompt_id}: sampled at version {span.version}, but the learner is at {learner_version}")
            versions[start + span.start : start + span.end] = span.version
        first = stop
    found = [fields_of(trajectory) for _, trajectory in kept]
    batch = PackedBatch(
        token_ids=token_ids,
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths_S.cumsum(0)]),
        loss_mask=mask,
        behavior_logprobs=logprobs,
        advantages=advantages.repeat_interleave(lengths_S),
        weight_versions=versions,
        group_ids=torch.tensor([group.group_id for group, _ in kept], dtype=torch.int64),
        learner_version=learner_version,
        temperature=temperature,
        advantages_by="own",  # the caller's, which makes them by the run's settings
        wide=tuple(WidePlace((((one or WideFields(),), 0),)) for one in found) if any(found) else None,
    )
    return batch.with_wide_fields().validate()


def _wide_places(kept: Sequence[tuple[Group, Trajectory]], wide_of: Mapping[int, Any]) -> tuple[WidePlace, ...]:
    """The place of each trajectory's wide fields. Raises: DataError if a group's wide fields are nowhere."""
    if missing := [group.group_id for group, _ in kept if group.group_id not in wide_of]:
        raise DataError(f"group {missing[0]} has no wide fields (top-K logprobs, routed experts), and others of its batch have")
    numbers = {group.group_id: {id(one): i for i, one in enumerate(group.trajectories)} for group, _ in kept}
    return tuple(WidePlace(((wide_of[group.group_id], numbers[group.group_id][id(one)]),), one.route_keys) for group, one in kept)


def _check_lengths(trajectory: Trajectory) -> None:
    """Raises: DataError if a response token has no logprob, or the spans leave a gap, overlap, or end elsewhere than the response."""
    response = len(trajectory.response_ids)
    if len(trajectory.behavior_logprobs) != response:
        raise DataError(f"{trajectory.prompt_id}: {len(trajectory.behavior_logprobs)} logprobs for {response} response tokens")
    covered = 0
    for span in trajectory.version_spans:
        if span.start != covered or span.end < span.start:
            break
        covered = span.end
    if covered != response or (trajectory.version_spans and trajectory.version_spans[-1].end != covered):
        raise DataError(
            f"{trajectory.prompt_id}: version spans {[(s.start, s.end) for s in trajectory.version_spans]} "
            f"don't cover its {response} response tokens in order"
        )
