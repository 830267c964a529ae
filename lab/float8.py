"""Folders with weights rounded to float8, by blocks of any size: an engine that has these numbers in bfloat16 shows what rounding the
weights alone does to the mismatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from correction.engines.float8 import dequantised, quantised
from learner import hf_folder
from learner.export import write_hf_folder
from learner.families import FAMILIES
from learner.model_family import TensorLayout

_MATRICES = (TensorLayout.QKV, TensorLayout.ROW, TensorLayout.GATE_UP)
_RULES = [rule for family in FAMILIES.values() for rule in family.rules if rule.layout in _MATRICES]
PROJECTIONS = frozenset(name.split(".")[-2] for rule in _RULES for name in rule.hf)
"""Modules of attention, feed-forward parts and experts, by the last part of their names."""


def is_projection(name: str) -> bool:
    """Whether float8 engines hold this weight in float8; embeddings, head, norms, biases and routers stay as they are."""
    *_, module, leaf = name.split(".")
    return leaf == "weight" and module in PROJECTIONS


def in_float8(weight: Tensor, block: int) -> Tensor:
    """A weight [rows, columns] rounded to float8 with a scale for each block, and converted back to its own dtype."""
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
