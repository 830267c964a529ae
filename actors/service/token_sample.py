"""Some trajectories of a trained batch, token by token, for people: which ones, and what the correction and the loss made of each token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from evenkeel.actors.carriers import MOST_TOKENS, ShownAnswer, TokenSample
from evenkeel.correction.batch import CorrectedBatch, FinalDecision
from evenkeel.correction.diagnostics.diagnose import proximal_of
from evenkeel.correction.diagnostics.reasons import token_reasons
from evenkeel.learner.results import StepValues
from evenkeel.rollout.trajectory import AnswerPlace, Group


def chosen_sequences(places: Sequence[AnswerPlace], lengths: Sequence[int], *, groups: int, version: int) -> list[int]:
    """Places of the sequences that are kept: all of some groups drawn at random, as far as MOST_TOKENS go; always the same of a batch.

    Args:
        places, lengths: [S] of the batch.
        groups: how many are drawn.
        version: of the batch.
    """
    there = sorted({place.group for place in places})
    drawn = random.Random(version).sample(there, min(groups, len(there)))
    of_group: dict[int, list[int]] = {group: [] for group in drawn}
    for sequence, place in enumerate(places):
        if place.group in of_group:
            of_group[place.group].append(sequence)
    found, tokens = list[int](), 0
    for sequence in (one for group in drawn for one in of_group[group]):
        tokens += lengths[sequence]
        if found and tokens > MOST_TOKENS:
            break
        found.append(sequence)
    return sorted(found)


def shown_answer(group: Group, place: AnswerPlace, *, tokens: int) -> ShownAnswer:
    """What is told of an answer. Args: place: of its sequence. tokens: of the whole sequence."""
    expected, trajectory = group.prompt.answer, group.trajectories[place.answer]
    return ShownAnswer(
        group=group.group_id,
        answer=place.answer,
        prompt_id=group.prompt_id,
        question=group.prompt.text,
        expected=expected if isinstance(expected, str) else " | ".join(expected),
        reward=trajectory.reward,
        reward_components=trajectory.reward_components,
        finish_reason=trajectory.finish_reason.value,
        error=trajectory.error,
        left_out_tokens=max(0, tokens - MOST_TOKENS),
        sequence=place.sequence,
    )


def token_sample(
    corrected: CorrectedBatch,
    sequences: Sequence[int],
    answers: Sequence[ShownAnswer],
    values: StepValues,
    kept_counts: Tensor | None = None,
) -> TokenSample:
    """The sample, once the batch is trained.

    Args:
        corrected: the whole batch, N tokens.
        sequences: which of it are kept.
        answers: [s] of each of them.
        values: what the learner computed of the batch.
        kept_counts: [n] of the sequences' tokens, as PackedBatch's; None: not known.
    """
    part, index = corrected.select(sequences), corrected.batch.token_index(sequences)
    batch, decided = part.batch, _of(values.decided, index)
    target, mask = values.target_logprobs[index], batch.loss_mask
    proximal, known = proximal_of(batch, target, decided.before_update)
    reasons = token_reasons(part, target, decided)
    unknown = torch.full_like(target, torch.nan)

    def number(found: Tensor | None, where: Tensor = mask) -> Tensor:
        return unknown if found is None else torch.where(where, found, unknown)

    also = {} if kept_counts is None else {"kept_set": kept_counts.int()}
    if (then := batch.at_sampling_logprobs) is not None:  # where the learner has none of then, its present ones stand for them
        also["at_sampling"] = number(torch.where(then.isnan(), proximal, then))
    columns = {
        "token_ids": batch.token_ids.int(),
        "turns": torch.zeros_like(batch.weight_versions) if batch.turn_ids is None else batch.turn_ids.int(),
        "versions": batch.weight_versions,
        "sampled": mask,
        "behavior": number(batch.behavior_logprobs),
        "proximal": number(proximal, mask if known is None else mask & known),
        **also,
        "target": number(target),
        "entropy": number(values.entropies[index]),
        "advantage": number(batch.advantages),
        "importance_weight": number(decided.importance_weights),
        "coefficient": number(decided.coefficients),
        "kept": decided.keep_mask,
        "clipped": torch.zeros_like(mask) if decided.is_clipped is None else decided.is_clipped & decided.keep_mask,
        "is_cut": reasons.is_cut,
        "dropped_by": reasons.dropped_by,
    }
    # An answer that is very long ends early; only the first one can be.
    ends = batch.offsets.clone()
    ends[1:] -= max(0, int(ends[1]) - MOST_TOKENS) if len(sequences) == 1 else 0
    cut = {name: column[: int(ends[-1])].numpy() for name, column in columns.items()}
    settings = None if corrected.config is None else corrected.config.model_dump(mode="json")
    return TokenSample(batch.learner_version, tuple(answers), ends.numpy(), cut, reasons.labels, settings)


def _of(decided: FinalDecision, index: Tensor) -> FinalDecision:
    """The decision on some tokens."""
    rows = {name: getattr(decided, name) for name in ("coefficients", "is_clipped", "proximal_logprobs", "before_update")}
    return FinalDecision(
        decided.keep_mask[index],
        decided.importance_weights[index],
        decided.counts,
        **{name: None if row is None else row[index] for name, row in rows.items()},
    )
