"""The experts of a rank at once say what Megatron's say one after the other, and a GPU's kernel what the loop says."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evenkeel.correction.correct import defer
from evenkeel.learner.model.layers import GroupedExperts, _by_kernel, _by_loop, grouped_product
from evenkeel.learner.model.megatron import SequentialMLP
from tests.learner.learner_cases import TIS, learner_on, random_batch
from tests.learner.moe_cases import EXPERTS, save_moe

RUNS = [[3, 0, 5, 2], [0, 0, 0, 7], [1, 1, 1, 1]]


def with_gradients(product: object, x: Tensor, weights: list[Tensor], rows: list[int]) -> list[Tensor]:
    inputs = [x.clone().requires_grad_(), *(weight.clone().requires_grad_() for weight in weights)]
    output = product(inputs[0], inputs[1:], torch.tensor(rows))  # type: ignore[operator]
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), inputs)]


@pytest.mark.parametrize("rows", RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_and_loop_are_the_same_products(dtype: torch.dtype, rows: list[int]) -> None:
    """torch has the kernel's operator on a CPU, too. Runs without rows leave a gradient of zeros."""
    torch.manual_seed(0)
    x, weights = torch.randn(sum(rows), 16, dtype=dtype), [torch.randn(8, 16, dtype=dtype) for _ in rows]
    by_kernel, by_loop = (with_gradients(product, x, weights, rows) for product in (_by_kernel, _by_loop))
    run_of_row = [run for run, count in enumerate(rows) for _ in range(count)]
    expected = torch.stack([weights[run] @ row for run, row in zip(run_of_row, x, strict=True)])
    tolerance = {"rtol": 0.02, "atol": 0.05} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(by_loop[0], expected, **tolerance)
    for ours, theirs in zip(by_kernel, by_loop, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    assert torch.equal(grouped_product(x, weights, torch.tensor(rows)), by_loop[0]), "which is the loop on a CPU"


def test_the_kernel_s_copy_of_the_matrices_is_not_kept() -> None:
    """For the backward pass there are what went in and where the runs end: the stack would be all experts of every layer a second time."""
    x, weights = torch.randn(10, 16, requires_grad=True), [torch.randn(8, 16, requires_grad=True) for _ in range(4)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor):
        _by_kernel(x, weights, torch.tensor([3, 0, 5, 2]))
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, *weights)}
    assert [tensor.tolist() for tensor in kept if tensor.untyped_storage().data_ptr() not in own] == [[3, 3, 8, 10]]


@pytest.mark.parametrize("rows", [[4, 0, 7, 1, 0, 3, 2, 5], [0] * EXPERTS, [1] * EXPERTS])
def test_experts_at_once_equal_megatron_s_one_by_one(tmp_path: Path, rows: list[int]) -> None:
    """To the bit, gradients of every expert included."""
    with learner_on(save_moe(tmp_path / "m")) as learner:
        experts = learner._policies[0].decoder.layers[0].mlp.experts
        assert type(experts) is GroupedExperts
        hidden, weights = torch.randn(sum(rows), 32, requires_grad=True), torch.rand(sum(rows), requires_grad=True)
        parameters = list(experts.parameters())
        assert len(parameters) == 2 * EXPERTS
        found = []
        for forward in (GroupedExperts.forward, SequentialMLP.forward):
            output, bias = forward(experts, hidden, torch.tensor(rows), weights)
            assert bias is None
            found.append([output, *torch.autograd.grad(output.square().sum(), [hidden, weights, *parameters])])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_of_a_pass_is_alive_after_a_step(tmp_path: Path, recompute: bool) -> None:
    """No tensor with a row for each token. Megatron's dispatcher would keep its routes, and with recomputed activations their layer's input
    and its gradient."""
    batch = random_batch()
    with learner_on(save_moe(tmp_path / "m"), recompute_activations=recompute, shared_prompts=False) as learner:
        learner.step(defer(batch, TIS), TIS, step=0)
        gc.collect()
        rows = batch.num_tokens - (len(batch.offsets) - 1)  # nothing is predicted from a sequence's last token
        left = [tuple(x.shape) for x in gc.get_objects() if isinstance(x, Tensor) and x.dim() > 1 and x.shape[0] == rows]
    assert left == []
