"""A learner rank whose weights are a few pieces, without Megatron."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evenkeel.actors.ranks.learner_rank_actor import LearnerRankActor
from evenkeel.learner.config import LearnerConfig


class Pieces:
    """A rank whose weights are three tensors; `gathered` says how far a pass has come."""

    def __init__(self, *, is_contiguous: bool = True) -> None:
        self.gathered: list[int] = []
        self.tensors = [torch.full((2, 2), float(i))[:, 0] if not is_contiguous else torch.full((2,), float(i)) for i in range(3)]

    def weights(self, bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        for i, tensor in enumerate(self.tensors):
            self.gathered.append(i)
            yield {f"w{i}": tensor}


def rank_with(pieces: Pieces, rank: int = 0) -> LearnerRankActor:
    actor = LearnerRankActor(LearnerConfig(), rank, bind="")
    actor._learner = pieces  # type: ignore[assignment]
    return actor
