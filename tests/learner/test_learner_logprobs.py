"""The chunked head against torch.log_softmax: values, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from evenkeel.learner.training import logprobs
from evenkeel.learner.training.logprobs import head_logprobs


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax((hidden @ weight.t()) / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def case(seed: int = 0, count: int = 23, width: int = 16, vocab: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(count, width, generator=generator), torch.randn(vocab, width, generator=generator)
    return hidden, weight, torch.randint(0, vocab, (count,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("wanted", ["logprobs", "entropies", "both"])
def test_values_and_gradients_equal_log_softmax(temperature: float, chunk: int, wanted: str) -> None:
    hidden, weight, targets = case()
    factors = torch.randn(2, len(targets), generator=torch.Generator().manual_seed(1))
    results = []
    for function, options in ((head_logprobs, {"temperature": temperature, "chunk_tokens": chunk}), (plain, {"temperature": temperature})):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropies = function(h, w, targets, **options)
        loss = (factors[0] * logprobs).sum() * (wanted != "entropies") + (factors[1] * entropies).sum() * (wanted != "logprobs")
        if wanted == "logprobs":
            loss = (factors[0] * logprobs).sum()
        elif wanted == "entropies":
            loss = (factors[1] * entropies).sum()
        loss.backward()
        results.append((logprobs.detach(), entropies.detach(), h.grad, w.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cached", [1, 130, 1 << 21])
def test_a_table_larger_than_the_cache_gives_the_same_bits(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's softmax is its own, however many rows are taken at a time: 1, 2 and 7 of a chunk here."""
    results = []
    for size in (cached, 1 << 21):
        monkeypatch.setattr(logprobs, "CACHED", size)
        hidden, weight, targets = (tensor.clone() for tensor in case())
        values = head_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets, temperature=0.7, chunk_tokens=7)
        torch.autograd.backward(values, [torch.linspace(-1, 1, 23), torch.linspace(1, 2, 23)])
        results.append([*(value.detach() for value in values), hidden.grad, weight.grad])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("chunk", [5, 1000])
def test_several_targets_at_a_position_equal_log_softmax(chunk: int) -> None:
    """Sampled token and top-K ids in one pass: values, and gradients of a loss that weighs every column, entropy included."""
    hidden, weight, _ = case()
    generator = torch.Generator().manual_seed(2)
    targets = torch.stack([torch.randperm(50, generator=generator)[:6] for _ in hidden])
    targets[:, 1] = targets[:, 0]  # the sampled token is mostly among the K: its gradients add up
    factors, entropy_factors = torch.randn(targets.shape, generator=generator), torch.randn(len(targets), generator=generator)
    results = []
    for is_ours in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if is_ours:
            logprobs, entropies = head_logprobs(h, w, targets, temperature=0.7, chunk_tokens=chunk)
        else:
            log_p = torch.log_softmax(h @ w.t() / 0.7, -1)
            logprobs, entropies = log_p.gather(1, targets), -(log_p.exp() * log_p).sum(-1)
        ((factors * logprobs).sum() + (entropy_factors * entropies).sum()).backward()
        results.append((logprobs.detach(), entropies.detach(), h.grad, w.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_float64_gradients_by_finite_differences() -> None:
    """Independent of any formula for the derivative: central differences of the function itself."""
    hidden, weight, targets = case(count=4, width=5, vocab=7)

    def total(h: Tensor, w: Tensor) -> Tensor:
        logprobs, entropies = head_logprobs(h, w, targets, temperature=0.8, chunk_tokens=3)
        return (logprobs * torch.arange(1.0, 5.0)).sum() + (entropies * torch.arange(4.0, 0.0, -1.0)).sum()

    hidden.requires_grad_()
    total(hidden, weight).backward()
    step = 1e-2
    for row, column in [(0, 0), (2, 3), (3, 4)]:
        shift = torch.zeros_like(hidden)
        shift[row, column] = step
        difference = (total(hidden.detach() + shift, weight) - total(hidden.detach() - shift, weight)) / (2 * step)
        assert float(difference) == pytest.approx(float(hidden.grad[row, column]), rel=2e-2, abs=2e-2)


def test_padded_rows_of_the_vocabulary_take_no_part() -> None:
    hidden, weight, targets = case()
    padded = torch.cat([weight, torch.full((14, 16), 1e4)]).requires_grad_()
    logprobs, entropies = head_logprobs(hidden, padded, targets, vocab_size=50)
    expected, expected_entropies = plain(hidden, weight, targets, 1.0)
    torch.testing.assert_close(logprobs.detach(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.detach(), expected_entropies, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    assert torch.equal(padded.grad[50:], torch.zeros(14, 16))


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    hidden, weight, targets = case()
    weight.requires_grad_()
    logprobs, entropies = head_logprobs(hidden[:0], weight, targets[:0])
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


class LiveBytes(TorchDispatchMode):
    """The most bytes that were alive at the same time after any operation, in storages made under this mode."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self._inputs = {tensor.untyped_storage()._cdata for tensor in inputs}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        # Of those; some may be gone.
        self._bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in self._inputs:
                self._bytes += storage.nbytes() - self._alive.get(storage._cdata, (None, 0))[1]
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self._bytes > self.peak:  # or else they are no more than that, with those that are gone
            self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
            self._bytes = sum(size for _, size in self._alive.values())
            self.peak = max(self.peak, self._bytes)
        return out


def peaks(function: Any, dtype: torch.dtype, count: int, width: int, vocab: int, **options: Any) -> tuple[int, int]:
    """Peak live bytes of the forward pass, and of both passes together; the loss needs logprobs and entropies."""
    hidden, weight, targets = case(count=count, width=width, vocab=vocab)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    with LiveBytes(hidden, weight, targets) as probe:
        logprobs, entropies = function(hidden, weight, targets, **options)
        forward = probe.peak
        torch.autograd.backward([logprobs, entropies], [torch.ones(()).expand(count)] * 2)
    return forward, probe.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "width", "vocab", "chunk"), [(600, 16, 512, 48), (3000, 8, 256, 16), (90, 64, 1000, 32)])
def test_peak_memory_is_what_the_formula_says(dtype: torch.dtype, count: int, width: int, vocab: int, chunk: int) -> None:
    """The formula of the module's docstring, C = 1: not exceeded by more than the few numbers per chunk, and no loose bound either.

    The plain way through the same probe exceeds it, so that the probe can tell."""
    table, kept, per_chunk = chunk * vocab, 4 * count * 3, 100 * chunk
    forward = 8 * table + kept
    if dtype is torch.float32:
        backward = 8 * table + kept + 4 * count * width + 4 * vocab * width
    else:
        backward = kept + 2 * count * width + max(8 * table + 4 * vocab * width, 2 * table + 6 * vocab * width)
    measured = peaks(head_logprobs, dtype, count, width, vocab, chunk_tokens=chunk)
    assert forward <= measured[0] <= forward + per_chunk
    assert backward <= measured[1] <= backward + per_chunk
    naive = peaks(plain, dtype, count, width, vocab, temperature=1.0)
    assert naive[0] > forward + per_chunk and naive[1] > backward + per_chunk
