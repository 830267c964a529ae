"""Weights in float8, as an engine that keeps its projections so would have them: values of 8 bits, and a scale for each block of a matrix.

No engine on a CPU computes in float8. One that has the same numbers in bfloat16 shows what rounding the weights alone does to the mismatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from learner import hf_folder
from learner.export import write_hf_folder
from learner.families import FAMILIES
from learner.model_family import TensorLayout

LARGEST = torch.finfo(torch.float8_e4m3fn).max
_MATRICES = (TensorLayout.QKV, TensorLayout.ROW, TensorLayout.GATE_UP)
_RULES = [rule for family in FAMILIES.values() for rule in family.rules if rule.layout in _MATRICES]
PROJECTIONS = frozenset(name.split(".")[-2] for rule in _RULES for name in rule.hf)
"""Modules of attention, feed-forward parts and experts, by the last part of their names."""


def is_projection(name: str) -> bool:
    """What float8 engines keep in float8; embeddings, head, norms, biases and routers stay as they are."""
    *_, module, leaf = name.split(".")
    return leaf == "weight" and module in PROJECTIONS


def quantised(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The nearest float8 e4m3 of a weight over the scale of its block, and the scales.

    Args:
        weight: [rows, columns].
        block: rows and columns that share a scale, by which their largest entry becomes the format's largest number; 0: one for all.
    Returns: [rows, columns] float8_e4m3fn, and [rows / block, columns / block] float32, rounded up; a value is their product.
    """
    rows, columns = weight.shape
    height, width = (block or rows), (block or columns)
    padded = F.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width))  # [blocks, height, blocks, width]
    scale = (blocks.abs().amax((1, 3), keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    values = (blocks / scale).to(torch.float8_e4m3fn)
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale[:, 0, :, 0]


def dequantised(values: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns]: what `quantised` stands for, in a type."""
    rows, columns = values.shape
    spread = scales.repeat_interleave(block or rows, 0).repeat_interleave(block or columns, 1)[:rows, :columns]
    return (values.float() * spread).to(dtype)


def in_float8(weight: Tensor, block: int) -> Tensor:
    """A weight [rows, columns] rounded to what float8 with a scale for each block holds, in its own dtype."""
    return dequantised(*quantised(weight, block), block, weight.dtype)


def write_float8_folder(folder: Path, target: Path, block: int, *, rounded_first: torch.dtype | None) -> None:
    """A model folder with its projections rounded to float8.

    Args:
        rounded_first: the learner's type, whose weights are then quantised; None: those of the folder are, as they are.
    """
    weights: Mapping[str, Tensor] = load_file(folder / hf_folder.SINGLE_FILE)
    sources = {name: one if rounded_first is None else one.to(rounded_first).to(one.dtype) for name, one in weights.items()}
    rounded = ((name, in_float8(one, block) if is_projection(name) else one) for name, one in sources.items())
    write_hf_folder(rounded, hf_folder.side_files(folder), target)
