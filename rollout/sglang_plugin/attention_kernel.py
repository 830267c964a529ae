"""attention.c, compiled for a model's shape when an engine starts.

Torch has no kernel for many short queries over a paged cache on a CPU, and a loop over sequences, or copies of their keys and values, take
longer than the attention itself. Fast-math lets the compiler vectorise sums and exponentials; all of it is computed in float64, so the
order of additions is below what float32 can show.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from evenkeel.correction.errors import EngineError
from evenkeel.rollout.sglang_plugin.compiled import compiled

SOURCE = Path(__file__).with_name("attention.c")
ELEMENTS = {torch.float32: "FLOAT32", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


class AttentionKernel:
    """Attention of single tokens to a paged cache; T of them (rows), H query heads over G key heads, head size D."""

    def __init__(self, heads: int, key_heads: int, size: int, dtype: torch.dtype) -> None:
        """
        Raises: EngineError without a working C compiler.
        """
        self._dtype, self._query_shape, self._cache_shape = dtype, (heads, size), (key_heads, size)
        shape = {"HEADS": heads, "KEY_HEADS": key_heads, "SIZE": size, "ELEMENT": ELEMENTS[dtype]}
        self._attend = compiled(SOURCE, [f"-D{name}={value}" for name, value in shape.items()], "-ffast-math").attend
        self._attend.argtypes = [*[_POINTER] * 4, _COUNT, *[_POINTER] * 2, _COUNT, ctypes.c_double, _POINTER]
        self._attend.restype = None

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, requests: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        """
        Args:
            query: [T, H, D].
            keys, values: [slots of the cache, G, D], contiguous.
            table: [requests, positions] int32, contiguous: the slot of each position.
            requests: [T] int64, each row's row of the table.
            lengths: [T] int64, tokens of its sequence up to and with this one.
        Returns: [T, H, D] of the query's type. A row is computed from its own sequence alone.
        Raises: EngineError for tensors of another type or shape than the kernel was compiled for, which it would misread.
        """
        query, requests, lengths = query.contiguous(), requests.contiguous(), lengths.contiguous()
        self._check(query, keys, values, table, requests, lengths)
        out = torch.empty(query.shape, dtype=torch.float32)
        queries, *cache, indices, counts, results = (x.data_ptr() for x in (query, keys, values, table, requests, lengths, out))
        self._attend(queries, *cache, table.shape[1], indices, counts, len(query), scale, results)
        return out.to(query.dtype)

    def _check(self, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, requests: Tensor, lengths: Tensor) -> None:
        dtypes = (query.dtype, keys.dtype, values.dtype, table.dtype, requests.dtype, lengths.dtype)
        shapes = (query.shape[1:], keys.shape[1:], values.shape[1:], len(requests), len(lengths))
        if (
            dtypes != (self._dtype,) * 3 + (torch.int32, torch.int64, torch.int64)
            or shapes != (self._query_shape, self._cache_shape, self._cache_shape, len(query), len(query))
            or not (keys.is_contiguous() and values.is_contiguous() and table.is_contiguous())
        ):
            raise EngineError(
                f"the attention kernel was compiled for {self._dtype}, queries {self._query_shape} and a cache of {self._cache_shape}; "
                f"SGLang gave it {dtypes}, {shapes}. Set rollout.engine.attention_backend=stock"
            )


def check_compiler() -> None:
    """Raises: EngineError if a kernel can't be compiled and loaded here. In SGLang's own process that would be one log line among many."""
    AttentionKernel(1, 1, 8, torch.float32)
