"""Whether the learner can train a model folder, from its config and the headers of its files: before anything is started."""

from __future__ import annotations

import os
from typing import Any

from correction.errors import DataError
from learner.convert import HeadShape, family_of
from learner.hf_folder import HFWeights, read_config


def check_trainable(folder: str | os.PathLike[str]) -> Any:
    """Its transformers config.

    Raises: DataError naming the file and the option, family or tensor that is in the way.
    """
    hf_config = read_config(folder)
    try:
        expected = expected_shapes(hf_config)
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error
    except (ArithmeticError, AttributeError, TypeError) as error:  # sizes that make no model
        raise DataError(f"{folder}/config.json: its sizes make no model ({error}). Put back a whole copy of the file") from error
    found = HFWeights(folder).shapes()
    wrong = [f"{name} has shape {found[name]} instead of {shape}" for name, shape in expected.items() if found.get(name, shape) != shape]
    missing = [f"{name} is missing" for name in expected if name not in found]
    surplus = [f"{name} has no place in the model" for name in found if name not in expected and not is_surplus_allowed(name, hf_config)]
    if problems := missing + wrong + surplus:
        more = f", and {len(problems) - 1} more tensors don't fit" if len(problems) > 1 else ""
        raise DataError(
            f"{folder}: its config.json and its safetensors describe different models: {problems[0]}{more}. "
            "Put back those that belong together"
        )
    return hf_config


def is_surplus_allowed(name: str, hf_config: Any) -> bool:
    """Buffers that older folders hold; and a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (hf_config.tie_word_embeddings and name == "lm_head.weight")


def expected_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor that the learner reads of a folder with this config: HF name -> shape.

    Raises: DataError as `family_of`.
    """
    family, heads = family_of(hf_config), HeadShape.of(hf_config)
    layers, experts = range(hf_config.num_hidden_layers), range(hf_config.num_experts if family.has_experts else 0)
    shapes = _shapes_by_leaf(hf_config, heads, hf_config.moe_intermediate_size if family.has_experts else hf_config.intermediate_size)
    expected: dict[str, tuple[int, ...]] = {}
    for template in (name for rule in family.rules for name in rule.hf):
        shape = shapes[".".join(template.split(".")[-2:])]
        numbers = [(layer, expert) for layer in layers for expert in (experts if "{expert}" in template else (0,))]
        expected |= {template.format(layer=layer, expert=expert): shape for layer, expert in numbers}
    if hf_config.tie_word_embeddings:
        del expected["lm_head.weight"]
    return expected


def _shapes_by_leaf(hf_config: Any, heads: HeadShape, width: int) -> dict[str, tuple[int, ...]]:
    """By the last two parts of a name. width: of a feed-forward part, or of an expert."""
    hidden, vocabulary = hf_config.hidden_size, hf_config.vocab_size
    queries, keys = heads.groups * heads.queries_per_group * heads.width, heads.groups * heads.width
    norms = ("norm", "input_layernorm", "post_attention_layernorm")
    return {
        "embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        **{f"{norm}.weight": (hidden,) for norm in norms},
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "q_norm.weight": (heads.width,),
        "k_norm.weight": (heads.width,),
        "gate_proj.weight": (width, hidden),
        "up_proj.weight": (width, hidden),
        "down_proj.weight": (hidden, width),
        "gate.weight": (getattr(hf_config, "num_experts", 0), hidden),
    }
