"""Logprobs and entropy of sampled tokens, from hidden states, without the logits of a whole batch in memory.

The head is applied to `chunk_tokens` tokens at a time, forward and again backward, and split over the vocabulary under tensor parallelism.
Between the two passes log p of the last chunk is kept, 4 c V: a batch of one chunk isn't computed twice. A smaller chunk comes first, so
that a whole one is kept.

Peak memory. With c = chunk_tokens, M predictions of C targets each, hidden size H, and V rows of the head on this rank, in bytes:

    forward    8 c V  +  4 M (C + 2)                               logits and their exponentials; results and normalisers
    backward   8 c V  +  4 M (C + 2)  +  4 M H  +  4 V H           log p and its slope; what forward kept; the two gradients

both plus O(c C), and up to 40 for each id of a chunk's kept sets; on a CPU at most 4 CACHED of the second table at a time. In bfloat16
backward has 2 M H, and max(8 c V + 4 V H, 2 c V + 6 V H): a chunk's part of the head's gradient is a tensor of its own, added up in
float32. Padding rows of the vocabulary add a copy of the head's gradient. Where engines/matrix_products.py multiplies, a c up to 512 that
is no multiple of 16 counts as the next one. Only M C and M H grow with the batch; the plain way, log_softmax of all logits, takes 8 M V and
more. (batch_invariant keeps more tables of c V in forward.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from evenkeel.engines.machine import CACHED
from evenkeel.engines.operators import head_logits, log_softmax, restrict

_Values = tuple[Tensor, Tensor, Tensor]
Kept = tuple[Tensor, Tensor]
"""Counts [M] and ids [sum of counts] of kept sets, as PackedBatch's kept_counts and kept_ids."""
# Stands for minus infinity where it is multiplied by a probability of 0.
_LEAST = -1e30


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = 1024,
    batch_invariant: bool = False,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of that distribution; both differentiable.

    Args:
        hidden: [M, H], the position that predicts each target.
        weight: [V / ranks, H], this rank's rows of the head.
        targets: [M] or [M, C] int64, ids in the whole vocabulary: one or several looked up at each position.
        vocab_size: real tokens; rows of the head beyond it are padding and take no part.
        group: ranks that hold the other rows; None: this rank holds all.
        batch_invariant: compute the logprobs as a batch-invariant sampler does; the logits of all ranks are then on each.
        kept: the kept set of each position, over which its softmax is. A target outside of it has a logprob of minus infinity, through
            which no gradient may come.
    Returns: float32 logprobs in the shape of targets, and [M] float32 entropies, in nats.
    """
    ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    start = rank * weight.shape[0]
    vocab_size = weight.shape[0] * ranks if vocab_size is None else vocab_size
    real_rows = min(max(vocab_size - start, 0), weight.shape[0])
    columns = targets[:, None] if targets.dim() == 1 else targets
    if real_rows < weight.shape[0]:  # a slice of everything would copy the gradient
        weight = weight[:real_rows]
    results: tuple[Tensor, Tensor] = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's own lack of types
        hidden, weight, columns, temperature, start, group if ranks > 1 else None, chunk_tokens, batch_invariant, kept
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
        batch_invariant: bool,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        entropies, normalizers = (torch.empty(count, dtype=torch.float32, device=hidden.device) for _ in range(2))
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        log_p = None
        for chunk in _chunks(count, chunk_tokens):
            del log_p  # before the next chunk's logits come
            sets = _sets_of(kept, chunk)
            if batch_invariant:
                values, log_p = _batch_invariant_values(hidden[chunk], weight, targets[chunk], temperature, group, sets), None
            else:
                values, log_p = _values(hidden[chunk], weight, targets[chunk], temperature, start, group, sets)
            logprobs[chunk], entropies[chunk], normalizers[chunk] = values
        ctx.last_log_p = log_p  # backward begins with this chunk, so that it needn't be computed again
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropies, *(kept or ()))
        ctx.settings = temperature, start, group, chunk_tokens, batch_invariant
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers, entropies, *kept = ctx.saved_tensors
        temperature, start, group, chunk_tokens, batch_invariant = ctx.settings
        logprob_grad, entropy_grad = grads
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in reversed(_chunks(hidden.shape[0], chunk_tokens)):
            log_p, ctx.last_log_p = ctx.last_log_p, None
            if log_p is None:
                if batch_invariant and hidden.dtype != torch.float32:
                    # Its logits were not rounded, so the normalizers belong to no others.
                    log_p = head_logits(hidden[chunk], weight).div(temperature)
                else:
                    log_p = scaled_logits(hidden[chunk], weight, temperature)
                log_p = _restricted(log_p, _sets_of(kept, chunk), start).sub_(normalizers[chunk, None])
            grad = _logits_grad(
                log_p,
                entropies[chunk, None],
                None if logprob_grad is None else logprob_grad[chunk],
                None if entropy_grad is None else entropy_grad[chunk, None],
                *_local_ids(targets[chunk], start, weight.shape[0]),
                temperature,
            ).to(hidden.dtype)
            del log_p
            torch.mm(grad, weight, out=hidden_grad[chunk])
            if grad.dtype == weight_grad.dtype:
                weight_grad.addmm_(grad.t(), hidden[chunk])
            else:
                weight_grad += grad.t() @ hidden[chunk]
            del grad  # before the next chunk's logits come
        return _all_reduce(hidden_grad, group, dist.ReduceOp.SUM), weight_grad.to(weight.dtype), *[None] * 7


def _chunks(count: int, size: int) -> list[slice]:
    """At most `size` each; the smaller one, if there is any, is the first."""
    ends = range(count, 0, -size)
    return [slice(max(end - size, 0), end) for end in reversed(ends)]


def _sets_of(kept: Sequence[Tensor] | None, rows: slice) -> Kept | None:
    """The kept sets of some rows."""
    if not kept:
        return None
    counts, ids = kept
    first = int(counts[: rows.start].sum())
    return counts[rows], ids[first : first + int(counts[rows].sum())]


def _restricted(logits: Tensor, kept: Kept | None, start: int) -> Tensor:
    """Logits [m, V] of the tokens from `start` on, in place: minus infinity outside of the kept sets."""
    return logits if kept is None else restrict(logits, *kept, start=start)


def _row_blocks(table: Tensor, group: Any = None) -> list[slice]:
    """Rows of a table [m, V] that are taken through a softmax at a time; all of them where ranks share them, or a GPU has them."""
    in_one = group is not None or table.device.type != "cpu"
    return _chunks(len(table), len(table) if in_one else max(1, CACHED // table.shape[1])) if len(table) else []


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[m, V] float32, divided by the temperature as the sampler does."""
    return (hidden @ weight.t()).float().div_(temperature)


def _values(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, start: int, group: Any, kept: Kept | None
) -> tuple[_Values, Tensor]:
    """What is computed for a chunk of m rows: [m, C] logprobs of the targets, [m] entropies, [m] log sum exp of the logits over
    temperature; and [m, V] log p."""
    logits = _restricted(scaled_logits(hidden, weight, temperature), kept, start)
    local, is_local = _local_ids(targets, start, weight.shape[0])
    blocks = [_normalize(logits[rows], local[rows], is_local[rows], group, kept is not None) for rows in _row_blocks(logits, group)]
    logprobs, entropies, normalizers = (torch.cat(values) for values in zip(*blocks, strict=True))
    return (logprobs, entropies, normalizers), logits


def _normalize(logits: Tensor, local: Tensor, is_local: Tensor, group: Any, is_restricted: bool) -> _Values:
    """What `_values` computes, of some rows, [n, V], which become log p in place."""
    largest = _all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
    logits -= largest[:, None]
    target_logits = torch.where(is_local, logits.gather(-1, local), 0.0)
    exponentials = logits.exp()
    total = exponentials.sum(-1)
    # 0 times minus infinity, outside of a kept set, is 0; what else is no number is so in the total, too.
    weighted = exponentials.mul_(logits).nan_to_num_(0.0).sum(-1) if is_restricted else exponentials.mul_(logits).sum(-1)
    sums = torch.stack([total, weighted, *target_logits.unbind(-1)])
    total, weighted, *columns = _all_reduce(sums, group, dist.ReduceOp.SUM)
    log_total = total.log()
    logits -= log_total[:, None]
    return torch.stack(columns, -1) - log_total[:, None], log_total - weighted / total, log_total + largest


def _logits_grad(
    log_p: Tensor,
    entropy: Tensor,
    logprob_grad: Tensor | None,
    entropy_grad: Tensor | None,
    local: Tensor,
    is_local: Tensor,
    temperature: float,
) -> Tensor:
    """Gradient of the logits of a chunk before they are divided by the temperature, [m, V] float32, in the memory of their log p.

    Args:
        entropy, entropy_grad: [m, 1]. logprob_grad, local, is_local: [m, C].
    """
    for rows in _row_blocks(log_p):
        block = log_p[rows]
        if entropy_grad is None:
            block.exp_()
            block *= 0.0 if logprob_grad is None else -logprob_grad[rows].sum(-1, keepdim=True)
        else:
            slope = block.add(entropy[rows]).clamp_(min=_LEAST).mul_(entropy_grad[rows])
            if logprob_grad is not None:
                slope += logprob_grad[rows].sum(-1, keepdim=True)
            block.exp_().mul_(slope).neg_()
            del slope  # before the next rows' comes
        if logprob_grad is not None:
            block.scatter_add_(-1, local[rows], torch.where(is_local[rows], logprob_grad[rows], 0.0))
        block /= temperature
    return log_p


def _batch_invariant_values(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, group: dist.ProcessGroup | None, kept: Kept | None
) -> _Values:
    """[m, C] logprobs, bit for bit a batch-invariant sampler's; [m] entropies, and [m] log sum exp of the logits over temperature."""
    logits = head_logits(hidden, weight)
    if group is not None:
        logits = _all_gather_columns(logits, group)
    logits = _restricted(logits, kept, 0)
    log_p = log_softmax(logits, temperature)
    logprobs = log_p.gather(-1, targets)
    normalizers = logits.amax(-1) / temperature - log_p.amax(-1)  # at a token of the set, as a target need not be
    return logprobs, -(log_p.exp() * log_p.clamp_(min=_LEAST)).sum(-1), normalizers


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
