"""A trajectory from SGLang's answer to one request, checked: an answer of another form than in the pinned version is refused.

For a long answer with wide fields this takes a good part of a second, so the engine does it in a thread.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64

from correction.errors import RequestError
from rollout.continuation import unanswered
from rollout.trajectory import (
    FinishReason,
    RoutedExperts,
    TopLogprobs,
    Trajectory,
    VersionSpan,
    ids_of,
    logprobs_of,
)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A model's mixture of experts."""

    layers: int
    """Those that have experts."""
    experts: int
    """In each of these layers."""
    k: int
    """Experts that a token is sent to."""


def trajectory_of(
    answer: dict[str, Any],
    prompt_ids: Sequence[int],
    engine_name: str,
    *,
    prompt_id: str = "",
    topk: int = 0,
    experts: ExpertShape | None = None,
) -> Trajectory:
    """The engine's answer to one request: without text and reward, and with an error if it was aborted.

    Args:
        topk: most likely tokens that were asked for at each position.
        experts: of the model, if routes were asked for.
    Raises: RequestError if logprobs, version spans or routes do not cover the tokens one to one, or a logprob is not finite.
    """
    meta = answer["meta_info"]
    response_ids = ids_of(answer["output_ids"])
    logprobs = logprobs_of(float(entry[0]) for entry in meta.get("output_token_logprobs") or ())
    if len(logprobs) != len(response_ids) or not all(math.isfinite(value) for value in logprobs):
        raise RequestError(
            f"{engine_name}: {len(response_ids)} tokens came with {len(logprobs)} logprobs, or one is not finite: the weights hold a "
            "NaN, or SGLang's answer has another form than in 0.5.21"
        )
    reason = FinishReason((meta.get("finish_reason") or {"type": "abort"})["type"])
    is_aborted = reason is FinishReason.ABORT
    wants_routes = experts is not None and not is_aborted      # an aborted request may not have been read at all
    found = Trajectory(
        prompt_id=prompt_id,
        prompt_ids=ids_of(prompt_ids),
        response_ids=response_ids,
        behavior_logprobs=logprobs,
        version_spans=_version_spans(meta, len(response_ids), engine_name),
        finish_reason=reason,
        cached_tokens=int(meta.get("cached_tokens", 0)),
        retractions=int(meta.get("num_retractions", 0)),
        top_logprobs=_top_logprobs(meta, len(response_ids), topk, engine_name) if topk else None,
        routed_experts=_routed_experts(meta, len(response_ids), experts, engine_name) if experts and wants_routes else None,
    )
    return unanswered(found) if is_aborted else found


def _version_spans(meta: dict[str, Any], tokens: int, engine_name: str) -> tuple[VersionSpan, ...]:
    spans = tuple(
        VersionSpan(int(span["version"]), span["start"], span["end"])
        for span in meta.get("weight_versions") or ()
        if span["end"] > span["start"]
    )
    bounds = [0, *(span.end for span in spans)]
    if bounds[-1] != tokens or [span.start for span in spans] != bounds[:-1]:
        raise RequestError(
            f"{engine_name}: version spans {spans} do not cover {tokens} tokens: SGLang's answer has another form than in 0.5.21"
        )
    return spans


def _top_logprobs(meta: dict[str, Any], tokens: int, topk: int, engine_name: str) -> TopLogprobs:
    rows = meta.get("output_top_logprobs") or ()
    found = TopLogprobs.of(topk, rows)
    if len(rows) != tokens or len(found.ids) != tokens * topk or not all(map(math.isfinite, found.logprobs)):
        raise RequestError(
            f"{engine_name}: {tokens} tokens came with {len(rows)} rows and {len(found.ids)} entries of the top {topk} logprobs, or one is "
            "not finite: the weights hold a NaN, or SGLang's answer has another form than in 0.5.21"
        )
    return found


def _routed_experts(meta: dict[str, Any], tokens: int, shape: ExpertShape, engine_name: str) -> RoutedExperts:
    """SGLang sends int32 [prompt + response - 1, layers, k], base64: tens of MB, over which Python's own decoder holds the interpreter."""
    wide = np.frombuffer(pybase64.b64decode(meta.get("routed_experts") or ""), np.int32)
    expected = (int(meta["prompt_tokens"]) + tokens - 1) * shape.layers * shape.k
    if len(wide) != expected or wide.min() < 0 or wide.max() >= shape.experts:
        raise RequestError(
            f"{engine_name}: {meta['prompt_tokens']} + {tokens} tokens came with {len(wide)} routed experts instead of {expected}, or one "
            f"is not below {shape.experts}: the engine was started without rollout.engine.return_routed_experts, or SGLang's answer has "
            "another form than in 0.5.21"
        )
    code, narrow = ("B", np.uint8) if shape.experts <= 256 else ("h", np.int16)
    return RoutedExperts(shape.layers, shape.k, array(code, wide.astype(narrow).tobytes()))
