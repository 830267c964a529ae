"""Weights between Hugging Face and Megatron, by the rules of a model's family (learner/hf/families.py) and the layouts that these name.

A new way in which Megatron stores a matrix is a new `TensorLayout`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from evenkeel.correction.errors import DataError
from evenkeel.learner.hf.families import MEGATRON_LAYER, ModelFamily, Rule, TensorLayout, family_of
from evenkeel.learner.hf.families import HeadShape as HeadShape

if TYPE_CHECKING:  # the driver looks at the families, and must not import Megatron for that
    from evenkeel.learner.model.parallel import Placement

T = TypeVar("T")
GATHER_BYTES = 2**26
"""Bytes of a rank's parameters that are gathered at a time."""


def merge_qkv(q: Tensor, k: Tensor, v: Tensor, heads: HeadShape) -> Tensor:
    """HF's three projections as Megatron's one; rows are output channels, trailing dimensions stay."""
    parts = (x.view(heads.groups, -1, *x.shape[1:]) for x in (q, k, v))
    return torch.cat(list(parts), dim=1).flatten(0, 1)


def split_qkv(qkv: Tensor, heads: HeadShape) -> tuple[Tensor, ...]:
    """The inverse of `merge_qkv`."""
    w = heads.width
    grouped = qkv.view(heads.groups, (heads.queries_per_group + 2) * w, *qkv.shape[1:])
    return tuple(x.flatten(0, 1) for x in torch.split(grouped, [heads.queries_per_group * w, w, w], dim=1))


def to_megatron(rule: Rule, tensors: Sequence[Tensor], heads: HeadShape, rows: int, placement: Placement) -> Tensor:
    """This rank's part of the Megatron parameter made of HF tensors.

    Args:
        rows: rows of the parameter on this rank; more than the HF tensor has when the vocabulary is padded.
    """
    parts, part = (placement.tensor_parallel, placement.tensor_rank) if rule.is_split else (1, 0)
    match rule.layout:
        case TensorLayout.REPLICATED:
            return tensors[0]
        case TensorLayout.VOCAB:
            padded = F.pad(tensors[0], (0, 0, 0, rows * parts - tensors[0].shape[0]))
            return padded.chunk(parts)[part]
        case TensorLayout.ROW:
            return tensors[0].chunk(parts, dim=1)[part]
        case TensorLayout.QKV:
            q, k, v = tensors
            return merge_qkv(q, k, v, heads).chunk(parts)[part]
        case TensorLayout.GATE_UP:
            halves = tensors[0].chunk(2) if len(tensors) == 1 else tensors
            return torch.cat([half.chunk(parts)[part] for half in halves])


def to_hf(rule: Rule, parts: Sequence[Tensor], heads: HeadShape, vocab_size: int) -> tuple[Tensor, ...]:
    """The HF tensors that all ranks' parts of a Megatron parameter make up, in the rule's order. Of a single part they are views, but for
    queries, keys and values of several key-value heads, whose rows lie apart."""
    match rule.layout:
        case TensorLayout.REPLICATED:
            return (parts[0],)
        case TensorLayout.VOCAB:
            return (_joined(parts)[:vocab_size],)
        case TensorLayout.ROW:
            return (_joined(parts, dim=1),)
        case TensorLayout.QKV:
            return split_qkv(_joined(parts), heads)
        case TensorLayout.GATE_UP:
            if len(parts) == len(rule.hf) == 1:
                return (parts[0],)
            halves = tuple(_joined(pieces) for pieces in zip(*(part.chunk(2) for part in parts), strict=True))
            return halves if len(rule.hf) == 2 else (torch.cat(halves),)


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The parts joined. A single part is returned without a copy, which would make the pass over all weights three times as long."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def bind(model: torch.nn.Module, family: ModelFamily, expert_rank: int = 0) -> list[tuple[Rule, torch.nn.Parameter]]:
    """Each of this rank's parameters with its rule; the layer's and the expert's index are filled in.

    Args:
        expert_rank: the rank whose experts the parameters stand for: this one, or another when its experts are gathered.
    Raises: DataError if a parameter has no rule: the table and the model do not describe the same thing.
    """
    rules = {rule.megatron: rule for rule in family.rules}
    numbers = {f"decoder.layers.{i}.": layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}  # type: ignore[union-attr,arg-type]
    local_experts = (model.config.num_moe_experts or 0) // model.config.expert_model_parallel_size  # type: ignore[union-attr,operator]
    bound = []
    for name, parameter in model.named_parameters():
        layer = next((prefix for prefix in numbers if name.startswith(prefix)), None)
        pattern = name if layer is None else MEGATRON_LAYER + name.removeprefix(layer)
        local_expert = re.search(r"local_experts\.(\d+)", pattern)
        if local_expert:
            pattern = pattern.replace(local_expert[0], "local_experts.{expert}")
        if pattern not in rules:
            raise DataError(f"learner/weights/convert.py: no rule for Megatron's parameter {name}")
        rule = rules[pattern]
        if pattern == "output_layer.weight" and model.share_embeddings_and_output_weights:  # the last pipeline stage's copy
            rule = replace(rule, hf=rules["embedding.word_embeddings.weight"].hf)
        if layer is not None:
            number = numbers[layer]
            expert = expert_rank * local_experts + int(local_expert[1]) if local_expert else None
            rule = Rule(name, tuple(hf.format(layer=number, expert=expert) for hf in rule.hf), rule.layout)
        bound.append((rule, parameter))
    return bound


Rounded = tuple[torch.nn.Parameter, Tensor]
"""A parameter in half precision, and its weight as the file has it, in float32."""


@torch.no_grad()
def load(
    model: torch.nn.Module, hf_config: Any, read: Callable[[str], Tensor], placement: Placement, *, keeps_rounded: bool = True
) -> list[Rounded]:
    """Fill the model with HF tensors.

    Args:
        read: HF name -> whole tensor.
        keeps_rounded: False: return none.
    Returns: the parameters that had to be rounded.
    Raises: DataError if a shape is not what config.json says.
    """
    family, heads = family_of(hf_config), HeadShape.of(hf_config)
    rounded: list[Rounded] = []
    for rule, parameter in bind(model, family, placement.expert_rank):
        weight = to_megatron(rule, [read(name) for name in rule.hf], heads, parameter.shape[0], placement)
        if weight.shape != parameter.shape:
            raise DataError(
                f"{' + '.join(rule.hf)}: shape {tuple(weight.shape)} after conversion, but config.json makes {tuple(parameter.shape)} of it"
            )
        parameter.copy_(weight)
        if keeps_rounded and parameter.dtype.itemsize < 4 and weight.dtype != parameter.dtype:
            rounded.append((parameter, weight))
    return rounded


Bound = tuple[Rule, torch.nn.Parameter]


@torch.no_grad()
def export(model: torch.nn.Module, hf_config: Any, placement: Placement) -> Iterator[tuple[str, Tensor]]:
    """HF names and whole tensors of this rank's stage: first those that every rank has whole, then those that are gathered, GATHER_BYTES at
    a time. Every rank of the stage's copy must iterate to the end. The tensors may share memory with the model's. Gathered experts are
    copies, because one small view would keep the whole gathered buffer alive.
    """
    family, heads = family_of(hf_config), HeadShape.of(hf_config)
    of_ranks = [bind(model, family, rank) for rank in range(placement.expert_parallel)]
    # Shared: the last stage's copy of a tied embedding.
    places = [same for same in zip(*of_ranks, strict=True) if not getattr(same[0][1], "shared", False)]
    split, experts = placement.tensor_parallel > 1, placement.expert_parallel > 1
    of_tensor = [same for same in places if split and same[0][0].is_split]
    of_experts = [same for same in places if experts and same[0][0].is_expert]
    gathered = {id(same) for same in (*of_tensor, *of_experts)}
    for same in (same for same in places if id(same) not in gathered):
        rule, parameter = same[0]
        yield from zip(rule.hf, to_hf(rule, [parameter.detach()], heads, hf_config.vocab_size), strict=True)
    for same, parts in _gathered(of_tensor, placement.tensor_parallel, placement.tensor_group):
        yield from zip(same[0][0].hf, to_hf(same[0][0], parts, heads, hf_config.vocab_size), strict=True)
    for same, parts in _gathered(of_experts, placement.expert_parallel, placement.expert_group):
        for (rule, _), weight in zip(same, parts, strict=True):  # on each rank another expert stands at this place
            yield from zip(rule.hf, to_hf(rule, [weight.clone()], heads, hf_config.vocab_size), strict=True)


def _gathered(
    places: Sequence[tuple[Bound, ...]], ranks: int, group: dist.ProcessGroup
) -> Iterator[tuple[tuple[Bound, ...], list[Tensor]]]:
    """Yields each place with its parameter from every rank of a group, all of one shape and type. Many go in one collective, because a
    mixture of experts has thousands of small ones."""
    for run in runs(places, GATHER_BYTES, lambda same: same[0][1].nbytes):
        parameters = [same[0][1].detach() for same in run]
        flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
        every = flat.new_empty(ranks, len(flat))
        dist.all_gather_into_tensor(every.view(-1), flat, group=group)
        sizes = [parameter.numel() for parameter in parameters]
        for same, parameter, parts in zip(run, parameters, torch.split(every, sizes, dim=1), strict=True):
            yield same, [part.view(parameter.shape) for part in parts]


def runs(items: Iterable[T], most_bytes: int, bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Runs of neighbours of up to most_bytes together; a larger one is a run by itself."""
    run: list[T] = []
    size = 0
    for item in items:
        if run and size + bytes_of(item) > most_bytes:
            yield run
            run, size = [], 0
        run.append(item)
        size += bytes_of(item)
    if run:
        yield run
