"""A batch in shards, one for each data-parallel rank: what a shard must know of the whole, as sums that the caller adds up.

Nothing here communicates by itself. The caller gives a `Reduce`, which adds a tensor up over all shards, as an all-reduce does. Every shard
calls it equally often and with equal shapes, whatever its tokens are. Micro-batches of one shard need none of this: they are selected from
the corrected batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed

from .batch import PackedBatch
from .decision import BatchView, moment_tokens, needs_all_tokens
from .errors import ConfigError, DataError
from .settings.choices import DenominatorKind
from .settings.parts import CorrectionSettings, CriterionConfig

Reduce = Callable[[Tensor], Tensor]
"""Returns the sum of a float64 tensor over all shards. It may work in place; only what it returns is used."""

TOTALS = ("weight", "units", "tokens", "kept_tokens", "counted_tokens", "counted_sequences")
"""What the first entries of `shard_sums` are; under denominator prompt_mean the counted tokens of each prompt follow."""

# Bits that one histogram of |log ratio| resolves.
_DIGIT = 11


def all_reduce_sum(values: Tensor, group: distributed.ProcessGroup | None = None) -> Tensor:
    """The `Reduce` of torch.distributed: the sum over all ranks of a group, in place. For a group of its own, see functools.partial."""
    distributed.all_reduce(values, group=group)
    return values


def check_sharded(config: CorrectionSettings, num_prompts: int | None, *, has_reduce: bool) -> None:
    """Refuse what can't be settled from the sums of shards.

    Raises: ConfigError with the remedy.
    """
    if config.denominator.kind is DenominatorKind.PROMPT_MEAN and num_prompts is None:
        raise ConfigError(
            "denominator.kind = prompt_mean in shards: a prompt's answers may lie in several. Give num_prompts, the prompts of the whole "
            "batch, and group_ids from 0 to num_prompts - 1."
        )
    if config.covariance is not None:
        raise whole_step_only()
    if config.modulation.noise_std > 0:
        raise ConfigError(
            "modulation.noise_std in shards: the noise follows the order of tokens in a batch. Correct the batch in one process."
        )
    if needs_all_tokens(config) and not has_reduce:
        raise ConfigError(
            "rejection by second_moment looks at all tokens of the batch, for which one sum is not enough. Give correct() `reduce`, "
            "which it calls several times, instead of `totals`."
        )


def whole_step_only() -> ConfigError:
    """Why a choice by covariance isn't made on shards."""
    return ConfigError(
        "covariance in shards: its means and its choice are of all tokens of an optimizer step. Correct and settle the whole batch on "
        "every rank, and select its share afterwards; or set covariance: null."
    )


def prompt_index(batch: PackedBatch, config: CorrectionSettings, num_prompts: int | None) -> tuple[Tensor, int]:
    """Prompt of each sequence [S], from 0, and the number of prompts; 0 where the denominator doesn't ask.

    Raises: DataError if a group id is none of num_prompts.
    """
    if config.denominator.kind is not DenominatorKind.PROMPT_MEAN:
        return batch.group_ids, 0
    if num_prompts is None:
        found, index = torch.unique(batch.group_ids, return_inverse=True)
        return index, int(found.numel())
    if batch.num_sequences and not 0 <= int(batch.group_ids.min()) <= int(batch.group_ids.max()) < num_prompts:
        raise DataError(f"PackedBatch.group_ids must be from 0 to num_prompts - 1 = {num_prompts - 1} in shards. Number the prompts so.")
    return batch.group_ids, num_prompts


def moment_limits(
    view: BatchView, criteria: Sequence[CriterionConfig], config: CorrectionSettings, reduce: Reduce
) -> dict[CriterionConfig, Tensor]:
    """Criterion of second_moment -> largest |log ratio| that stays, from the tokens of all shards. Args: view: of this shard."""
    limits: dict[CriterionConfig, Tensor] = {}
    for criterion in criteria:
        assert criterion.upper is not None  # CriterionConfig refuses it otherwise
        values, meant = moment_tokens(view, criterion, config)
        limits[criterion] = second_moment_limit(
            values[meant].abs(), budget=criterion.upper, reduce=reduce, is_open=criterion.is_open, least=criterion.least_tokens
        )
    return limits


def second_moment_limit(sizes: Tensor, *, budget: float, reduce: Reduce, is_open: bool = False, least: int = 1) -> Tensor:
    """The largest |log ratio| among those that stay when the largest are dropped until the mean square is at most the budget; a scalar.

    Exact: it takes a histogram of ever finer bits of the numbers, each summed over the shards. Tokens of equal size are kept or dropped
    together (in one process, by order).
    Args:
        sizes: [n] |log ratio| >= 0 of this shard's tokens; above 0 where least is 0.
        budget: of the mean square, nats^2.
        is_open: the mean has to be under the budget; least: 1: the smallest are always kept.
    """
    kind, bits_of_size = (torch.int64, 63) if sizes.dtype == torch.float64 else (torch.int32, 31)
    bits = sizes.view(kind).long()  # of numbers >= 0: bits have the order of the numbers
    squares = sizes.double().square()
    count = square = 0.0  # over the tokens that are surely kept
    prefix, left = 0, bits_of_size
    while left > 0:
        digit = min(_DIGIT, left)
        left -= digit
        chosen = (bits >> (left + digit)) == prefix
        digits = (bits[chosen] >> left) & (2**digit - 1)
        rows = [torch.bincount(digits, minlength=2**digit).double(), torch.bincount(digits, weights=squares[chosen], minlength=2**digit)]
        counts, sums = reduce(torch.stack(rows))
        total, allowed = square + sums.cumsum(0), budget * (count + counts.cumsum(0))
        fits = total < allowed if is_open else total <= allowed
        breaks = (~fits & (counts > 0)).nonzero()
        if breaks.numel() == 0:  # everything stays
            return torch.full((), torch.inf, dtype=sizes.dtype, device=sizes.device)
        first = int(breaks[0])
        count, square = count + float(counts[:first].sum()), square + float(sums[:first].sum())
        prefix = (prefix << digit) + first
    largest = torch.tensor(prefix if count < least else prefix - 1, dtype=kind, device=sizes.device)
    return largest.view(sizes.dtype)
