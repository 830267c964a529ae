"""What stands beside the tokens that are kept of a step, and those that are kept of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evenkeel.actors.carriers import MOST_TOKENS, ShownAnswer, TokenSample
from evenkeel.actors.metrics.held_out import Evaluation
from evenkeel.rollout.trajectory import AnswerPlace, FinishReason, GroupFacts, Prompt

MOST_HELD_OUT = 128
"""Sequences of an evaluation's answers that are kept token by token, as far as MOST_TOKENS go."""


def group_rows(groups: Sequence[GroupFacts]) -> list[dict[str, Any]]:
    """What a sample of tokens says of all groups of its batch, as JSON has it; lists have an entry for each answer."""
    return [
        {
            "group": group.group_id,
            "prompt_id": group.prompt_id,
            "rewards": [one.reward for one in group.trajectories],
            "tokens": [one.response_tokens for one in group.trajectories],
            "cut": sum(one.finish_reason is FinishReason.LENGTH for one in group.trajectories),
            "failed": sum(one.error is not None for one in group.trajectories),
            "admitted_version": group.admitted_version,
            "generate_s": round(group.generate_s, 3),
            "reward_s": round(group.reward_s, 3),
        }
        for group in groups
    ]


def held_out_tokens(result: Evaluation, prompts: Sequence[Prompt]) -> TokenSample:
    """The first answers of an evaluation, token by token; a very long one ends early, and is alone. Args: prompts: the questions, in the
    evaluation's order."""
    pairs = [
        (prompt, trajectory, AnswerPlace(question, answer, number))
        for question, (prompt, answers) in enumerate(zip(prompts, result.answers, strict=True))
        for answer, trajectory in enumerate(answers)
        for number in range(trajectory.sequence_count)
    ][:MOST_HELD_OUT]
    ids, turns, versions, sampled, behavior, offsets = [], [], [], [], [], [0]
    answers = list[ShownAnswer]()
    for prompt, trajectory, place in pairs:
        sequence = trajectory.sequences[place.sequence]
        if answers and offsets[-1] + sum(len(segment.ids) for segment in sequence.segments) > MOST_TOKENS:
            break
        of_token = np.full(len(sequence.response_ids), -1, dtype=np.int32)
        for span in sequence.version_spans:
            of_token[span.start : span.end] = span.version
        logprobs = np.array(sequence.behavior_logprobs, dtype=np.float32)
        for segment in sequence.segments:
            count, own = len(segment.ids), segment.sampled
            ids.append(np.array(segment.ids, dtype=np.int32))
            turns.append(np.full(count, segment.turn, dtype=np.int32))
            sampled.append(np.full(count, own is not None))
            versions.append(np.full(count, -1, dtype=np.int32) if own is None else of_token[own])
            behavior.append(np.full(count, np.nan, dtype=np.float32) if own is None else logprobs[own])
        whole_tokens = sum(map(len, ids))
        offsets.append(min(whole_tokens, MOST_TOKENS))
        expected = prompt.answer if isinstance(prompt.answer, str) else " | ".join(prompt.answer)
        told = ShownAnswer(
            group=place.group,
            answer=place.answer,
            prompt_id=prompt.prompt_id,
            question=prompt.text,
            expected=expected,
            reward=trajectory.reward,
            reward_components=trajectory.reward_components,
            finish_reason=trajectory.finish_reason.value,
            error=trajectory.error,
            left_out_tokens=whole_tokens - offsets[-1],
            sequence=place.sequence,
        )
        answers.append(told)
    columns = {"token_ids": ids, "turns": turns, "versions": versions, "sampled": sampled, "behavior": behavior}
    kept = {name: np.concatenate(found)[: offsets[-1]] if found else np.zeros(0, dtype=np.int32) for name, found in columns.items()}
    newest = int(kept["versions"].max(initial=-1))
    return TokenSample(newest, tuple(answers), np.array(offsets), kept)
