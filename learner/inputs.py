"""What the model has to read so that the trained tokens of a batch are predicted: not more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from correction.batch import PackedBatch
from correction.errors import DataError


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """R packed tokens and the M predictions to be made from them.

    A sequence is read up to the token before its last trained one; what comes after predicts nothing that is wanted.
    """

    token_ids: Tensor
    """[R] int64."""
    offsets: Tensor
    """[S + 1] int64: the sequences' bounds in token_ids; some may be empty."""
    predicted: Tensor
    """[M] int64: indices in the batch of the tokens in the loss mask, ascending."""
    predicting_row: Tensor
    """[M] int64: the token of token_ids after which each of them comes."""

    @classmethod
    def of(cls, batch: PackedBatch) -> ModelInputs:
        """Raises: DataError if the loss mask holds a sequence's first token, which nothing predicts."""
        predicted = batch.loss_mask.nonzero()[:, 0]
        sequence = torch.searchsorted(batch.offsets, predicted, right=True) - 1
        place = predicted - batch.offsets[sequence]
        if bool((place == 0).any()):
            first = int(sequence[place == 0][0])
            raise DataError(f"PackedBatch.loss_mask is True for the first token of sequence {first}: no token before it predicts it")
        lengths = torch.zeros_like(batch.lengths).scatter_reduce_(0, sequence, place, "amax")
        if len(predicted) == 0:  # nothing to predict: one token all the same, so that the pass is a pass
            lengths[int(batch.lengths.argmax())] = 1
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        removed_before = batch.offsets[:-1] - offsets[:-1]
        rows = torch.arange(int(offsets[-1]), device=offsets.device) + torch.repeat_interleave(removed_before, lengths)
        return cls(batch.token_ids[rows], offsets, predicted, predicted - 1 - removed_before[sequence])
