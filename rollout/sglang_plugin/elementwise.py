"""Norms and rotary angles of a decode step by elementwise.c, where it has the bits of torch's operators; SGLang's own code elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenkeel.rollout.sglang_plugin.compiled import compiled

SOURCE = Path(__file__).with_name("elementwise.c")
ELEMENTS = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16"}
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_SIDE = (_POINTER, _COUNT, _POINTER, _COUNT)
"""Arguments about queries or keys: where they lie, the numbers between two of them, where the results go, and the number of heads."""


class Elementwise:
    """The two functions of elementwise.c."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Args: dtype: of ELEMENTS. Raises: EngineError without a working C compiler."""
        self.dtype = dtype
        library = compiled(SOURCE, [f"-DELEMENT={ELEMENTS[dtype]}"], "-ffp-contract=off")
        self._norm, self._rotate = library.norm, library.rotate
        self._norm.argtypes = [*[_POINTER] * 5, _COUNT, _COUNT, ctypes.c_float]
        self._rotate.argtypes = [*_SIDE, *_SIDE, _POINTER, _POINTER, _COUNT, _COUNT]
        self._norm.restype = self._rotate.restype = None

    def norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """RMSNorm of x, or of x + residual. Args: x, residual: [T, N], contiguous; weight: [N]. Returns: the norm, and x + residual."""
        out, sums = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        self._norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            sums.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *x.shape,
            eps,
        )
        return out, sums

    def rotate(self, query: Tensor, key: Tensor, angles: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Args: query, key: [T, heads * D], rows contiguous; angles: [positions, D] float32, cosines and sines; positions: [T] int64."""
        size, outs = angles.shape[1], (query.new_empty(query.shape), key.new_empty(key.shape))
        of_query, of_key = (
            (x.data_ptr(), x.stride(0), out.data_ptr(), x.shape[1] // size) for x, out in zip((query, key), outs, strict=True)
        )
        self._rotate(*of_query, *of_key, angles.data_ptr(), positions.data_ptr(), len(query), size)
        return outs

    def agrees(self) -> bool:
        """Whether the norm's bits are torch's, for rows of several lengths: in float32 in any case, since rounding hides another order."""
        if self.dtype is not torch.float32 and not Elementwise(torch.float32).agrees():
            return False
        generator = torch.Generator().manual_seed(0)
        for size in (576, 896, 100, 4096):
            x, residual = torch.randn(2, 3, size, generator=generator).to(self.dtype)
            weight = torch.randn(size, generator=generator).to(self.dtype)
            sums = x.float() + residual.float()
            expected = (sums * torch.rsqrt(sums.pow(2).mean(-1, keepdim=True) + 1e-5) * weight).to(self.dtype)
            found = self.norm(x, residual, weight, 1e-5)
            if not (torch.equal(found[0], expected) and torch.equal(found[1], sums.to(self.dtype))):
                return False
        return True


def register(dtype: torch.dtype) -> None:
    """Have SGLang's layers use them. Args: dtype: of the engine. Raises: EngineError without a working C compiler."""
    if dtype not in ELEMENTS or not (kernels := Elementwise(dtype)).agrees():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def norm(original: Callable[..., Any], layer: Any, x: Tensor, residual: Tensor | None = None, *args: Any, **options: Any) -> Any:
        is_plain = x.dtype is layer.weight.dtype is dtype and x.dim() == 2 and x.shape[-1] == layer.hidden_size
        is_rounded_once = layer.override_orig_dtype is None and not (layer.fp32_residual or layer.cast_x_before_out_mul)
        is_other = args or options.get("post_residual_addition") is not None or layer.variance_size_override is not None
        if not (is_plain and is_rounded_once) or is_other or (residual is not None and residual.dtype is not dtype):
            return original(layer, x, residual, *args, **options)
        x = x.contiguous()
        if residual is None:
            return kernels.norm(x, None, layer.weight, layer.variance_epsilon)[0]
        return kernels.norm(x, residual.contiguous(), layer.weight, layer.variance_epsilon)

    def rotate(original: Callable[..., Any], layer: Any, positions: Tensor, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        angles = layer.cos_sin_cache
        is_whole = layer.is_neox_style and layer.rotary_dim == layer.head_size == angles.shape[-1]
        is_plain = query.dtype is key.dtype is dtype and query.dim() == key.dim() == 2
        has_angles = angles.dtype in (torch.float32, dtype)  # SGLang has rounded them to the model's on a CPU
        has_places = positions.dim() == 1 and positions.dtype is torch.int64
        if (
            not (is_whole and is_plain and has_angles and has_places and query.stride(1) == key.stride(1) == 1)
            or args
            or any(one is not None for one in options.values())
        ):
            return original(layer, positions, query, key, *args, **options)
        if layer.__dict__.get("angles_of") is not angles:  # another one where it had to be longer
            layer.__dict__.update(angles_of=angles, float_angles=angles.float().contiguous())
        return kernels.rotate(query, key, layer.__dict__["float_angles"], positions.contiguous())

    HookRegistry.register("sglang.srt.layers.layernorm.RMSNorm.forward_native", norm, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native", rotate, HookType.AROUND)
