"""One checksum of a weight tensor, computed alike by the learner and inside the engine's own process."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Bytes hashed at a time: bounds the copy in host memory when the tensor is on an accelerator."""


def tensor_checksum(tensor: Tensor) -> str:
    """SHA-256 of what a tensor is: dtype, shape, and its elements' bytes in row-major order.

    Equal exactly when dtype, shape and every bit are equal (0.0 and -0.0 differ, and so do two NaNs of different payload).
    Both sides must hold the same dtype: cast first when the learner trains in another one than the engine serves.

    Args:
        tensor: any shape, dtype, device and strides.
    Returns: 64 hexadecimal digits.
    """
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for chunk in torch.split(flat, CHUNK_BYTES):
        digest.update(chunk.cpu().numpy().data)
    return digest.hexdigest()
