"""Whether the learner can train a model folder, from its config and the headers of its files: before anything is started.

Neither torch nor transformers is imported, unless a folder's config has to be read by transformers (check_trainable).
"""

from __future__ import annotations

import os
from typing import Any

from correction.errors import DataError
from learner.hf.families import OTHER_MODEL, family_of
from learner.hf.hf_folder import PUT_BACK, read_config, shapes_of
from learner.hf.model_family import HeadShape, ModelFamily, Rule, TensorLayout


def check_trainable(folder: str | os.PathLike[str], *, has_weights: bool = True) -> Any:
    """Check that the learner can train the model in a folder. Returns: its transformers config.

    Args: has_weights: False: the weights aren't there yet, and are checked when they are read.
    Raises: DataError naming the file and the option, family or tensor that can't be trained.
    """
    hf_config = read_config(folder)
    try:
        expected_shapes(hf_config)
    except DataError as error:
        raise DataError(f"{folder}: {error.reason}", remedy=OTHER_MODEL) from error
    except (ArithmeticError, AttributeError, TypeError) as error:  # sizes that make no model
        raise DataError(f"{folder}/config.json: its sizes make no model ({error})", remedy=PUT_BACK) from error
    if has_weights:
        check_weights(folder, hf_config)
    return hf_config


def check_weights(folder: str | os.PathLike[str], hf_config: Any) -> None:
    """Check that a folder's safetensors are those of its config, which has passed check_trainable.

    Args: hf_config: transformers' own, or plain_config.plain_sizes.
    Raises: DataError naming the file, or the tensor that doesn't fit.
    """
    expected, found = expected_shapes(hf_config), shapes_of(folder)
    wrong = [f"{name} has shape {found[name]} instead of {shape}" for name, shape in expected.items() if found.get(name, shape) != shape]
    missing = [f"{name} is missing" for name in expected if name not in found]
    surplus = [f"{name} has no place in the model" for name in found if name not in expected and not is_surplus_allowed(name, hf_config)]
    if problems := missing + wrong + surplus:
        more = f", and {len(problems) - 1} more tensors don't fit" if len(problems) > 1 else ""
        raise DataError(
            f"{folder}: its config.json and its safetensors describe different models: {problems[0]}{more}",
            remedy="Put back those that belong together",
        )


def is_surplus_allowed(name: str, hf_config: Any) -> bool:
    """Buffers that older folders hold; and a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (hf_config.tie_word_embeddings and name == "lm_head.weight")


def expected_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor that the learner reads of a folder with this config: HF name -> shape.

    Raises: DataError as `family_of`.
    """
    family, heads = family_of(hf_config), HeadShape.of(hf_config)
    layers, experts = range(hf_config.num_hidden_layers), range(hf_config.num_experts if family.experts else 0)
    expected: dict[str, tuple[int, ...]] = {}
    for rule in family.rules:
        numbers = [(layer, expert) for layer in layers for expert in (experts if rule.is_expert else (0,))]
        for template, shape in zip(rule.hf, _shapes(rule, family, heads, hf_config), strict=True):
            expected |= {template.format(layer=layer, expert=expert): shape for layer, expert in numbers}
    if hf_config.tie_word_embeddings:
        del expected["lm_head.weight"]
    return expected


def _shapes(rule: Rule, family: ModelFamily, heads: HeadShape, hf_config: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of the rule's HF tensors."""
    hidden, queries, keys = hf_config.hidden_size, heads.groups * heads.queries_per_group * heads.width, heads.groups * heads.width
    width = getattr(hf_config, family.experts.width) if family.experts else hf_config.intermediate_size
    is_of_attention = ".self_attention." in rule.megatron
    match rule.layout:
        case TensorLayout.VOCAB:
            return ((hf_config.vocab_size, hidden),)
        case TensorLayout.ROW:
            return ((hidden, queries if is_of_attention else width),)
        case TensorLayout.QKV:
            inputs = () if rule.megatron.endswith(".bias") else (hidden,)
            return tuple((rows, *inputs) for rows in (queries, keys, keys))
        case TensorLayout.GATE_UP:
            return ((2 * width // len(rule.hf), hidden),) * len(rule.hf)
        case TensorLayout.REPLICATED:
            of_heads = {"q_layernorm": queries, "k_layernorm": keys}
            leaf = rule.megatron.split(".")[-2]
            if leaf == "router":
                return ((hf_config.num_experts, hidden),)
            return ((hidden if leaf not in of_heads else of_heads[leaf] if family.qk_norm == "all_heads" else heads.width,),)
