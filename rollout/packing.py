"""Groups of scored trajectories become one packed batch, with advantages.

What trains: the valid trajectories (scored, complete) of groups that have at least two of them. A failed trajectory is in neither
baseline nor loss. Versions, logprobs and rewards are taken as they come; nothing is corrected here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.batch import NO_VERSION, PackedBatch
from evenkeel.correction.errors import DataError
from evenkeel.correction.wide import WideFields, WidePlace
from evenkeel.rollout.config import MaskOverlong, OverlongConfig, PenaliseOverlong
from evenkeel.rollout.prompt_place import task_of
from evenkeel.rollout.trajectory import AnswerPlace, FinishReason, Group, Trajectory
from evenkeel.rollout.wide_fields import fields_of, tensor_of

Advantage = Callable[[Tensor, Tensor], Tensor]
"""(rewards [R] float32, group_ids [R] int64) -> advantages [R], of R rollouts."""
TurnAdvantage = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rewards [U] float32, rollout_ids [U], group_ids [U] int64) -> advantages [U], of U turns; those of a rollout lie together, in order."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Groups as a batch."""

    batch: PackedBatch
    """Possibly of no sequence at all. It has rollout_ids if a rollout has several sequences."""
    places: tuple[AnswerPlace, ...]
    """[S] whose tokens each sequence has, among the groups packed. What has no place is not trained: it failed, or was left out as
    overlong."""


def pack_groups(
    groups: Sequence[Group],
    *,
    learner_version: int,
    advantage: Advantage,
    overlong: OverlongConfig,
    max_tokens: Mapping[str, int],
    temperature: float = 1.0,
    wide_of: Mapping[int, Any] | None = None,
    turn_advantage: TurnAdvantage | None = None,
) -> Packed:
    """One batch of all trainable groups, in the order given.

    Rewards for the advantages are the raw ones, less an overlong penalty. A masked overlong trajectory is in the baseline and not in
    the batch. Tokens that were read have loss_mask False, version -1 and logprobs 0; the advantage stands at every token of its rollout,
    which is one in the baseline, however many sequences it has; by turn, at every token of the turn and at what was read before it. There
    are turn_ids if a trajectory has several turns.
    Args:
        learner_version: of the weights from which the update starts.
        advantage: (rewards [R], group_ids [R]) -> [R], for R rollouts.
        overlong: train, mask or penalise what was cut.
        max_tokens: of each task's sampling, by its name; the end of a penalty's ramp.
        turn_advantage: in place of `advantage`, for advantages by turn. A penalty is the last turn's, and so is a reward that is known of
            the whole alone.
        wide_of: where groups are without their wide fields: by group id, what holds or refers to those of all trajectories of a group.
    Raises: DataError for a trajectory whose logprobs or versions don't fit its tokens, or an unsuitable advantage.
    """
    trainable = [(g, group.trajectories) for g, group in enumerate(groups) if group.is_trainable]
    places = [AnswerPlace(g, i) for g, answers in trainable for i, one in enumerate(answers) if one.is_valid]
    scored = [(groups[place.group], groups[place.group].trajectories[place.answer]) for place in places]
    penalties = [overlong_penalty(one, overlong, max_tokens[task_of(group.prompt_id)]) for group, one in scored]
    if turn_advantage is None:
        advantages = [[value] for value in _advantages(scored, penalties, advantage).tolist()]
    else:
        advantages = _by_turn(scored, penalties, turn_advantage)
    kept = [
        (row, number, sequence)
        for row, (_, trajectory) in enumerate(scored)
        if not is_left_out(trajectory, overlong)
        for number, sequence in enumerate(trajectory.sequences)
        if sequence.response_ids
    ]
    rows = [row for row, _, _ in kept]
    pairs = [(scored[row][0], sequence) for row, _, sequence in kept]
    values = [advantages[row][_turns_before(scored[row][1], number) if len(advantages[row]) > 1 else 0 :] for row, number, _ in kept]
    batch = _pack(pairs, values, learner_version, temperature)
    if len(set(rows)) < len(rows):
        batch = replace(batch, rollout_ids=torch.tensor(rows))
    if wide_of:
        batch = replace(batch, wide=_wide_places(pairs, wide_of))
    return Packed(batch, tuple(replace(places[row], sequence=number) for row, number, _ in kept))


def is_left_out(trajectory: Trajectory, overlong: OverlongConfig) -> bool:
    """Whether a scored answer counts in its group's baseline only, and is not trained."""
    return isinstance(overlong, MaskOverlong) and _is_overlong(trajectory)


def overlong_penalty(trajectory: Trajectory, overlong: OverlongConfig, max_tokens: int) -> float:
    """What to take off a trajectory's reward for its length, >= 0.

    With L tokens after the prompt and a ramp of R: penalty * clip((L - (max_tokens - R)) / R, 0, 1); a cut answer pays all of it. L is
    that of the longest sequence: each may have max_tokens, and the model's last words may stand in a short one.
    Source: Yu et al. (2025), DAPO, equation 13 (there the penalty is 1).
    """
    if not isinstance(overlong, PenaliseOverlong):
        return 0.0
    if _is_overlong(trajectory):
        return overlong.penalty
    if overlong.ramp_tokens == 0:
        return 0.0
    longest = max(len(one.answer_ids) for one in trajectory.sequences)
    into_ramp = longest - (max_tokens - overlong.ramp_tokens)
    return overlong.penalty * min(max(into_ramp / overlong.ramp_tokens, 0.0), 1.0)


def _is_overlong(trajectory: Trajectory) -> bool:
    return trajectory.finish_reason is FinishReason.LENGTH


def _advantages(scored: Sequence[tuple[Group, Trajectory]], penalties: Sequence[float], advantage: Advantage) -> Tensor:
    """[R] float32."""
    pairs = zip(scored, penalties, strict=True)
    return _checked([(group, float(trajectory.reward or 0.0) - penalty) for (group, trajectory), penalty in pairs], advantage)


def _checked(rewarded: Sequence[tuple[Group, float]], advantage: Advantage) -> Tensor:
    """[U] float32, of rollouts or turns. Args: rewarded: each one's group and reward. Raises: DataError."""
    rewards = [reward for _, reward in rewarded]
    if not rewards:
        return torch.zeros(0)
    group_ids = torch.tensor([group.group_id for group, _ in rewarded], dtype=torch.int64)
    values = advantage(torch.tensor(rewards, dtype=torch.float32), group_ids)
    if values.shape != (len(rewards),) or not bool(torch.isfinite(values).all()):
        raise DataError(
            f"the advantage estimator returned shape {tuple(values.shape)} for {len(rewards)} rewards, or values that are not finite"
        )
    return values.to(torch.float32)


def _by_turn(scored: Sequence[tuple[Group, Trajectory]], penalties: Sequence[float], advantage: TurnAdvantage) -> list[list[float]]:
    """Of each rollout, one for each of its turns; one for all of them, where its reward is known of the whole alone."""
    worth = [list(one.turn_rewards) or [float(one.reward or 0.0)] for _, one in scored]
    for of_rollout, penalty in zip(worth, penalties, strict=True):
        of_rollout[-1] -= penalty
    rows = [row for row, of_rollout in enumerate(worth) for _ in of_rollout]

    def of_turns(rewards: Tensor, group_ids: Tensor) -> Tensor:
        return advantage(rewards, torch.tensor(rows), group_ids)

    turns = [(scored[row][0], reward) for row, of_rollout in enumerate(worth) for reward in of_rollout]
    values = iter(_checked(turns, of_turns).tolist())
    return [[next(values) for _ in of_rollout] for of_rollout in worth]


def _turns_before(rollout: Trajectory, number: int) -> int:
    """Turns of a rollout's sequences before this one."""
    return sum(1 + len(one.later) for one in rollout.sequences[:number])


def _pack(
    kept: Sequence[tuple[Group, Trajectory]], advantages: Sequence[Sequence[float]], learner_version: int, temperature: float
) -> PackedBatch:
    """Args: advantages: of each sequence, one for all of its tokens, or for each of its turns."""
    lengths_S = torch.tensor([one.tokens_before(len(one.response_ids)) for _, one in kept], dtype=torch.int64)
    token_ids = torch.empty(int(lengths_S.sum()), dtype=torch.int64)
    mask = torch.zeros(len(token_ids), dtype=torch.bool)
    logprobs = torch.zeros(len(token_ids), dtype=torch.float32)
    versions = torch.full((len(token_ids),), NO_VERSION, dtype=torch.int32)
    turns = torch.zeros(len(token_ids), dtype=torch.int32) if any(one.later for _, one in kept) else None
    advantages_N = torch.zeros(len(token_ids), dtype=torch.float32)
    start = 0
    for (_, trajectory), of_turns in zip(kept, advantages, strict=True):
        _check_lengths(trajectory)
        of_response = _versions(trajectory, learner_version)
        for segment in trajectory.segments:
            place = slice(start, start + len(segment.ids))
            token_ids[place] = tensor_of(segment.ids)
            advantages_N[place] = of_turns[min(segment.turn, len(of_turns) - 1)]
            if turns is not None:
                turns[place] = segment.turn
            if segment.sampled is not None:
                mask[place] = True
                logprobs[place] = tensor_of(trajectory.behavior_logprobs[segment.sampled])
                versions[place] = of_response[segment.sampled]
            start = place.stop
    found = [fields_of(trajectory) for _, trajectory in kept]
    batch = PackedBatch(
        token_ids=token_ids,
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths_S.cumsum(0)]),
        loss_mask=mask,
        behavior_logprobs=logprobs,
        advantages=advantages_N,
        weight_versions=versions,
        group_ids=torch.tensor([group.group_id for group, _ in kept], dtype=torch.int64),
        learner_version=learner_version,
        temperature=temperature,
        turn_ids=turns,
        advantages_by="own",  # the caller's, which makes them by the run's settings
        wide=tuple(WidePlace((((one or WideFields(),), 0),)) for one in found) if any(found) else None,
    )
    return batch.with_wide_fields().validate()


def _versions(trajectory: Trajectory, learner_version: int) -> Tensor:
    """[T] int32 version of each response token. Raises: DataError for one that the learner doesn't have yet."""
    found = torch.empty(len(trajectory.response_ids), dtype=torch.int32)
    for span in trajectory.version_spans:
        if span.version > learner_version:
            raise DataError(f"{trajectory.prompt_id}: sampled at version {span.version}, but the learner is at {learner_version}")
        found[span.start : span.end] = span.version
    return found


def _wide_places(kept: Sequence[tuple[Group, Trajectory]], wide_of: Mapping[int, Any]) -> tuple[WidePlace, ...]:
    """The place of each sequence's wide fields. Raises: DataError if a group's wide fields are nowhere."""
    if missing := [group.group_id for group, _ in kept if group.group_id not in wide_of]:
        raise DataError(f"group {missing[0]} has no wide fields (top-K logprobs, kept sets, routed experts), and others of its batch have")
    numbers = {group.group_id: {id(one): i for i, one in enumerate(group.sequences)} for group, _ in kept}
    return tuple(WidePlace(((wide_of[group.group_id], numbers[group.group_id][id(one)]),), one.route_keys) for group, one in kept)


def _check_lengths(trajectory: Trajectory) -> None:
    """Raises: DataError if a response token has no logprob; if the spans leave a gap, overlap, or end elsewhere than the response; or if a
    turn has no tokens."""
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
    turns = [0, *(one.after for one in trajectory.later), response]
    if trajectory.later and not all(before < after for before, after in pairwise(turns)):
        raise DataError(f"{trajectory.prompt_id}: turns begin at {turns[:-1]} of its {response} response tokens, and each has at least one")
