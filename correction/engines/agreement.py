"""Sampled against trained logprobs, bit by bit: at equal weights the mode allows no difference at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from correction.batch import PackedBatch


@dataclass(frozen=True, slots=True)
class Difference:
    """One token whose two logprobs differ."""

    sequence: int
    """Index in the batch."""
    position: int
    """Index in the sequence, its prompt included."""
    token_id: int
    version: int
    """Version of the weights that sampled the token, and that the learner holds."""
    behavior: float
    target: float

    def __str__(self) -> str:
        return (
            f"token {self.token_id} at position {self.position} of sequence {self.sequence}, weights v{self.version}: "
            f"sampled with logprob {self.behavior!r}, the learner says {self.target!r}"
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a batch's comparison found."""

    tokens: int
    """Compared: in the loss mask, sampled by the very weights that the learner holds."""
    differing: int
    largest_difference: float
    """Nats; infinite if one side is not a number."""
    first: Difference | None

    @property
    def equal_share(self) -> float:
        """1 if nothing was compared."""
        return 1.0 - self.differing / self.tokens if self.tokens else 1.0


def compare(batch: PackedBatch, target_logprobs: Tensor) -> Agreement:
    """Compare the tokens of staleness 0; the others' logprobs are of other weights.

    Args:
        target_logprobs: [N] float32, the learner's, at the weights of batch.learner_version.
    """
    is_compared = batch.loss_mask & (batch.weight_versions == batch.learner_version)
    behavior, target = batch.behavior_logprobs.float(), target_logprobs.float().to(batch.behavior_logprobs.device)
    # By value: the two zeros are one logprob, and not-a-number equals nothing.
    differing = (is_compared & (behavior != target)).nonzero()[:, 0]
    if len(differing) == 0:
        return Agreement(int(is_compared.sum()), 0, 0.0, None)
    gaps = (behavior[differing].double() - target[differing].double()).abs().nan_to_num(nan=torch.inf)
    index = int(differing[0])
    sequence = int(torch.searchsorted(batch.offsets, index, right=True)) - 1
    first = Difference(
        sequence=sequence,
        position=index - int(batch.offsets[sequence]),
        token_id=int(batch.token_ids[index]),
        version=int(batch.weight_versions[index]),
        behavior=float(behavior[index]),
        target=float(target[index]),
    )
    return Agreement(int(is_compared.sum()), len(differing), float(gaps.max()), first)
