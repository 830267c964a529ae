"""What a request may ask: OpenAI's chat completions, and tokens for tokens. A parameter under which tokens would come from another
distribution than the run's is refused, unless it has the run's own value."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.door.conversation import Message, RefusedRequest, canonical

_DISTRIBUTION = "tokens would come from another distribution than the one that is trained"
_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"})
_OWN = ("model", "messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens", "max_completion_tokens", "logprobs")
_OWN_OF_TOKENS = ("model", "token_ids", "input_ids", "sampling_params", "stream", "rid", "request_id", "cache_salt", "priority")
_OF_ANSWER = (
    *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "no_stop_trim", "include_stop_str_in_output"),
    "routed_experts_prompt_start",  # of routes, which no answer has
)
# SGLang's own values for "the whole distribution", beside those of OpenAI.
_NEUTRAL: Mapping[str, tuple[Collection[Any], str]] = {
    "frequency_penalty": ((0,), _DISTRIBUTION),
    "presence_penalty": ((0,), _DISTRIBUTION),
    "repetition_penalty": ((1,), _DISTRIBUTION),
    "logit_bias": (({},), _DISTRIBUTION),
    "min_tokens": ((0,), "the end of a turn would be forbidden before, which the learner knows nothing of"),
    "min_new_tokens": ((0,), "the end of a turn would be forbidden before, which the learner knows nothing of"),
    "ignore_eos": ((False,), "the end of a turn would be forbidden, which the learner knows nothing of"),
    "n": ((1,), "a request gets one turn; further samples of a prompt are the run's samples_per_group"),
    "stop": (
        (
            [],
            "",
            [
                "",
            ],
        ),
        "a turn ends where the model ends it",
    ),
    "seed": ((), "the run gives each sample its own seed"),
    "response_format": (({"type": "text"},), "a grammar would forbid tokens, which the learner knows nothing of"),
    "parallel_tool_calls": ((True,), "a grammar would forbid tokens, which the learner knows nothing of"),
    "top_logprobs": ((0,), "the door reports the sampled token's own logprob"),
    "prompt_logprobs": ((0,), "the door reports the sampled tokens' logprobs"),
}
"""For each parameter the values that are accepted, beside none at all, and why no other is."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for a turn, in messages."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    has_calls: bool
    """Whether calls of tools are looked for in the turn."""
    max_tokens: int | None
    is_streamed: bool
    has_usage: bool
    """Whether a stream ends with the usage."""
    has_logprobs: bool


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request for a turn, in token ids."""

    ids: Sequence[int]
    max_tokens: int | None


def chat_request(body: Any, model: str, how: AnswerSampling) -> ChatRequest:
    """Args: model: the only one there is. how: the session's sampling. Raises: RefusedRequest."""
    fields = _fields(body, _OWN, model, how)
    messages, tools = fields.get("messages"), fields.get("tools", [])
    if not isinstance(messages, list) or not messages:
        raise RefusedRequest("messages: give a list of at least one message")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools):
        raise RefusedRequest("tools: give a list of functions, each {type: function, function: {name, ...}}")
    if (choice := fields.get("tool_choice", "auto")) not in ("auto", "none"):
        raise RefusedRequest(f"tool_choice = {choice!r}: a grammar would force a call, and {_DISTRIBUTION}; leave it out")
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise RefusedRequest("stream_options: give an object, e.g. {include_usage: true}")
    return ChatRequest(
        messages=[canonical(message, number) for number, message in enumerate(messages)],
        tools=tools,
        has_calls=choice == "auto",
        max_tokens=_count(fields, "max_completion_tokens", "max_tokens"),
        is_streamed=bool(fields.get("stream")),
        has_usage=bool(options.get("include_usage")),
        has_logprobs=bool(fields.get("logprobs")),
    )


def token_request(body: Any, model: str, how: AnswerSampling, ends: Collection[int]) -> TokenRequest:
    """Args: as chat_request. ends: tokens that end a turn. Raises: RefusedRequest."""
    if not isinstance(body, dict):
        raise RefusedRequest("the body is no JSON object")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise RefusedRequest("sampling_params: give an object")
    _fields(body, _OWN_OF_TOKENS, model, how)
    counts = ("max_tokens", "max_new_tokens")
    own = _fields(sampling, (*counts, "logprobs", "stop_token_ids", *_OF_ANSWER), model, how)
    if body.get("stream"):
        raise RefusedRequest("stream = true: tokens come as one answer; leave it out")
    stops = own.get("stop_token_ids") or []
    if not isinstance(stops, list) or not all(type(token) is int for token in stops):
        raise RefusedRequest("stop_token_ids: give a list of token ids")
    if others := set(stops) - set(ends):
        raise RefusedRequest(
            f"stop_token_ids has {min(others)}, which doesn't end a turn of the run; the run's own ends are {sorted(ends)}"
        )
    ids = body.get("token_ids", body.get("input_ids"))
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise RefusedRequest("token_ids (or input_ids): give a list of at least one token id")
    return TokenRequest(ids, _count(own, *counts))


def _fields(body: Any, own: Collection[str], model: str, how: AnswerSampling) -> Mapping[str, Any]:
    """What a request says, without what says nothing. Raises: RefusedRequest."""
    if not isinstance(body, dict):
        raise RefusedRequest("the body is no JSON object")
    found = {name: value for name, value in body.items() if value is not None}
    if found.get("model", model) != model:
        raise RefusedRequest(f"model = {found['model']!r}: this door has {model!r} alone", status=404, code="model_not_found")
    same: dict[str, Sequence[float]] = {"temperature": [how.temperature], "top_p": [how.top_p], "min_p": [how.min_p]}
    same["top_k"] = [-1, 0] if how.top_k is None else [how.top_k]
    for name, value in found.items():
        if name in own or name in _IGNORED:
            continue
        if name in same:
            if value not in same[name]:
                own_value = f"the run samples at {same[name][0]:g}"
                raise RefusedRequest(f"{name} = {value}: {own_value}, and {_DISTRIBUTION}; leave it out, or set it in the recipe")
        elif name in _NEUTRAL:
            accepted, why = _NEUTRAL[name]
            if value not in accepted:
                raise RefusedRequest(f"{name} = {value!r}: {why}; leave it out")
        else:
            near = difflib.get_close_matches(name[:100], [*own, *same, *_NEUTRAL, *_IGNORED], n=1)
            raise RefusedRequest(f"{name} is nothing that the door knows" + (f"; did you mean {near[0]}?" if near else "; leave it out"))
    return found


def _count(fields: Mapping[str, Any], *names: str) -> int | None:
    """Raises: RefusedRequest."""
    for name in names:
        if (count := fields.get(name)) is not None:
            if type(count) is not int or count < 1:
                raise RefusedRequest(f"{name} = {count!r}: give a whole number of tokens, at least 1")
            return count
    return None
