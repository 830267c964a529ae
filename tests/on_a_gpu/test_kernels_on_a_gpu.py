"""What a GPU computes of our own: the same as the CPU, bit for bit where the arithmetic is exact, and within its type's rounding elsewhere.

These need a GPU, and are skipped without one: `python -m pytest -m slow tests/on_a_gpu`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from evenkeel.correction import PRESETS, CorrectionConfig, correct, policy_loss, settle
from evenkeel.engines.float8_format import BLOCK
from evenkeel.engines.weights import ROW_WORDS, dequantised, quantised, tensor_checksum
from evenkeel.learner.model.layers import AllHeadsNorm, HFRMSNorm, _by_loop, grouped_product
from tests.correction.fixtures import random_batch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_checksums_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """Of sizes below, at and beyond a sum's, of sizes that are no multiple of eight bytes, and of a view that isn't contiguous."""
    generator = torch.Generator().manual_seed(0)
    words_per_row = ROW_WORDS * 8 // torch.empty(0, dtype=dtype).element_size()
    for count in (1, 7, 4096, words_per_row, 200 * words_per_row + 3):
        tensor = torch.randn(count, generator=generator).to(dtype)
        assert tensor_checksum(tensor.to(DEVICE)) == tensor_checksum(tensor)
    matrix = torch.randn(300, 200, generator=generator).to(dtype)
    assert tensor_checksum(matrix.to(DEVICE).t()) == tensor_checksum(matrix.t())


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (1, 1)])
def test_float8_is_rounded_as_on_the_cpu(shape: tuple[int, int]) -> None:
    """Values and scales, bit for bit: engines compare them by checksum."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for block in (BLOCK, 0):
        (values, scales), (here, scales_here) = quantised(weight.to(DEVICE), block), quantised(weight, block)
        assert torch.equal(values.cpu().view(torch.uint8), here.view(torch.uint8)) and torch.equal(scales.cpu(), scales_here)
        back = dequantised(values, scales, block, torch.bfloat16).cpu()
        assert torch.equal(back, dequantised(here, scales_here, block, torch.bfloat16))


def with_gradients(product: object, x: Tensor, weights: list[Tensor], rows: list[int]) -> list[Tensor]:
    inputs = [x.clone().requires_grad_(), *(weight.clone().requires_grad_() for weight in weights)]
    output = product(inputs[0], inputs[1:], torch.tensor(rows))  # type: ignore[operator]
    slope = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output.device, output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, slope)]


@pytest.mark.parametrize("rows", [[3, 0, 5, 2], [0, 0, 0, 7], [1, 1, 1, 1], [700, 0, 1, 300]])
def test_experts_by_one_kernel(rows: list[int]) -> None:
    """torch's grouped product in bfloat16, no further from float64 than four times one product for each expert on the same GPU."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(rows), 64, generator=generator).to(DEVICE, torch.bfloat16)
    weights = [torch.randn(96, 64, generator=generator).to(DEVICE, torch.bfloat16) for _ in rows]
    exact = with_gradients(_by_loop, x.double().cpu(), [weight.double().cpu() for weight in weights], rows)
    by_kernel, by_loop = (with_gradients(product, x, weights, rows) for product in (grouped_product, _by_loop))
    for ours, theirs, truth in zip(by_kernel, by_loop, exact, strict=True):
        largest = float(truth.abs().max()) or 1.0
        off, usual = (float((one.double().cpu() - truth).abs().max()) / largest for one in (ours, theirs))
        assert off <= 4 * usual + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [HFRMSNorm, AllHeadsNorm])
def test_norms_are_rounded_once(kind: type[HFRMSNorm], dtype: torch.dtype) -> None:
    """The output is float64's, rounded once, but for a unit in the last place; the gradients are no further from float64 than a rounding of
    each of their parts. Of rows that are a view of a wider product, as queries and keys are."""
    generator, width = torch.Generator().manual_seed(4), 256
    whole = torch.randn(65, 3 * width, generator=generator).to(dtype)
    rows = whole[:, width : 2 * width].unflatten(1, (2, -1)) if kind is AllHeadsNorm else whole[:, width : 2 * width]
    weight = torch.randn(width, generator=generator).to(dtype)
    found = []
    for device, type_of in (("cpu", torch.float64), (DEVICE, dtype)):
        config = SimpleNamespace(params_dtype=type_of, sequence_parallel=False)
        layer = AllHeadsNorm(config, width // 2, heads=2) if kind is AllHeadsNorm else HFRMSNorm(config, width)
        layer.weight.data = weight.to(device, type_of)
        x = whole.to(device, type_of)[:, width : 2 * width].view(rows.shape).requires_grad_()
        output = layer(x)
        slope = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(device, type_of)
        found.append([output.detach(), *torch.autograd.grad(output, [x, layer.weight], slope)])
    exact, there = found
    unit = torch.finfo(dtype).eps
    assert all(one.dtype == dtype for one in there)
    assert bool(((there[0].cpu().double() - exact[0]).abs() <= unit * exact[0].abs() + 1e-6).all())
    for ours, theirs in zip(there[1:], exact[1:], strict=True):
        assert float((ours.cpu().double() - theirs).abs().max()) <= 4 * unit * float(theirs.abs().max())


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_on_a_gpu(preset: str) -> None:
    """Weights, masks, loss and gradient of a batch in float64, to 1e-9 of what the CPU has."""
    config = CorrectionConfig(preset=preset)
    batch, target = random_batch(3, sequences=24, longest=40, topk=8)
    found = []
    for device in ("cpu", DEVICE):
        logprobs = target.to(device).requires_grad_()
        corrected = settle(correct(batch.to(device), config), logprobs, config)
        listed = torch.log(torch.full((len(target), 8), 0.01, dtype=torch.float64, device=device))
        loss = policy_loss(corrected, logprobs, config, target_topk_logprobs=listed)
        (gradient,) = torch.autograd.grad(loss.loss, logprobs)
        found.append([corrected.importance_weights, corrected.keep_mask, corrected.token_scale, loss.loss.detach(), gradient])
    for here, there in zip(*found, strict=True):
        assert there.device.type == DEVICE
        torch.testing.assert_close(there.cpu(), here, rtol=1e-9, atol=1e-12)
