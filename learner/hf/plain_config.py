"""Whether a config.json can be trained, for most of those that can, without transformers: importing it, and torch with it, takes seconds.

If the answer here isn't yes, the caller asks transformers (check_trainable in folder.py), which alone says no, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from evenkeel.correction.errors import DataError
from evenkeel.learner.hf.families import family_of

_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "max_position_embeddings",
}
_OF_EXPERTS = {"moe_intermediate_size", "num_experts", "num_experts_per_tok"}
# By model_type: options that the file must have. For all others, transformers' defaults are values that the learner supports.
_SIZES_OF = {
    **dict.fromkeys(("qwen3", "qwen2", "llama", "olmo2"), _SIZES),
    "qwen3_moe": _SIZES | _OF_EXPERTS,
    "mistral": _SIZES | {"sliding_window"},
    "glm4": _SIZES | {"attention_bias", "head_dim"},
    "mixtral": _SIZES | {"num_local_experts", "num_experts_per_tok"},
    "olmoe": _SIZES | {"num_experts", "num_experts_per_tok"},
}


# Families whose head_dim, where the file has none, is a number of transformers'; of others it is hidden_size / num_attention_heads.
_OWN_HEAD_DIM = {"qwen3", "qwen3_moe"}


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_token(value: Any) -> bool:
    return value is None or type(value) is int


def _are_tokens(value: Any) -> bool:
    return _is_token(value) or (type(value) is list and all(type(one) is int for one in value))


def _is_share(value: Any) -> bool:
    return type(value) is float and 0.0 <= value <= 1.0


def _is_plain_rope(value: Any) -> bool:
    return value is None or (type(value) is dict and value.keys() <= {"rope_type", "rope_theta"} and _is_theta(value.get("rope_theta", 1)))


def _is_theta(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


# What an option's value has to be like; a file with any other option is none of these.
_FORMS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_SIZES | _OF_EXPERTS | {"num_local_experts", "head_dim"}, _is_size),
    **dict.fromkeys(("max_window_layers", "decoder_sparse_step", "pretraining_tp"), _is_size),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window", "tie_word_embeddings", "use_cache"), _is_bool),
    **dict.fromkeys(("norm_topk_prob", "output_router_logits"), _is_bool),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), _is_token),
    "eos_token_id": _are_tokens,
    **dict.fromkeys(("initializer_range", "rms_norm_eps", "attention_dropout"), _is_share),
    **dict.fromkeys(("router_aux_loss_coef", "router_jitter_noise", "partial_rotary_factor"), _is_share),
    "clip_qkv": lambda value: value is None,
    **dict.fromkeys(("model_type", "hidden_act", "transformers_version"), lambda value: type(value) is str),
    **dict.fromkeys(("dtype", "torch_dtype"), lambda value: value in ("float32", "bfloat16", "float16")),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _is_plain_rope),
    "rope_theta": _is_theta,
    "architectures": lambda value: type(value) is list and all(type(name) is str for name in value),
    "sliding_window": lambda value: value is None or _is_size(value),
    "mlp_only_layers": lambda value: value in (None, []),
    "layer_types": lambda value: type(value) is list,
}


def is_plainly_trainable(content: Mapping[str, Any]) -> bool:
    """True only where `check_trainable` has nothing to say of the config. Args: content: of config.json."""
    sizes = _SIZES_OF.get(str(content.get("model_type")))
    if sizes is None or not sizes <= content.keys():
        return False
    if not all(name in _FORMS and _FORMS[name](value) for name, value in content.items()):
        return False
    if "layer_types" in content and content["layer_types"] != ["full_attention"] * content["num_hidden_layers"]:
        return False
    if "layer_types" in content and content["model_type"] == "mistral":  # transformers makes a ministral of it
        return False
    heads, key_heads = content["num_attention_heads"], content["num_key_value_heads"]
    if content["hidden_size"] % heads or heads % key_heads:
        return False
    rope = content.get("rope_parameters") or content.get("rope_scaling")  # a file has the one or the other
    try:
        family_of(SimpleNamespace(**{**content, "rope_parameters": rope}))
    except DataError:
        return False
    return True


def plain_sizes(content: Mapping[str, Any]) -> SimpleNamespace | None:
    """The config as model_check.expected_shapes reads it; None where it may not be trained, or leaves a size of a tensor to transformers.

    Args: content: of config.json.
    """
    experts = [content[name] for name in ("num_experts", "num_local_experts") if name in content]
    lacks_head_dim = "head_dim" not in content and content.get("model_type") in _OWN_HEAD_DIM
    if "tie_word_embeddings" not in content or lacks_head_dim or len(experts) > 1 or not is_plainly_trainable(content):
        return None
    rope = content.get("rope_parameters") or content.get("rope_scaling")
    return SimpleNamespace(**{**content, "rope_parameters": rope, **({"num_experts": experts[0]} if experts else {})})
