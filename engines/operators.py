"""Batch-invariant operators: the result for a row depends on that row alone, not on the batch, its size, padding, packing, or (up to two)
threads.

Torch's own matrix products choose their kernel, and with it the order of additions, by the number of rows, and SDPA by the length. Here

* a matrix product never has so few rows that another kernel is chosen, nor adds up so many products at once that threads share them
  (found by measurement, checked by `processor` at start-up);
* a contraction over keys goes in blocks of BLOCK keys, added one after the other; a block that a row does not see adds exact zeros, so that
  computing or skipping it gives the same result: decode, prefill and training agree;
* SiLU is made of torch.exp, since torch's own SiLU computes the last few elements of a stretch by another exp than the others.

Row-independent in torch as they are: exp, rsqrt, cos, means and sums over the last dimension, log_softmax, everything element by element.
Float32 and bfloat16 on a CPU, products in float32 for both; elsewhere they are correct, but nothing is promised of their last bits.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Keys that are contracted in one piece. Beyond 192 the product itself would change its order with the length."""
FEW_ROWS = 64
"""A matrix product of fewer rows has them padded to a multiple of ROW_MULTIPLE: MKL takes other kernels below 4 rows a thread on AMD's
processors, and below 16 rows on Intel's with AVX-512."""
ROW_MULTIPLE = 16
LONGEST_INNER = 512
"""A longer contraction goes in pieces of this size, added one after the other: on Intel's processors with AVX-512 MKL divides one of 896
between two threads, in a way that depends on the number of rows. One of 768 it does not."""
LEAST_ROWS = 4
"""Least rows of a product in a batch of products: one thread computes each, so that 4 rows are enough."""
COLUMN_MULTIPLE = 64
"""SGLang pads its vocabulary to a multiple of this; the learner's head has to be as wide."""
QUERY_CHUNK = 128
"""Queries whose scores exist at the same time, a multiple of BLOCK: bounds memory, and skips keys that none of them sees."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, parts: int = 1) -> Tensor:
    """x @ weight.T, then + bias as an addition of its own (a fused one starts from the bias: another order).

    Args:
        x: [..., K]; weight: [N, K]; bias: [N].
        parts: equal pieces of K whose products are added one after the other: what as many ranks do that hold a piece each.
    Returns: [..., N]; differentiable. In half precision the product is one of float32, rounded once.
    """
    y = product(x, weight, parts=parts).to(x.dtype)
    return y if bias is None else y + bias


def product(x: Tensor, weight: Tensor, *, parts: int = 1) -> Tensor:
    """x @ weight.T as in `linear`, in float32 where x and weight are in half precision; only the gradient is then computed in that."""
    if parts > 1:
        return reduce(torch.add, (product(a, b) for a, b in zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)))
    if x.dtype.itemsize < 4:
        result: Tensor = _HalfPrecisionProduct.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's own lack of types
        return result
    rows = x.shape[:-1].numel()
    padded = pad_rows(x.reshape(rows, x.shape[-1]))
    pieces = zip(torch.split(padded, LONGEST_INNER, -1), torch.split(weight, LONGEST_INNER, -1), strict=True)
    return reduce(torch.add, (F.linear(a, b) for a, b in pieces))[:rows].view(*x.shape[:-1], weight.shape[0])


class _HalfPrecisionProduct(torch.autograd.Function):
    """Keeps x and weight for the gradient as they are: no copies in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def pad_rows(x: Tensor) -> Tensor:
    """[M, K] with zero rows added if M is small: to a multiple of ROW_MULTIPLE."""
    rows = x.shape[0]
    padding = -rows % ROW_MULTIPLE if rows < FEW_ROWS else 0
    return F.pad(x, (0, 0, 0, padding)) if padding else x


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[M, N] float32 logits of hidden [M, K] and the N rows of a head, computed as if it had a multiple of COLUMN_MULTIPLE rows.

    In half precision they are not rounded to it.
    """
    columns = weight.shape[0]
    padding = -columns % COLUMN_MULTIPLE
    if padding:
        weight = F.pad(weight, (0, 0, 0, padding))
    return product(hidden, weight)[:, :columns]


def log_softmax(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """log softmax(logits / temperature) over the last dimension; [M, N] float32, temperature a number or [M, 1] float32."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def restrict(logits: Tensor, counts: Tensor, ids: Tensor, *, start: int = 0) -> Tensor:
    """The logits, in place, with minus infinity for all that is outside of each row's kept set: a softmax is then over the kept set alone.

    (Of large negative numbers in its place exponentials take four times as long on a CPU.)

    Args:
        logits: [M, N] float32, of the tokens from `start` on.
        counts: [M] integers: size of each row's kept set; 0: the whole vocabulary, and the row stays as it is.
        ids: [sum of counts] integers, tokens of the sets, one row's after the other's.
    """
    rows = torch.repeat_interleave(torch.arange(len(counts), device=logits.device), counts)
    columns = ids.long() - start
    here = (columns >= 0) & (columns < logits.shape[1])
    rows, columns = rows[here], columns[here]
    inside = logits[rows, columns]
    logits.index_fill_(0, counts.nonzero()[:, 0], -torch.inf)
    logits[rows, columns] = inside
    return logits


class _SiLU(torch.autograd.Function):
    """x / (1 + exp(-x)); where exp(-x) overflows the quotient is -0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float() if x.dtype.itemsize < 4 else x
        return (wide / torch.neg(wide).exp_().add_(1.0)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad: Tensor = torch.ops.aten.silu_backward(grads[0], x)
        return grad


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), of any shape and layout; differentiable."""
    result: Tensor = _SiLU.apply(x)  # type: ignore[no-untyped-call]  # torch's own lack of types
    return result


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(query key^T * scale + bias) value, for R query heads to a key head. Without gradient; in float32, rounded at the end.

    Args:
        query: [B, G, R, Q, D]; key, value: [B, G, L, D], L a multiple of BLOCK, finite everywhere.
        bias: broadcasts to [B, G, R, Q, L]: 0 where a query sees a key, -inf where not; each query sees at least one.
    Returns: [B, G, R, Q, D], and [B, G, R, Q]: log of the sum of exponentials, which a gradient needs.
    """
    dtype, query, key, value = query.dtype, query.float(), key.float(), value.float()
    batch, groups, heads, queries, size = query.shape
    length, rows = key.shape[2], heads * queries
    blocks = length // BLOCK
    flat = (query * scale).reshape(batch * groups, rows, size)
    if rows < LEAST_ROWS:
        flat = F.pad(flat, (0, 0, 0, LEAST_ROWS - rows))
    keys, values = key.reshape(batch * groups, length, size), value.reshape(batch * groups, length, size)
    scores = torch.bmm(flat, keys.transpose(1, 2))
    # Zero rows that were added keep their scores of 0: nobody looks at them. A view, so that what follows happens in place.
    weights = scores.view(batch, groups, -1, length)[:, :, :rows].view(batch, groups, heads, queries, length)
    weights += bias
    largest = weights.amax(-1, keepdim=True)  # a maximum has no order
    weights -= largest
    weights.exp_()
    sums = weights.view(batch, groups, heads, queries, blocks, BLOCK).sum(-1)
    total, out = sums[..., 0], torch.bmm(scores[:, :, :BLOCK], values[:, :BLOCK])
    for start in range(BLOCK, length, BLOCK):
        total = total + sums[..., start // BLOCK]
        out.baddbmm_(scores[:, :, start : start + BLOCK], values[:, start : start + BLOCK])
    output = out[:, :rows].view(batch, groups, heads, queries, size) / total[..., None]
    return output.to(dtype), total.log() + largest[..., 0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """weight * (x / sqrt(mean(x^2) + eps)) over the last dimension, the quotient from float32 and rounded before the product.

    Returns: the norm; the quotient in x's dtype; and 1 / sqrt(...), float32 [..., 1]: what a gradient needs.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normal = (wide * scale).to(x.dtype)
    return weight * normal, normal, scale


def key_bias(seen: Tensor) -> Tensor:
    """0 where seen, -inf elsewhere; float32, of the same shape."""
    return torch.where(seen, 0.0, float("-inf"))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, *, first: int = 0) -> tuple[Tensor, Tensor]:
    """`attention` of queries at the positions first, first + 1, ...; each sees the keys up to its own. Without gradient.

    Args:
        query: [B, G, R, Q, D]; key, value: [B, G, L, D] with L >= first + Q, a multiple of BLOCK.
    """
    outputs, sums = [], []
    for start in range(0, query.shape[3], QUERY_CHUNK):
        piece = query[:, :, :, start : start + QUERY_CHUNK]
        positions = torch.arange(first + start, first + start + piece.shape[3], device=query.device)
        length = whole_blocks(first + start + piece.shape[3])
        bias = key_bias(torch.arange(length, device=query.device) <= positions[:, None])
        output, log_sum = attention(piece, key[:, :, :length], value[:, :, :length], bias, scale)
        outputs.append(output)
        sums.append(log_sum)
    return (outputs[0], sums[0]) if len(outputs) == 1 else (torch.cat(outputs, 3), torch.cat(sums, 3))


def whole_blocks(length: int) -> int:
    """The length, rounded up to a multiple of BLOCK."""
    return -(-length // BLOCK) * BLOCK
