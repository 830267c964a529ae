"""Folders with weights rounded to float8, by blocks of any size: an engine that has these numbers in bfloat16 shows what rounding the
weights alone does to the mismatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from evenkeel.engines.float8_format import is_projection
from evenkeel.engines.weights import dequantised, quantised
from evenkeel.learner.hf import folder as hf_folder
from evenkeel.learner.weights.export import write_hf_folder


def rounded_weight(weight: Tensor, block: int) -> Tensor:
    """A weight [rows, columns] rounded to float8 with a scale for each block, and converted back to its own dtype."""
    return dequantised(*quantised(weight, block), block, weight.dtype)


def write_float8_folder(folder: Path, target: Path, block: int, *, rounded_first: torch.dtype | None) -> None:
    """A model folder with its projections rounded to float8.

    Args:
        rounded_first: the learner's type, whose weights are then quantised; None: those of the folder are, as they are.
    """
    weights: Mapping[str, Tensor] = load_file(folder / hf_folder.SINGLE_FILE)
    sources = {name: one if rounded_first is None else one.to(rounded_first).to(one.dtype) for name, one in weights.items()}
    rounded = ((name, rounded_weight(one, block) if is_projection(name) else one) for name, one in sources.items())
    write_hf_folder(rounded, hf_folder.side_files(folder), target)
