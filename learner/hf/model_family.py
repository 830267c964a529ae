"""What a model family is: which Megatron parameter is made of which Hugging Face tensors, and what such rules can't say.

Nothing is imported for it: the plan of a run and the pages read the families (families.py) without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

MEGATRON_LAYER = "decoder.layers.{layer}."
INPUT_NORM, FEED_FORWARD_NORM, QKV_BIAS = "input_layernorm.weight", "pre_mlp_layernorm.weight", "self_attention.linear_qkv.bias"
ATTENTION_NORM_AFTER, FEED_FORWARD_NORM_AFTER = "self_attention.linear_proj.norm.weight", "mlp.linear_fc2.norm.weight"
"""Names of the norms after the two products of a layer (learner/model/norm.py)."""


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
