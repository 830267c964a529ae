"""RMSNorm by the kernel that a GPU has for it: which rows get it, and what it says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from evenkeel.learner.model import layers
from evenkeel.learner.model.layers import AllHeadsNorm, HFRMSNorm

HIDDEN = 64


def with_gradients(layer: HFRMSNorm, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output = layer(x)
    slope = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [x, layer.weight], slope)]


def made(kind: type[HFRMSNorm], dtype: torch.dtype) -> HFRMSNorm:
    config, generator = SimpleNamespace(params_dtype=dtype, sequence_parallel=False), torch.Generator().manual_seed(0)
    layer = kind(config, HIDDEN) if kind is HFRMSNorm else AllHeadsNorm(config, HIDDEN // 4, heads=4)
    layer.weight.data = torch.randn(HIDDEN, generator=generator).to(dtype)
    return layer


def test_the_kernel_is_for_half_precision_on_a_gpu_alone() -> None:
    """A CPU keeps Hugging Face's order of roundings, float32 the learner's own gradient."""
    assert not any(layers.rounds_once(torch.zeros(1, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    of_a_gpu = [SimpleNamespace(is_cuda=True, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert [layers.rounds_once(x) for x in of_a_gpu] == [False, True, True]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [HFRMSNorm, AllHeadsNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_once_it_is_no_further_from_float64(kind: type[HFRMSNorm], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and both gradients, relative to the largest element, of rows whose places in memory don't touch."""
    whole = torch.randn(33, 2 * HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = whole[:, :HIDDEN] if kind is HFRMSNorm else whole[:, :HIDDEN].unflatten(1, (4, -1))
    exact_layer = made(kind, torch.float64)
    exact_layer.weight.data = made(kind, dtype).weight.data.double()
    exact = with_gradients(exact_layer, rows.double())
    found = []
    for once in (False, True):
        monkeypatch.setattr(layers, "rounds_once", lambda _, once=once: once)
        results = with_gradients(made(kind, dtype), rows)
        assert [one.dtype for one in results] == [dtype] * 3 and [one.shape for one in results] == [one.shape for one in exact]
        found.append([float((one.double() - truth).abs().max() / truth.abs().max()) for one, truth in zip(results, exact, strict=True)])
    twice, once = found
    assert all(one <= 1.5 * other for one, other in zip(once, twice, strict=True)), found
    assert once[0] < twice[0]
