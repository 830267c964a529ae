"""Weights as flat bytes: numpy arrays cross Ray's object store without a copy, torch tensors are pickled."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WireBucket:
    """Some tensors of the model, end to end."""

    names: tuple[str, ...]
    """Hugging Face names."""
    dtypes: tuple[str, ...]
    """torch's names without "torch."."""
    shapes: tuple[tuple[int, ...], ...]
    data: np.ndarray
    """uint8; read-only when it comes out of the object store."""


def pack(named_tensors: Sequence[tuple[str, Tensor]]) -> WireBucket:
    """A copy of the tensors: the learner may change its own while this one travels."""
    flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for _, tensor in named_tensors]
    return WireBucket(
        names=tuple(name for name, _ in named_tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named_tensors),
        shapes=tuple(tuple(tensor.shape) for _, tensor in named_tensors),
        data=torch.cat(flat).numpy(),
    )


def unpack(bucket: WireBucket) -> dict[str, Tensor]:
    """The tensors by name, as views of the bucket's bytes; they must not be written to."""
    tensors, offset = {}, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the memory is read-only; so it shall be
        data = torch.from_numpy(bucket.data)
    for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        piece = data[offset : offset + size]
        # A view needs its start on a multiple of the item size; float32 after bfloat16 may miss it.
        piece = piece if (piece.storage_offset() % dtype.itemsize) == 0 else piece.clone()
        tensors[name] = piece.view(dtype).reshape(shape)
        offset += size
    return tensors
