"""Batches of skipped steps: kept for study, named in the log, and never in the way of a later line."""

from __future__ import annotations

import asyncio
import math
from dataclasses import fields

import pytest
import torch

from evenkeel.actors.record import skipped_batches
from evenkeel.actors.record.skipped_batches import KEPT, SkippedBatch
from evenkeel.correction.batch import CorrectedBatch, PackedBatch
from evenkeel.correction.early_warning.monitor import State
from evenkeel.learner.results import SkipReason
from tests.actors.record.recorder_cases import Seen, StandInReference, batch_of, diagnosed, end_step, result_of, write
from tests.actors.record.recorder_cases import seen as seen


def test_a_skipped_batch_is_kept_for_study_and_named_in_the_log(seen: Seen) -> None:
    """What comes back trains as it did; of many in a run the first ones are kept."""
    n = 6
    batch = PackedBatch(
        token_ids=torch.arange(n), offsets=torch.tensor([0, 4, n]), loss_mask=torch.tensor([False, True] * 3),
        behavior_logprobs=torch.full((n,), -math.inf), advantages=torch.ones(n), weight_versions=torch.zeros(n, dtype=torch.int32),
        group_ids=torch.tensor([0, 1]), advantages_by="own", temperature=0.7,
    )  # fmt: skip
    corrected = CorrectedBatch(batch, importance_weights=torch.full((n,), math.nan), keep_mask=batch.loss_mask, token_scale=torch.ones(n))
    prepared = batch_of(version=6, corrected=corrected)
    norms = {"attention": math.nan, "mlp": 0.25}
    skipped = (SkipReason.NOT_FINITE, SkipReason.NO_GRADIENT)
    numbers = {"skipped": skipped, "loss": math.nan, "grad_norms": (math.nan, 0.0, 0.5), "group_norms": norms}

    async def scenario() -> None:
        for step in range(7, 7 + KEPT + 1):
            end_step(seen.recorder, step, batch=prepared, result=result_of(step, **numbers))
        await seen.recorder.flush()

    asyncio.run(scenario())
    seen.settle()
    kept = sorted((seen.folder.path / "skipped_batches").glob("*.safetensors"))
    assert [path.name for path in kept] == [f"step_{step:06d}.safetensors" for step in range(7, 7 + KEPT)]
    told = [event.text for event in seen.told()]
    assert told[0] == (
        "step 7: 1 of 3 updates left out; loss or gradient was not finite (loss nan; gradient norms: attention nan, mlp 0.25); "
        f"the batch is kept in {kept[0]}"
    )
    assert told[-1].endswith("the batch is not kept: skipped_batches holds 8 already")
    back = SkippedBatch.load(kept[0])
    assert (back.step, back.weight_version, back.correction) == (7, 6, prepared.correction)
    assert back.group_norms["mlp"] == 0.25 and math.isnan(back.grad_norms[0]), "JSON keeps what is not finite"
    assert back.corrected.importance_weights.isnan().all() and back.corrected.batch.advantages_by == "own"
    found = {field.name: getattr(back.corrected.batch.validate(), field.name) for field in fields(batch)}
    for name, value in found.items():
        given = getattr(batch, name)
        assert torch.equal(value, given) if isinstance(given, torch.Tensor) else value == given, name
    assert {path.suffix for path in (seen.folder.path / "skipped_batches").iterdir()} == {".safetensors", ".json"}, "no pickle"
    assert len({path.stat().st_mode for path in (seen.folder.path / "skipped_batches").iterdir()}) == 1, "all read by the same users"

    (seen.folder.path / "x.safetensors").mkdir()
    with pytest.raises(OSError, match=r"x\.safetensors: Error while serializing"):  # safetensors' own is none
        back.save_tensors(seen.folder.path / "x.safetensors")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "(DeadlineExceeded: batch of step 7 -> skipped_batches: not done in 0 s"),
        (MemoryError("no room for it"), "(MemoryError: no room for it)"),
    ],
)
def test_a_skipped_batch_that_can_not_be_read_holds_up_no_later_line(
    error: Exception | None, reason: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipped_batches, "KEEP_S", 0.01)
    prepared = batch_of(version=6, corrected=StandInReference(error))
    numbers = {"skipped": (SkipReason.NOT_FINITE,), "loss": math.nan, "grad_norms": (math.nan,)}

    async def scenario() -> None:
        end_step(seen.recorder, 7, batch=prepared, result=result_of(7, **numbers))
        await write(seen.recorder, (8, diagnosed(state=State.OK)))

    asyncio.run(scenario())
    seen.settle()
    (told,) = (event.text for event in seen.told())
    assert f"the batch is not kept {reason}" in told and [line.step for line in seen.folder.read_metrics()] == [7, 8]
