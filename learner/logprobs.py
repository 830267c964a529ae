"""Logprobs and entropy of sampled tokens, from hidden states, without the logits of a whole batch in memory.

The head is applied to `chunk_tokens` tokens at a time, forward and again backward, and split over the vocabulary under tensor
parallelism. Peak memory beyond inputs and outputs: chunk_tokens * rows of the head on the rank * 4 bytes * 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from correction.invariance.operators import head_logits, log_softmax


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = 1024,
    fixed_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of that distribution; both differentiable.

    Args:
        hidden: [M, H], the position that predicts each target.
        weight: [V / ranks, H], this rank's rows of the head.
        targets: [M] or [M, C] int64, ids in the whole vocabulary: one or several looked up at each position.
        vocab_size: real tokens; rows of the head beyond it are padding and take no part.
        group: ranks that hold the other rows; None: this rank holds all.
        fixed_order: compute the logprobs as a sampler of fixed order does; the logits of all ranks are then on each.
    Returns: float32 logprobs in the shape of targets, and [M] float32 entropies, in nats.
    """
    ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    start = rank * weight.shape[0]
    vocab_size = weight.shape[0] * ranks if vocab_size is None else vocab_size
    real_rows = min(max(vocab_size - start, 0), weight.shape[0])
    columns = targets[:, None] if targets.dim() == 1 else targets
    results: tuple[Tensor, Tensor] = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's own lack of types
        hidden, weight[:real_rows], columns, temperature, start, group if ranks > 1 else None, chunk_tokens, fixed_order
    )
    logprobs, entropies = results
    return logprobs.view(targets.shape), entropies


class _HeadLogprobs(torch.autograd.Function):
    """With z the logits over temperature, p = softmax(z), H = -sum p log p:  d logp/dz = onehot - p,  dH/dz = -p (log p + H).

    Of several targets with gradients g_c:  sum_c g_c onehot_c - (sum_c g_c) p.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        start: int,
        group: Any,
        chunk_tokens: int,
        fixed_order: bool,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        entropies, normalizers = (torch.empty(count, dtype=torch.float32, device=hidden.device) for _ in range(2))
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        for chunk in _chunks(count, chunk_tokens):
            if fixed_order:
                values = _fixed_order_values(hidden[chunk], weight, targets[chunk], temperature, group)
                logprobs[chunk], entropies[chunk], normalizers[chunk] = values
                continue
            logits = scaled_logits(hidden[chunk], weight, temperature)
            largest = _all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
            logits -= largest[:, None]
            local, is_local = _local_ids(targets[chunk], start, weight.shape[0])
            target_logits = torch.where(is_local, logits.gather(-1, local), 0.0)
            exponentials = logits.exp()
            sums = torch.stack([exponentials.sum(-1), (exponentials.mul_(logits)).sum(-1), *target_logits.unbind(-1)])
            total, weighted, *columns = _all_reduce(sums, group, dist.ReduceOp.SUM)
            log_total = total.log()
            logprobs[chunk] = torch.stack(columns, -1) - log_total[:, None]
            entropies[chunk] = log_total - weighted / total
            normalizers[chunk] = log_total + largest
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropies)
        ctx.settings = temperature, start, group, chunk_tokens, fixed_order
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers, entropies = ctx.saved_tensors
        temperature, start, group, chunk_tokens, fixed_order = ctx.settings
        logprob_grad, entropy_grad = grads
        hidden_grad, weight_grad = torch.zeros_like(hidden), torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in _chunks(hidden.shape[0], chunk_tokens):
            if fixed_order and hidden.dtype != torch.float32:  # its logits were not rounded, so the normalizers belong to no others
                log_p = head_logits(hidden[chunk], weight).div(temperature).sub_(normalizers[chunk, None])
            else:
                log_p = scaled_logits(hidden[chunk], weight, temperature).sub_(normalizers[chunk, None])
            if entropy_grad is None:
                grad = log_p.exp_()
                grad *= 0.0 if logprob_grad is None else -logprob_grad[chunk].sum(-1, keepdim=True)
            else:
                slope = log_p.add(entropies[chunk, None]).mul_(entropy_grad[chunk, None])
                if logprob_grad is not None:
                    slope += logprob_grad[chunk].sum(-1, keepdim=True)
                grad = log_p.exp_().mul_(slope).neg_()
            if logprob_grad is not None:
                local, is_local = _local_ids(targets[chunk], start, weight.shape[0])
                grad.scatter_add_(-1, local, torch.where(is_local, logprob_grad[chunk], 0.0))
            grad = grad.div_(temperature).to(hidden.dtype)
            torch.mm(grad, weight, out=hidden_grad[chunk])
            weight_grad += grad.t() @ hidden[chunk]
        return _all_reduce(hidden_grad, group, dist.ReduceOp.SUM), weight_grad.to(weight.dtype), None, None, None, None, None, None


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[m, V] float32, divided by the temperature as the sampler does."""
    return (hidden @ weight.t()).float().div_(temperature)


def _fixed_order_values(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """[m, C] logprobs, bit for bit those of a sampler of fixed order; [m] entropies, and [m] log sum exp of the logits over temperature."""
    logits = head_logits(hidden, weight)
    if group is not None:
        logits = _all_gather_columns(logits, group)
    log_p = log_softmax(logits, temperature)
    logprobs = log_p.gather(-1, targets)
    normalizers = logits.gather(-1, targets[:, :1])[:, 0] / temperature - logprobs[:, 0]
    return logprobs, -(log_p.exp() * log_p).sum(-1), normalizers


def _local_ids(targets: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Row of each target on this rank (0 if it has none), and whether it has it."""
    local = targets - start
    is_local = (local >= 0) & (local < rows)
    return torch.where(is_local, local, 0), is_local


def _all_gather_columns(columns: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[m, V] of every rank's [m, n]; n may differ, as it does where the last ranks hold padding."""
    ranks = dist.get_world_size(group)
    counts = [torch.empty(1, dtype=torch.int64, device=columns.device) for _ in range(ranks)]
    dist.all_gather(counts, torch.tensor([columns.shape[1]], device=columns.device), group=group)
    widest = max(int(count) for count in counts)
    padded = F.pad(columns, (0, widest - columns.shape[1]))
    pieces = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(pieces, padded, group=group)
    return torch.cat([piece[:, : int(count)] for piece, count in zip(pieces, counts, strict=True)], 1)


def _all_reduce(tensor: Tensor, group: Any, operation: Any) -> Tensor:
    if group is not None:
        dist.all_reduce(tensor, op=operation, group=group)
    return tensor
