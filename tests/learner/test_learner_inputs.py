"""The model reads each sequence up to the token before its last trained one, and every trained token has the row that predicts it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.errors import DataError
from evenkeel.learner.model.inputs import ModelInputs, RowLayout
from tests.learner.learner_cases import grouped_batch, random_batch


def test_by_hand() -> None:
    """Sequences abcde, (empty), fg, hij with trained tokens c, d | none | none | j: read abc, nothing, nothing, hi."""
    ids = torch.arange(10)
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 0, 0, 0, 1], dtype=torch.bool)
    zeros = torch.zeros(10)
    batch = PackedBatch(
        ids, torch.tensor([0, 5, 5, 7, 10]), mask, zeros, zeros, torch.zeros(10, dtype=torch.int32), torch.arange(4)
    ).validate()
    inputs = ModelInputs.of(batch)
    assert inputs.token_ids.tolist() == [0, 1, 2, 7, 8]
    assert inputs.layout == RowLayout((3, 2))
    assert inputs.predicted.tolist() == [2, 3, 9]
    assert inputs.predicting_row.tolist() == [1, 2, 4]


def test_each_row_is_the_token_before_the_predicted_one() -> None:
    batch = replace(random_batch(), token_ids=torch.arange(random_batch().num_tokens))  # a token's id is its place in the batch
    inputs = ModelInputs.of(batch)
    assert torch.equal(inputs.token_ids[inputs.predicting_row] + 1, inputs.predicted)
    assert torch.equal(inputs.predicted, batch.loss_mask.nonzero()[:, 0])
    assert len(inputs.token_ids) <= batch.num_tokens - batch.num_sequences  # the last token of each is never read


def test_nothing_to_predict_reads_one_token() -> None:
    batch = random_batch()
    inputs = ModelInputs.of(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)))
    assert len(inputs.token_ids) == 1 and len(inputs.predicted) == 0


def test_a_first_token_cannot_be_trained() -> None:
    batch = random_batch()
    mask = batch.loss_mask.clone()
    mask[batch.offsets[3]] = True
    with pytest.raises(DataError, match="sequence 3"):
        ModelInputs.of(replace(batch, loss_mask=mask))


@pytest.mark.parametrize("share_prompts", [True, False])
def test_rows_are_filled_up_to_a_multiple(share_prompts: bool) -> None:
    """By a sequence of its own behind the others; the rows that predict still hold the token before the predicted one."""
    batch = grouped_batch([([5, 5], [3, 2]), ([4], [4])])
    plain = ModelInputs.of(batch, share_prompts=share_prompts)
    filled = ModelInputs.of(batch, share_prompts=share_prompts, row_multiple=8)
    rows = len(plain.token_ids)
    assert len(filled.token_ids) % 8 == 0 and rows % 8 > 0
    assert filled.layout == replace(plain.layout, sequences=(*plain.layout.sequences, len(filled.token_ids) - rows))
    assert torch.equal(filled.token_ids[filled.predicting_row], batch.token_ids[filled.predicted - 1])
