"""Weights to float8 and back, in the format of float8_format.py: the learner quantises its own weights as it sends them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from correction.engines.float8_format import BLOCK, SCALE_SUFFIX, is_projection

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def in_float8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By Hugging Face name, each projection as its values and its scales; the rest as it is."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if is_projection(name):
            found[name], found[name + SCALE_SUFFIX] = quantised(weight, BLOCK)
        else:
            found[name] = weight
    return found


def quantised(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The nearest float8 e4m3 of a weight over the scale of its block, and the scales.

    Args:
        weight: [rows, columns].
        block: rows and columns that share a scale, by which their largest entry becomes the format's largest number; 0: one for all.
    Returns: [rows, columns] float8_e4m3fn, and [rows / block, columns / block] float32, rounded up; a value is their product.
    """
    rows, columns = weight.shape
    height, width = (block or rows), (block or columns)
    padded = F.pad(weight.detach().float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.view(-1, height, padded.shape[1] // width, width)  # [blocks, height, blocks, width]
    largest = blocks.new_full((), LARGEST)  # a tensor: by a number a GPU multiplies with its inverse, which rounds otherwise
    scale = (blocks.abs().amax((1, 3), keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    values = (blocks / scale).to(torch.float8_e4m3fn)
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale[:, 0, :, 0].contiguous()


def dequantised(values: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns]: what `quantised` stands for, in a type."""
    rows, columns = values.shape
    spread = scales.repeat_interleave(block or rows, 0).repeat_interleave(block or columns, 1)[:rows, :columns]
    return (values.float() * spread).to(dtype)

