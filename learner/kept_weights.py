"""Copies of a rank's weights at earlier versions, to score stale tokens with the weights that sampled them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch

if TYPE_CHECKING:
    from evenkeel.learner.learner_rank import LearnerRank


class KeptWeights:
    """Copies in host memory of the rank's own part of the model, one for each kept version. Every rank makes the same calls."""

    def __init__(self, learner: LearnerRank) -> None:
        self._learner = learner
        self._copies: dict[int, list[Tensor]] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sorted(self._copies))

    def keep(self, version: int, *, oldest: int) -> None:
        """Copy the learner's weights as they are now, which are those of `version`; free copies older than `oldest`."""
        self.forget(before=oldest)
        self._copies[version] = self._learner.weights_copy()

    def forget(self, *, before: int | None = None) -> None:
        """Free the copies older than `before`. None: all; the learner goes back, and the same versions will come with other weights."""
        self._copies = {} if before is None else {kept: copy for kept, copy in self._copies.items() if kept >= before}

    def at_sampling(self, batch: PackedBatch, *, oldest: int) -> Tensor:
        """[N] float32, CPU: log pi of each trained token at the weights that sampled it; not a number where those aren't kept.

        The learner comes back untouched. Afterwards copies older than `oldest` are freed.
        """
        found = torch.full((batch.num_tokens,), torch.nan)
        for version in self.versions:
            if sequences := _sequences_of(batch, version):
                part, index = batch.select(sequences), batch.token_index(sequences)
                said = self._learner.logprobs_with(self._copies[version], part)
                is_theirs = part.loss_mask & (part.weight_versions == version)
                found[index[is_theirs]] = said[is_theirs]
        self.forget(before=oldest)
        return found


def _sequences_of(batch: PackedBatch, version: int) -> list[int]:
    """Indices of the sequences with a trained token that these weights sampled."""
    chosen = (batch.loss_mask & (batch.weight_versions == version)).nonzero().flatten()
    return sorted(set((torch.searchsorted(batch.offsets, chosen, right=True) - 1).tolist()))
