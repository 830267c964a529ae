"""Answers that one engine begins and another goes on with: what a rollout worker that leaves hands back, and how it is taken up.

The engine that takes an answer up reads prompt and tokens, as an engine does after a weight update, and samples on from there. Each token
keeps its version and its behaviour logprob, so the whole is a trajectory like any that new weights found under way. The seeds go by the
position of a token; but to sample the very tokens that the first engine would have sampled, the second needs the same logits to the last
bit: that is so under true on-policy at the same weights, and there only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from evenkeel.rollout.trajectory import FailureKind, FinishReason, TopLogprobs, Trajectory, VersionSpan, ids_of, logprobs_of


def is_begun(answer: Trajectory) -> bool:
    """Whether the answer stops where its engine gave it up, and can be continued."""
    return answer.finish_reason is FinishReason.ABORT


def unanswered(answer: Trajectory, why: str = "the engine aborted the request") -> Trajectory:
    """The answer as one that its engine didn't complete: it is neither scored nor trained. Args: why: for people."""
    return replace(answer, reward=None, error=why, failure=FailureKind.ENGINE)


def unsampled(prompt_ids: Sequence[int], prompt_id: str) -> Trajectory:
    """An answer without a token so far."""
    return unanswered(Trajectory(prompt_id, ids_of(prompt_ids), ids_of(()), logprobs_of(()), (), FinishReason.ABORT))


def kept(answer: Trajectory, longest: int) -> Trajectory:
    """The part of an answer under way that is kept: all but its last token, which is sampled again.

    An aborted answer doesn't say whether it ended at that token. The token is dropped whichever it is, so nothing is biased.
    Args:
        longest: tokens of prompt and response that an engine can be given to go on from.
    """
    tokens = max(0, min(len(answer.response_ids) - 1, longest - len(answer.prompt_ids)))
    top = answer.top_logprobs
    return replace(
        answer,
        response_ids=answer.response_ids[:tokens],
        behavior_logprobs=answer.behavior_logprobs[:tokens],
        version_spans=tuple(VersionSpan(s.version, s.start, min(s.end, tokens)) for s in answer.version_spans if s.start < tokens),
        top_logprobs=TopLogprobs(top.k, top.ids[: tokens * top.k], top.logprobs[: tokens * top.k]) if top is not None else None,
        routed_experts=None,
    )


def continued(begun: Trajectory, rest: Trajectory) -> Trajectory:
    """Both parts as one answer.

    Args:
        rest: sampled with begun's prompt and response as its prompt. Its routed experts, if any, are those of all tokens, read anew.
    """
    spans = [*begun.version_spans, *(_shifted(span, len(begun.response_ids)) for span in rest.version_spans)]
    top = rest.top_logprobs
    if top is not None and begun.top_logprobs is not None:
        top = TopLogprobs(top.k, begun.top_logprobs.ids + top.ids, begun.top_logprobs.logprobs + top.logprobs)
    return replace(
        rest,
        prompt_ids=begun.prompt_ids,
        response_ids=begun.response_ids + rest.response_ids,
        behavior_logprobs=begun.behavior_logprobs + rest.behavior_logprobs,
        version_spans=_without_seams(spans),
        cached_tokens=begun.cached_tokens,
        retractions=begun.retractions + rest.retractions + (1 if begun.response_ids else 0),
        top_logprobs=top,
    )


def _shifted(span: VersionSpan, by: int) -> VersionSpan:
    return VersionSpan(span.version, span.start + by, span.end + by)


def _without_seams(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version become one span."""
    runs = [list(of_one) for _, of_one in groupby(spans, key=lambda span: span.version)]
    return tuple(VersionSpan(run[0].version, run[0].start, run[-1].end) for run in runs)
