"""Attention of half precision on a GPU: what torch's variable-length kernel is asked is what `packed_attention` computes.

The kernel runs on CUDA alone. A stand-in computes the same a sequence at a time, takes what the installed function's own signature binds,
and refuses what the kernel refuses (torch's flash_api.cpp). On the meta device the call goes through torch's operator itself, forward and
backward, which checks it against the operator's types and computes nothing.

The last test has a GPU compute it: `python -m pytest -m slow tests/learner/test_variable_length_attention.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from evenkeel.learner.model import attention
from evenkeel.learner.model.attention import PackedAttention, choose_kernel, pack, packed_attention, variable_length_attention
from evenkeel.learner.model.inputs import RowLayout
from tests.learner.learner_cases import gradients, largest_difference, learner_on, random_batch, save_model

LENGTHS = (1, 7, 7, 33, 1, 130, 12)
"""Of one token, of equal lengths next to each other, and longer than float32 is widened for on a CPU."""
LARGEST_HEAD = 256
TORCHS_OWN = inspect.signature(varlen.varlen_attn)


def by_sequence(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *, scale: float | None,
    window_size: tuple[int, int], enable_gqa: bool, **unused: None,
) -> Tensor:  # fmt: skip
    """What torch documents of varlen_attn, by one SDPA for each sequence; its window is (keys to the left, keys to the right)."""
    assert not any(unused.values()), "for inference, or for another result"
    assert len({x.dtype for x in (query, key, value)}) == 1 and all(x.stride(-1) == 1 for x in (query, key, value))
    assert query.shape[-1] % 8 == 0 and query.shape[-1] <= LARGEST_HEAD
    assert enable_gqa or query.shape[1] == key.shape[1]
    for bounds, longest in ((cu_seq_q, max_q), (cu_seq_k, max_k)):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous() and type(longest) is int
        assert int(bounds[0]) == 0 and int(bounds[-1]) == len(query) and int(bounds.diff().max()) == longest
    left, right = window_size
    outputs = []
    for (first, end), (first_key, end_key) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        places, key_places = torch.arange(end - first)[:, None], torch.arange(end_key - first_key)
        before = places + (end_key - first_key) - (end - first) - key_places
        is_met = ((before <= left) | (left < 0)) & ((-before <= right) | (right < 0))
        q, k, v = (x.transpose(0, 1)[None] for x in (query[first:end], key[first_key:end_key], value[first_key:end_key]))
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=is_met, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of each call, by the names that torch's function has for them; its defaults included."""
    made: list[dict[str, Any]] = []

    def stand_in(*arguments: Any, **by_name: Any) -> Tensor:
        call = TORCHS_OWN.bind(*arguments, **by_name)
        call.apply_defaults()
        made.append(call.arguments)
        return by_sequence(**call.arguments)

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    return made


def inputs_of(heads: int, groups: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Query, key and value as a layer has them: cut from one product's rows, so that neighbouring rows don't touch."""
    width, rows = 16, sum(LENGTHS)
    made = torch.randn(rows, (heads + 2 * groups) * width, dtype=torch.float64, generator=torch.Generator().manual_seed(heads + groups))
    parts = torch.split(made.to(device, dtype), [heads * width, groups * width, groups * width], dim=-1)
    return [part.view(rows, -1, width).detach().requires_grad_() for part in parts]


Kernel = Callable[..., Tensor]


def with_gradients(kernel: Kernel, inputs: list[Tensor], scale: float | None) -> list[Tensor]:
    device = inputs[0].device
    output = kernel(*inputs, pack(RowLayout(LENGTHS), device)[1], scale)
    slope = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(device, output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, slope)]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_the_kernel_is_asked_for_what_packed_attention_computes(
    calls: list[dict[str, Any]], heads: int, groups: int, scale: float | None
) -> None:
    """Causal within each sequence, with grouped key heads: outputs and gradients to 1e-12 in float64."""
    inputs = inputs_of(heads, groups, torch.float64)
    ours = with_gradients(variable_length_attention, inputs, scale)
    theirs = with_gradients(packed_attention, inputs, scale)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    (call,) = calls
    assert call["window_size"] == (-1, 0), "torch's word for causal"
    assert (call["max_q"], call["max_k"], call["scale"]) == (130, 130, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_s_operator_takes_the_call_in_half_precision(dtype: torch.dtype) -> None:
    """Shapes and types of what comes out, of both passes, on the meta device. What is no integer would be refused as the longest."""
    inputs = [one.detach().to("meta").requires_grad_() for one in inputs_of(4, 2, dtype)]
    output, *found = with_gradients(variable_length_attention, inputs, None)
    assert (output.shape, output.dtype) == (inputs[0].shape, dtype)
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, dtype) for one in inputs]


def test_half_precision_on_a_gpu_is_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """By where the rows are and not by what the machine has: a learner on the CPU of a machine with a GPU has rows on a CPU."""
    assert {choose_kernel("cuda", dtype) for dtype in (torch.bfloat16, torch.float16)} == {variable_length_attention}
    others = {choose_kernel("cuda", torch.float32), choose_kernel("cpu", torch.float32), choose_kernel("cpu", torch.bfloat16)}
    assert others == {packed_attention}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    layer = PackedAttention(SimpleNamespace(params_dtype=torch.bfloat16), 1, None, None)
    inputs = inputs_of(4, 2, torch.bfloat16)
    packed = pack(RowLayout(LENGTHS), torch.device("cpu"))[1]
    assert torch.equal(layer(*inputs, None, packed), packed_attention(*inputs, packed, None).flatten(1))


def test_a_whole_step_by_the_kernel(calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron's layers hand over (strides, scale, bounds of a micro-batch) suits the kernel, and its gradient comes back."""
    folder = save_model(tmp_path / "m", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    batch, found = random_batch(groups=3), []
    for kernel in (packed_attention, variable_length_attention):
        monkeypatch.setattr(attention, "choose_kernel", lambda *_, kernel=kernel: kernel)
        with learner_on(folder, dtype="float32", shared_prompts=False, learning_rate=0.0, clip_grad=0.0) as learner:
            learner.supervised_step(batch.token_ids, batch.offsets, batch.loss_mask)
            found.append((learner.logprobs(batch), gradients(learner)))
    assert calls and all(call["enable_gqa"] for call in calls)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=2e-6)
    assert largest_difference(found[1][1], found[0][1]) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's variable-length kernel runs on CUDA alone")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_the_kernel_itself_on_a_gpu(dtype: torch.dtype, heads: int, groups: int) -> None:
    """No further from float64 on a CPU, relative to the largest element, than four times SDPA in the same type on the same GPU."""
    exact = with_gradients(packed_attention, [x.detach().double().cpu().requires_grad_() for x in inputs_of(heads, groups, dtype)], None)
    inputs = inputs_of(heads, groups, dtype, "cuda")
    ours, usual = (with_gradients(kernel, inputs, None) for kernel in (variable_length_attention, packed_attention))
    for one, other, true in zip(ours, usual, exact, strict=True):
        off, usually_off = (float((x.cpu().double() - true).abs().max() / true.abs().max()) for x in (one, other))
        assert off <= 4 * max(usually_off, torch.finfo(dtype).eps)
