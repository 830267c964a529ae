"""The gap of stale tokens, split exactly into mismatch and staleness: every so many batches, on a sample.

A token of version v was sampled by the engine at weights v. What the learner says of it at weights v differs from that by the mismatch
alone; what it says at the weights where the update starts, by staleness as well. So the ranks keep copies of the versions that such a batch
may hold, shortly before it, and none at other times.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import ray
import torch

from actors.carriers import KeepRequest, SplitRequest
from actors.ranks.forwards import ForwardRequests
from correction.batch import PackedBatch
from correction.diagnostics.variance_split import split_numbers
from learner.results import SplitLogprobs

TRAJECTORIES = 16
"""Most trajectories of a batch that are scored, at each version that their tokens have and at the present one."""


class GapSplit:
    """Decides when copies of weights are kept and batches are split, and asks the learner for both."""

    def __init__(
        self,
        forwards: ForwardRequests,
        *,
        every: int,
        max_staleness: int,
        deadline_s: float,
        fetch_s: Callable[[PackedBatch], float],
        replays_engine: bool = False,
    ) -> None:
        """Args:
        every: batches from one split to the next; 0: there is none.
        deadline_s: until the learner is at the version and has answered.
        fetch_s: time that a batch's wide fields may take to come.
        replays_engine: the batch's routed experts are the engine's; those of the present weights are not to be replayed at others.
        """
        self._forwards, self._every, self._max_staleness, self._deadline_s = forwards, every, max_staleness, deadline_s
        self._fetch_s, self._replays_engine = fetch_s, replays_engine

    def keeps(self, version: int) -> bool:
        """Whether a batch that will be split may have tokens of these weights, so that a copy is needed."""
        return self._every > 0 and self._every - version % self._every <= self._max_staleness

    def splits(self, version: int) -> bool:
        """Whether the batch of this version is split."""
        return self._every > 0 and self._max_staleness > 0 and version % self._every == 0

    async def keep(self, version: int) -> float:
        """Have the ranks keep a copy of their weights, which are of `version`. Returns: the seconds that it took."""
        wanted = KeepRequest(version, oldest=version - self._max_staleness)
        return (await self._forwards.ask(wanted, deadline_s=self._deadline_s)).seconds

    async def split(self, batch: PackedBatch, version: int) -> tuple[dict[str, float], float]:
        """Split the gap of a batch. Returns: the numbers of quantities.SPLIT (none without stale tokens of kept versions), and the seconds
        that the learner took."""
        if (sample := await asyncio.to_thread(self._sample, batch, version)) is None:
            return {}, 0.0
        oldest = version + self._every - self._max_staleness
        stored = await asyncio.to_thread(ray.put, sample)
        wanted = SplitRequest(version, stored, oldest=oldest, fetch_s=self._fetch_s(sample))
        answer = await self._forwards.ask(wanted, deadline_s=self._deadline_s)
        assert answer.split is not None
        return await asyncio.to_thread(_numbers, sample, answer.split, version), answer.seconds

    def _sample(self, batch: PackedBatch, version: int) -> PackedBatch | None:
        """Some of the sequences with stale tokens; None: there are none."""
        stale = batch.loss_mask & (batch.weight_versions >= 0) & (batch.weight_versions < version)
        sequences = torch.unique(torch.searchsorted(batch.offsets, stale.nonzero().flatten(), right=True) - 1).tolist()
        if not sequences:
            return None
        chosen = sorted(random.Random(version).sample(sequences, min(TRAJECTORIES, len(sequences))))
        sample = batch if self._replays_engine else replace(batch, routed_experts=None, wide=None)
        return replace(sample, proximal_logprobs=None, reference_logprobs=None, topk_ids=None, topk_logprobs=None).select(chosen)


def _numbers(sample: PackedBatch, found: SplitLogprobs, version: int) -> dict[str, float]:
    known = sample.loss_mask & (sample.weight_versions < version) & found.at_sampling.isfinite() & found.now.isfinite()
    return split_numbers(sample.behavior_logprobs[known], found.at_sampling[known], found.now[known])
