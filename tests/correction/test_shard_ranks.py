"""Two real ranks on gloo: the shards' losses and DDP's gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from evenkeel.correction import CorrectedBatch, CorrectionConfig, PackedBatch, all_reduce_sum, correct, policy_loss, policy_scale, settle
from evenkeel.correction.shards import Reduce
from tests.correction.fixtures import random_batch
from tests.learner.learner_cases import run_ranks

LATE = {"preset": "bypass", "rejection": [{"upper": 1.3}], "denominator": {"count": "kept"}}
SETTINGS = [*({"preset": name} for name in ("mis-full", "icepop", "m2po", "m2po-areal", "dppo-binary-tv", "gspo")), LATE]


def settled(batch: PackedBatch, target: torch.Tensor, config: CorrectionConfig, reduce: Reduce | None = None) -> CorrectedBatch:
    return settle(correct(batch, config, reduce=reduce), target, config, reduce=reduce)


def losses_are_equal(rank: int, config: CorrectionConfig) -> None:
    """Each rank has half of the sequences; the sums of losses and partials are the whole batch's."""
    batch, target = random_batch(7)
    share = range(6 * rank, 6 * rank + 6)
    corrected = settled(batch.select(share), target[batch.token_index(share)], config, all_reduce_sum)
    mine = policy_loss(corrected, target[batch.token_index(share)], config)
    total, partials = all_reduce_sum(mine.loss.detach().clone()), all_reduce_sum(mine.partials.clone())
    whole = policy_loss(settled(batch, target, config), target, config)
    factor, of_whole = policy_scale(partials, config), policy_scale(whole.partials, config)
    torch.testing.assert_close(total * factor, whole.loss * of_whole, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(partials, whole.partials, rtol=1e-6, atol=1e-12)


def gradients_are_equal(rank: int, config: CorrectionConfig) -> None:
    """Under DDP, which averages: loss times the world size, micro-batches added up and not divided, each step's factor on the gradient."""
    batch, target = random_batch(8)
    world = distributed.get_world_size()
    share = list(range(6 * rank, 6 * rank + 6))
    own, alone = Shift(batch.num_tokens), Shift(batch.num_tokens)
    model = DistributedDataParallel(own)
    corrected = settled(batch.select(share), target[batch.token_index(share)], config, all_reduce_sum)
    partials = torch.zeros(())
    micros = ([0, 1], [2, 3, 4, 5])
    for number, micro in enumerate(micros):
        index = batch.token_index([share[k] for k in micro])
        with torch.enable_grad() if number == len(micros) - 1 else model.no_sync():
            result = policy_loss(corrected.select(micro), model(target, index), config)
            (result.loss * world).backward()
        partials = partials + result.partials
    factor = policy_scale(all_reduce_sum(partials), config)
    whole = policy_loss(settled(batch, target, config), alone(target, torch.arange(batch.num_tokens)), config)
    whole.loss.backward()
    torch.testing.assert_close(own.shift.grad * factor, alone.shift.grad * policy_scale(whole.partials, config), rtol=1e-6, atol=1e-12)


class Shift(torch.nn.Module):
    """A model whose parameters move logprobs: one of each token, and one of all."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(tokens + 1, dtype=torch.float64))

    def forward(self, logprobs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (logprobs + self.shift[:-1])[index] + self.shift[-1]


def on_a_rank(rank: int, ranks: int, port: int, are_equal: Callable[[int, CorrectionConfig], None]) -> int:
    """How many settings were compared."""
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for settings in SETTINGS:
        are_equal(rank, CorrectionConfig(**settings))
    distributed.destroy_process_group()
    return len(SETTINGS)


@pytest.mark.parametrize("are_equal", [losses_are_equal, gradients_are_equal])
def test_two_real_ranks(are_equal: Callable[[int, CorrectionConfig], None]) -> None:
    assert run_ranks(on_a_rank, are_equal) == [len(SETTINGS)] * 2
