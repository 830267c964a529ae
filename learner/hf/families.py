"""The model families that the learner trains, as tables; and what stands in the way of other models, by the option of config.json.

A new family is a new entry of FAMILIES. docs/models.md shows the list, with what was compared where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from evenkeel.correction.errors import DataError

# ----------------------------------------------------------------------------------------------------------------------
# What a model family is: which Megatron parameter is made of which Hugging Face tensors, and what such rules can't say.
#
# Nothing is imported for it: the plan of a run and the pages read the families (families.py) without torch.

MEGATRON_LAYER = "decoder.layers.{layer}."
INPUT_NORM, FEED_FORWARD_NORM, QKV_BIAS = "input_layernorm.weight", "pre_mlp_layernorm.weight", "self_attention.linear_qkv.bias"
ATTENTION_NORM_AFTER, FEED_FORWARD_NORM_AFTER = "self_attention.linear_proj.norm.weight", "mlp.linear_fc2.norm.weight"
"""Names of the norms after the two products of a layer (learner/model/layers.py)."""


class TensorLayout(Enum):
    """How Megatron stores one or more HF tensors, and how tensor parallelism splits them."""

    REPLICATED = "replicated"
    """One tensor, whole on every rank."""
    VOCAB = "vocab"
    """Rows are tokens, padded at the end to a multiple of the ranks, then split."""
    ROW = "row"
    """[out, in], split along in."""
    QKV = "qkv"
    """q, k, v interleaved by key-value group: (its query heads, its key head, its value head) for each group; split between groups."""
    GATE_UP = "gate_up"
    """gate above up, two HF tensors or one; each half is split by itself, so that a rank holds rows of both."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of the attention, as the QKV layout needs them."""

    groups: int
    """Key-value heads."""
    queries_per_group: int
    width: int
    """Channels of a head."""

    @classmethod
    def of(cls, hf_config: Any) -> HeadShape:
        width = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        groups = hf_config.num_key_value_heads
        return cls(groups, hf_config.num_attention_heads // groups, width)


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the HF tensors that it is made of.

    {layer} is the layer's index in the whole model; {expert} the expert's, in Megatron's name among those of the rank.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: TensorLayout

    @property
    def is_expert(self) -> bool:
        """Expert parallelism decides on which rank an expert is. It is whole there: tensor parallelism splits none."""
        return ".local_experts." in self.megatron

    @property
    def is_split(self) -> bool:
        """Whether each tensor-parallel rank has only a part of the parameter."""
        return self.layout is not TensorLayout.REPLICATED and not self.is_expert


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """Names of a mixture of experts' options in config.json. Their number is num_experts in transformers, whatever the file calls it."""

    width: str = "moe_intermediate_size"
    """Name of an expert's feed-forward width."""
    normalises: str | None = "norm_topk_prob"
    """Name of the option whether the weights of a token's experts add up to 1; None: they always do."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A model family: its rules, and properties that rules can't express."""

    models: str
    """Names of the family's models, for the docs."""
    rules: tuple[Rule, ...]
    optional_rules: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    """Name of an option of config.json -> rules that it adds, unless it is false."""
    supports: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Options of config.json with the values that can be trained, where these are not those of families.SUPPORTED."""
    experts: ExpertOptions | None = None
    """Each layer's feed-forward part is a router and its experts."""
    qk_norm: Literal["none", "head", "all_heads"] = "none"
    """Queries and keys are normalised head by head, or over the channels of all heads."""
    rotary_interleaved: bool = False
    """Rotary angles turn neighbouring channels; else a channel of a head's first half with its counterpart in the second."""

    def with_options(self, options: Mapping[str, Any]) -> ModelFamily:
        """The family with the optional rules that a config.json asks for."""
        asked = tuple(rule for name, rules in self.optional_rules.items() if options.get(name, True) for rule in rules)
        return replace(self, rules=self.rules + asked, optional_rules={})

    def has(self, parameter: str) -> bool:
        """Whether each layer has this parameter of Megatron's."""
        return any(rule.megatron == MEGATRON_LAYER + parameter for rule in self.rules)


_HF_LAYER = "model.layers.{layer}."


def _layer_rule(megatron: str, layout: TensorLayout, *hf: str) -> Rule:
    return Rule(MEGATRON_LAYER + megatron, tuple(_HF_LAYER + name for name in hf), layout)


def _norms(**hf: str) -> tuple[Rule, ...]:
    """Norms of a layer, by their place, with their names in Hugging Face's files."""
    places = {
        "before_attention": INPUT_NORM,
        "after_attention": ATTENTION_NORM_AFTER,
        "before_feed_forward": FEED_FORWARD_NORM,
        "after_feed_forward": FEED_FORWARD_NORM_AFTER,
    }
    return tuple(_layer_rule(places[place], TensorLayout.REPLICATED, f"{name}.weight") for place, name in hf.items())


def _experts(module: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """A router, and experts of three matrices."""
    megatron, hf = "mlp.experts.local_experts.{expert}.", module + ".experts.{expert}."
    return (
        _layer_rule("mlp.router.weight", TensorLayout.REPLICATED, f"{module}.gate.weight"),
        _layer_rule(megatron + "linear_fc1.weight", TensorLayout.GATE_UP, f"{hf}{gate}.weight", f"{hf}{up}.weight"),
        _layer_rule(megatron + "linear_fc2.weight", TensorLayout.ROW, f"{hf}{down}.weight"),
    )


_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_TRUNK = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), TensorLayout.VOCAB),
    _layer_rule("self_attention.linear_qkv.weight", TensorLayout.QKV, *(f"{name}.weight" for name in _PROJECTIONS)),
    _layer_rule("self_attention.linear_proj.weight", TensorLayout.ROW, "self_attn.o_proj.weight"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), TensorLayout.REPLICATED),
    Rule("output_layer.weight", ("lm_head.weight",), TensorLayout.VOCAB),
)
_DOWN = _layer_rule("mlp.linear_fc2.weight", TensorLayout.ROW, "mlp.down_proj.weight")
_FEED_FORWARD = (_layer_rule("mlp.linear_fc1.weight", TensorLayout.GATE_UP, "mlp.gate_proj.weight", "mlp.up_proj.weight"), _DOWN)
_FUSED_FEED_FORWARD = (_layer_rule("mlp.linear_fc1.weight", TensorLayout.GATE_UP, "mlp.gate_up_proj.weight"), _DOWN)
_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_NORMS_BEFORE = _norms(before_attention="input_layernorm", before_feed_forward="post_attention_layernorm")
_NORMS_AFTER = _norms(after_attention="post_attention_layernorm", after_feed_forward="post_feedforward_layernorm")
_QK_NORM = (
    _layer_rule("self_attention.q_layernorm.weight", TensorLayout.REPLICATED, "self_attn.q_norm.weight"),
    _layer_rule("self_attention.k_layernorm.weight", TensorLayout.REPLICATED, "self_attn.k_norm.weight"),
)
_QKV_BIAS = (_layer_rule(QKV_BIAS, TensorLayout.QKV, *(f"{name}.bias" for name in _PROJECTIONS)),)

FAMILIES: dict[str, ModelFamily] = {
    "qwen3": ModelFamily("Qwen3 (dense)", _TRUNK + _NORMS_BEFORE + _FEED_FORWARD + _QK_NORM, qk_norm="head"),
    "qwen3_moe": ModelFamily("Qwen3-MoE", _TRUNK + _NORMS_BEFORE + _EXPERTS + _QK_NORM, qk_norm="head", experts=ExpertOptions()),
    "qwen2": ModelFamily("Qwen2, Qwen2.5", _TRUNK + _NORMS_BEFORE + _FEED_FORWARD + _QKV_BIAS),
    "llama": ModelFamily(
        "Llama 2, 3, 3.1, 3.2 (text)", _TRUNK + _NORMS_BEFORE + _FEED_FORWARD, supports={"rope_type": ("default", "llama3")}
    ),
    "mistral": ModelFamily("Mistral 7B v0.3, Nemo, Small (text)", _TRUNK + _NORMS_BEFORE + _FEED_FORWARD),
    "olmo2": ModelFamily("OLMo 2", _TRUNK + _NORMS_AFTER + _FEED_FORWARD + _QK_NORM, qk_norm="all_heads"),
    "glm4": ModelFamily(
        "GLM-4 and GLM-Z1 of April 2025 (dense)",
        _TRUNK
        + _norms(
            before_attention="input_layernorm",
            after_attention="post_self_attn_layernorm",
            before_feed_forward="post_attention_layernorm",
            after_feed_forward="post_mlp_layernorm",
        )
        + _FUSED_FEED_FORWARD,
        optional_rules={"attention_bias": _QKV_BIAS},
        supports={"attention_bias": (False, True), "partial_rotary_factor": (0.5,)},
        rotary_interleaved=True,
    ),
    "mixtral": ModelFamily(
        "Mixtral",
        _TRUNK + _NORMS_BEFORE + _experts("block_sparse_moe", "w1", "w3", "w2"),
        supports={"head_dim": (None,)},  # SGLang takes hidden_size / num_attention_heads
        experts=ExpertOptions(width="intermediate_size", normalises=None),
    ),
    "olmoe": ModelFamily(
        "OLMoE",
        _TRUNK + _NORMS_BEFORE + _EXPERTS + _QK_NORM,
        supports={  # SGLang takes these for granted
            "clip_qkv": (None,),
            "norm_topk_prob": (False,),
            "num_key_value_heads": ("num_attention_heads",),
            "rms_norm_eps": (1e-5,),
        },
        qk_norm="all_heads",
        experts=ExpertOptions(width="intermediate_size"),
    ),
}
"""Families by transformers' model_type."""

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "layer_types": ("full_attention",),
    "rope_type": ("default",),
    "partial_rotary_factor": (1.0,),
    "decoder_sparse_step": (1,),  # layers with experts among layers without
    "mlp_only_layers": (None,),
    "quantization_config": (None,),  # weights that are scaled integers or float8 numbers
}
"""Options of config.json, and the values that can be trained. An option that a file lacks counts as the first value."""
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron takes for granted of the rope_type llama3; its factor is free."""
OBSTACLES: dict[str, str] = {
    "gemma3": "vision_config, and in text_config layer_types with sliding_attention",
    "gemma3_text": "layer_types with sliding_attention, each kind with rotary angles of its own (rope_parameters)",
    "gpt_oss": "layer_types with sliding_attention, and attention sinks",
    "olmo3": "layer_types with sliding_attention",
    "qwen2_moe": "shared_expert_intermediate_size (an expert that every token takes, behind a gate)",
    "glm4_moe": "n_shared_experts, first_k_dense_replace and the routers' correction bias",
    "deepseek_v3": "kv_lora_rank (latent attention) and n_shared_experts",
    "qwen3_next": "layer_types with linear_attention",
    "phi3": "its q, k and v in one tensor (qkv_proj)",
    "granite": "embedding_multiplier, attention_multiplier, residual_multiplier and logits_scaling",
    "cohere": "use_qk_norm and norms that take the mean away (layer_norm_eps)",
}
"""Families that engines and transformers know and the learner does not, with the options of config.json that stand in the way."""
OTHER_MODEL = "Set model to another one (docs/models.md)"


def trained_family(kind: str) -> ModelFamily:
    """The family of a model_type, without the optional parts.

    Raises: DataError naming the model_type, and the options in the way if they are known.
    """
    if kind not in FAMILIES:
        reason = f" because of {OBSTACLES[kind]}" if kind in OBSTACLES else ""
        supported = ", ".join(sorted(FAMILIES))
        raise DataError(f"config.json: model_type = {kind} can't be trained{reason}; supported are {supported}", remedy=OTHER_MODEL)
    return FAMILIES[kind]


def family_of(hf_config: Any) -> ModelFamily:
    """The family of a model, with the optional parts that its config asks for.

    Raises: DataError naming the architecture, or the option of it that has no counterpart here.
    """
    kind = hf_config.model_type
    family = trained_family(kind)
    options = _options(hf_config)
    for name, supported in {**SUPPORTED, **family.supports}.items():
        value = options.get(name, supported[0])
        if value not in supported:
            which = "does without it" if supported == (None,) else f"supports {' and '.join(map(str, supported))}"
            raise DataError(f"config.json: {name} = {value} of {kind} has no counterpart in the learner, which {which}")
    rope_scaling(hf_config)
    return family.with_options(options)


def rope_scaling(hf_config: Any) -> float | None:
    """Factor by which the slow rotary angles are slowed down (rope_type llama3), or None. Raises: DataError for options that Megatron
    doesn't support."""
    rope: Mapping[str, Any] = getattr(hf_config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") == "default":
        return None
    for name, expected in LLAMA3_ROPE.items():
        if rope.get(name, expected) != expected:
            raise DataError(
                f"config.json: {name} = {rope[name]} of rope_type = llama3 has no counterpart in the learner, which supports {expected}"
            )
    return float(rope["factor"])


def _options(hf_config: Any) -> dict[str, Any]:
    """The options that decide whether a model can be trained, normalised: absent, empty and off are the same value."""
    options: dict[str, Any] = {name: getattr(hf_config, name) for name in _NAMES if hasattr(hf_config, name)}
    options |= getattr(hf_config, "rope_parameters", None) or {}
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        options[name] = bool(options.get(name, False))
    if options.get("sliding_window") and options["sliding_window"] >= hf_config.max_position_embeddings:
        options["sliding_window"] = None  # it shuts nothing out
    if options.get("head_dim") == hf_config.hidden_size // hf_config.num_attention_heads:
        options["head_dim"] = None
    if hf_config.num_key_value_heads == hf_config.num_attention_heads:
        options["num_key_value_heads"] = "num_attention_heads"
    options["mlp_only_layers"] = options.get("mlp_only_layers") or None
    quantised = options.get("quantization_config") or None
    options["quantization_config"] = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else quantised
    others = sorted(set(options.pop("layer_types", None) or ()) - {"full_attention"})
    return options | ({"layer_types": others[0]} if others else {})


_NAMES = {name for family in FAMILIES.values() for name in family.supports} | SUPPORTED.keys()
