"""One sampled sequence, read from SGLang's answer and checked."""

from __future__ import annotations

import base64
import math
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from correction.errors import EngineError
from rollout.trajectory import FinishReason, RoutedExperts, TopLogprobs, VersionSpan


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A model's mixture of experts."""

    layers: int
    experts: int
    k: int
    """Experts that a token is sent to."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled for one request."""

    token_ids: tuple[int, ...]
    """The stop token included when there is one."""
    logprobs: tuple[float, ...]
    """log_softmax(logits / temperature) of each token, natural log."""
    version_spans: tuple[VersionSpan, ...]
    """In order, without gaps, over all tokens."""
    finish_reason: FinishReason
    cached_tokens: int
    """Prompt tokens whose keys and values were already there."""
    retractions: int
    """Times that its KV cache was dropped and computed again: by weight updates, or for want of memory."""
    top_logprobs: TopLogprobs | None = None
    """Of the most likely tokens, where they were asked for."""
    routed_experts: RoutedExperts | None = None
    """Of all tokens but the last, the prompt's included, where they were asked for."""

    @classmethod
    def from_sglang(cls, answer: dict[str, Any], engine_name: str, topk: int = 0, experts: ExpertShape | None = None) -> Completion:
        """
        Args:
            topk: most likely tokens that were asked for at each position.
            experts: of the model, if routes were asked for.
        Raises: EngineError if logprobs, version spans or routes do not cover the tokens one to one, or a logprob is not finite.
        """
        meta = answer["meta_info"]
        token_ids = tuple(answer["output_ids"])
        logprobs = tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ())
        if len(logprobs) != len(token_ids) or not all(math.isfinite(value) for value in logprobs):
            raise EngineError(
                f"{engine_name}: {len(token_ids)} tokens came with {len(logprobs)} logprobs, or one is not finite: the weights hold a NaN, "
                "or SGLang's answer has another form than in 0.5.21"
            )
        spans = tuple(
            VersionSpan(int(span["version"]), span["start"], span["end"])
            for span in meta.get("weight_versions") or ()
            if span["end"] > span["start"]
        )
        bounds = [0, *(span.end for span in spans)]
        if bounds[-1] != len(token_ids) or [span.start for span in spans] != bounds[:-1]:
            raise EngineError(
                f"{engine_name}: version spans {spans} do not cover {len(token_ids)} tokens: "
                "SGLang's answer has another form than in 0.5.21"
            )
        reason = FinishReason((meta.get("finish_reason") or {"type": "abort"})["type"])
        wants_routes = experts is not None and reason is not FinishReason.ABORT  # an aborted request may not have been read at all
        return cls(
            token_ids=token_ids,
            logprobs=logprobs,
            version_spans=spans,
            finish_reason=reason,
            cached_tokens=int(meta.get("cached_tokens", 0)),
            retractions=int(meta.get("num_retractions", 0)),
            top_logprobs=_top_logprobs(meta, len(token_ids), topk, engine_name) if topk else None,
            routed_experts=_routed_experts(meta, len(token_ids), experts, engine_name) if experts and wants_routes else None,
        )


def _top_logprobs(meta: dict[str, Any], tokens: int, topk: int, engine_name: str) -> TopLogprobs:
    rows = meta.get("output_top_logprobs") or ()
    found = TopLogprobs.of(topk, ([(entry[0], entry[1]) for entry in row] for row in rows))
    if len(rows) != tokens or len(found.ids) != tokens * topk or not all(map(math.isfinite, found.logprobs)):
        raise EngineError(
            f"{engine_name}: {tokens} tokens came with {len(rows)} rows and {len(found.ids)} entries of the top {topk} logprobs, or one is "
            "not finite: the weights hold a NaN, or SGLang's answer has another form than in 0.5.21"
        )
    return found


def _routed_experts(meta: dict[str, Any], tokens: int, shape: ExpertShape, engine_name: str) -> RoutedExperts:
    """SGLang sends int32 [prompt + response - 1, layers, k], base64."""
    wide = np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), np.int32)
    expected = (int(meta["prompt_tokens"]) + tokens - 1) * shape.layers * shape.k
    if len(wide) != expected or wide.min() < 0 or wide.max() >= shape.experts:
        raise EngineError(
            f"{engine_name}: {meta['prompt_tokens']} + {tokens} tokens came with {len(wide)} routed experts instead of {expected}, or one "
            f"is not below {shape.experts}: the engine was started without rollout.engine.return_routed_experts, or SGLang's answer has "
            "another form than in 0.5.21"
        )
    code, narrow = ("B", np.uint8) if shape.experts <= 256 else ("h", np.int16)
    return RoutedExperts(shape.layers, shape.k, array(code, wide.astype(narrow).tobytes()))
