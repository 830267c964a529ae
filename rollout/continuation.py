"""Answers that an engine goes on with: after more to read, for the next turn; or where another engine has begun them and was left.

The engine that takes an answer up reads all of its tokens, as an engine does after a weight update (from its prefix cache, what it has read
at these weights), and samples on from there. Each token keeps its version and its behaviour logprob, so the whole is a trajectory like any
that new weights found under way. The seeds go by the position of a token; but to sample the very tokens that the first engine would have
sampled, the second needs the same logits to the last bit: that is so under true on-policy at the same weights, and there only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from evenkeel.rollout.trajectory import (
    FailureKind,
    FinishReason,
    LaterReading,
    TopLogprobs,
    Trajectory,
    VersionSpan,
    ids_of,
    logprobs_of,
)


def is_begun(answer: Trajectory) -> bool:
    """Whether the answer stops in the middle of a turn, where its engine gave it up or before it began, and can be continued."""
    return answer.finish_reason is FinishReason.ABORT


def is_unfinished(one: Trajectory) -> bool:
    """Whether a rollout of several turns is owed something by its engine, its environment or its agent: another engine may go on from
    it."""
    return one.reward is None and one.failure in (None, FailureKind.ENGINE)


def unanswered(answer: Trajectory, why: str = "the engine aborted the request") -> Trajectory:
    """The answer as one that its engine didn't complete: it is neither scored nor trained. Args: why: for people."""
    return replace(answer, reward=None, error=why, failure=FailureKind.ENGINE)


def unsampled(prompt_ids: Sequence[int], prompt_id: str) -> Trajectory:
    """An answer without a token so far."""
    return unanswered(Trajectory(prompt_id, ids_of(prompt_ids), ids_of(()), logprobs_of(()), (), FinishReason.ABORT))


def with_more_to_read(answer: Trajectory, ids: Sequence[int]) -> Trajectory:
    """The answer with another turn to come. Args: ids: what the model reads first, at least one token."""
    if not answer.response_ids or (answer.later and answer.later[-1].after == len(answer.response_ids)):
        raise ValueError(f"{answer.prompt_id}: nothing was sampled since the last reading, so this would be a part of it")
    return unanswered(
        replace(answer, later=(*answer.later, LaterReading(len(answer.response_ids), ids_of(ids))), finish_reason=FinishReason.ABORT)
    )


def kept(answer: Trajectory, longest: int) -> Trajectory:
    """The part of an answer under way that is kept: all but the last token of its last turn, which is sampled again.

    An aborted turn doesn't say whether it ended at that token. The token is dropped whichever it is, so nothing is biased.
    Args:
        longest: tokens that an engine can be given to go on from.
    """
    began = answer.later[-1].after if answer.later else 0
    tokens = max(began, len(answer.response_ids) - 1)
    while tokens > 0 and answer.tokens_before(tokens) > longest:
        tokens -= 1
    return replace(_first_tokens(answer, tokens), later=tuple(one for one in answer.later if one.after <= tokens))


def of_first_turns(answer: Trajectory, turns: int) -> Trajectory:
    """The answer as it was before a later reading. Args: turns: that are kept, at least 1 and fewer than it has."""
    whole = _first_tokens(answer, answer.later[turns - 1].after)
    return replace(whole, later=answer.later[: turns - 1], finish_reason=FinishReason.STOP)


def _first_tokens(answer: Trajectory, tokens: int) -> Trajectory:
    """Args: tokens: of the response, that are kept."""
    top, sets = answer.top_logprobs, answer.kept_tokens
    return replace(
        answer,
        response_ids=answer.response_ids[:tokens],
        behavior_logprobs=answer.behavior_logprobs[:tokens],
        version_spans=tuple(VersionSpan(s.version, s.start, min(s.end, tokens)) for s in answer.version_spans if s.start < tokens),
        top_logprobs=TopLogprobs(top.k, top.ids[: tokens * top.k], top.logprobs[: tokens * top.k]) if top is not None else None,
        kept_tokens=sets.first(tokens) if sets is not None else None,
        routed_experts=None,
    )


def continued(begun: Trajectory, rest: Trajectory) -> Trajectory:
    """Both parts as one answer.

    Args:
        rest: sampled with all of begun's tokens as its prompt. Its routed experts, if any, are those of all tokens.
    """
    is_next_turn = bool(begun.later) and begun.later[-1].after == len(begun.response_ids)
    is_cached = is_next_turn and rest.cached_tokens > len(begun.prompt_ids)
    spans = [*begun.version_spans, *(_shifted(span, len(begun.response_ids)) for span in rest.version_spans)]
    top = rest.top_logprobs
    if top is not None and begun.top_logprobs is not None:
        top = TopLogprobs(top.k, begun.top_logprobs.ids + top.ids, begun.top_logprobs.logprobs + top.logprobs)
    sets = rest.kept_tokens
    if sets is not None and begun.kept_tokens is not None:
        sets = begun.kept_tokens + sets
    return replace(
        rest,
        prompt_ids=begun.prompt_ids,
        later=begun.later,
        response_ids=begun.response_ids + rest.response_ids,
        behavior_logprobs=begun.behavior_logprobs + rest.behavior_logprobs,
        version_spans=_without_seams(spans),
        cached_tokens=begun.cached_tokens,
        retractions=begun.retractions + rest.retractions + (1 if begun.response_ids and not is_cached else 0),
        top_logprobs=top,
        kept_tokens=sets,
    )


def _shifted(span: VersionSpan, by: int) -> VersionSpan:
    return VersionSpan(span.version, span.start + by, span.end + by)


def _without_seams(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version become one span."""
    runs = [list(of_one) for _, of_one in groupby(spans, key=lambda span: span.version)]
    return tuple(VersionSpan(run[0].version, run[0].start, run[-1].end) for run in runs)
