"""What tests/correction/test_shards.py runs on two real ranks: each prints what of it is equal to one process's."""

from __future__ import annotations

import os
import socket
import sys

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from correction import CorrectionConfig, all_reduce_sum, correct, policy_loss, policy_scale
from tests.correction.fixtures import random_batch

RANKS = 2
PRESETS = ("mis-full", "icepop", "m2po", "dppo-binary-tv", "gspo")


def losses(rank: int) -> None:
    """Each rank has half of the sequences; the sums of losses and partials are the whole batch's."""
    batch, target = random_batch(7)
    share = range(6 * rank, 6 * rank + 6)
    for preset in PRESETS:
        config = CorrectionConfig(preset=preset)
        corrected = correct(batch.select(share), config, reduce=all_reduce_sum)
        mine = policy_loss(corrected, target[batch.token_index(share)], config)
        total, partials = all_reduce_sum(mine.loss.detach().clone()), all_reduce_sum(mine.partials.clone())
        whole = policy_loss(correct(batch, config), target, config)
        torch.testing.assert_close(total, whole.loss, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(partials, whole.partials, rtol=1e-6, atol=1e-12)


def gradients(rank: int) -> None:
    """Under DDP, which averages: loss times the world size, micro-batches added up and not divided, each step's factor on the gradient."""
    batch, target = random_batch(8)
    world = distributed.get_world_size()
    share = list(range(6 * rank, 6 * rank + 6))
    late = {"preset": "bypass", "rejection": [{"upper": 1.3}], "denominator": {"count": "kept"}}
    for settings in [*({"preset": name} for name in PRESETS), late]:
        config = CorrectionConfig(**settings)
        own, alone = Shift(batch.num_tokens), Shift(batch.num_tokens)
        model = DistributedDataParallel(own)
        corrected = correct(batch.select(share), config, reduce=all_reduce_sum)
        partials = torch.zeros(())
        micros = ([0, 1], [2, 3, 4, 5])
        for number, micro in enumerate(micros):
            index = batch.token_index([share[k] for k in micro])
            with torch.enable_grad() if number == len(micros) - 1 else model.no_sync():
                result = policy_loss(corrected.select(micro), model(target, index), config)
                (result.loss * world).backward()
            partials = partials + result.partials
        factor = policy_scale(all_reduce_sum(partials), config)
        whole = policy_loss(correct(batch, config), alone(target, torch.arange(batch.num_tokens)), config)
        whole.loss.backward()
        torch.testing.assert_close(own.shift.grad * factor, alone.shift.grad * policy_scale(whole.partials, config), rtol=1e-6, atol=1e-12)


class Shift(torch.nn.Module):
    """A model whose parameters move logprobs: one of each token, and one of all."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(tokens + 1, dtype=torch.float64))

    def forward(self, logprobs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (logprobs + self.shift[:-1])[index] + self.shift[-1]


def compare(rank: int) -> None:
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    for case in (losses, gradients):
        case(rank)
        sys.stdout.write(f"{case.__name__} are equal\n")  # at once, or the ranks' lines would mix
        sys.stdout.flush()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    ranks = torch.multiprocessing.start_processes(compare, nprocs=RANKS, start_method="fork", join=False)  # torch is imported once
    while not ranks.join():
        pass
