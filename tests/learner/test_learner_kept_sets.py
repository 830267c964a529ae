"""Tokens that top-p, top-k or min-p drew from a part of the vocabulary: every forward and the gradient are of a softmax over that part.

Against Hugging Face and autograd on a whole softmax whose other logits are minus infinity, on one rank and on several.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.correction.batch import PackedBatch, batch_slices
from evenkeel.correction.correct import correct, defer
from evenkeel.correction.errors import DataError
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.training.logprobs import head_logprobs
from tests.learner.kept_cases import as_groups, hf_restricted, is_outside, packed, resumed, with_kept_sets
from tests.learner.learner_cases import (
    TIS,
    VOCAB,
    gradient_parts,
    grouped_batch,
    hf_model,
    joined_parts,
    largest_difference,
    learner_on,
    random_batch,
    run_ranks,
    save_model,
    with_noisy_behavior,
)

ENTROPIC = TIS.model_copy(update={"entropy_coefficient": 0.1})
SHARED = [([20] * 4, [5, 9, 8, 7]), ([17, 17, 12, 17], [6, 6, 9, 4])]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_values_and_gradients_of_the_head_equal_a_whole_softmax(chunk: int, batch_invariant: bool) -> None:
    """Of the sampled token, of another one of its set, and of the entropy; a token outside has no probability."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 16, generator=generator) for size in (random_batch().num_tokens, VOCAB))
    batch = with_kept_sets(replace(random_batch(), loss_mask=torch.ones(len(hidden), dtype=torch.bool)))
    assert batch.kept_counts is not None and batch.kept_ids is not None
    outside = is_outside(batch)
    other = (~outside).float().argmax(-1)
    targets = torch.stack([batch.token_ids, other], 1)
    factors = torch.randn(3, len(hidden), generator=generator)
    found = []
    for is_ours in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if is_ours:
            kept = batch.kept_counts, batch.kept_ids
            options: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": chunk, "batch_invariant": batch_invariant, "kept": kept}
            logprobs, entropies = head_logprobs(h, w, targets, **options)
        else:
            log_p = torch.log_softmax((h @ w.t() / 0.7).masked_fill(outside, -torch.inf), -1)
            logprobs, entropies = log_p.gather(1, targets), -(log_p.exp() * log_p.masked_fill(outside, 0.0)).sum(-1)
        (factors[0] * logprobs[:, 0] + factors[1] * logprobs[:, 1] + factors[2] * entropies).sum().backward()
        found.append((logprobs.detach(), entropies.detach(), h.grad, w.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)
    kept = batch.kept_counts, batch.kept_ids
    left_out, _ = head_logprobs(hidden, weight, outside.float().argmax(-1), batch_invariant=batch_invariant, kept=kept)
    assert set(left_out[batch.kept_counts > 0].tolist()) == {-torch.inf}
    gradient = []
    for looked_up in (batch.token_ids[:, None], torch.stack([outside.float().argmax(-1), batch.token_ids], 1)):
        w = weight.clone().requires_grad_()
        head_logprobs(hidden, w, looked_up, **options)[0][:, -1].sum().backward()
        gradient.append(w.grad)
    torch.testing.assert_close(*gradient, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_in_bfloat16_it_is_the_softmax_of_the_rounded_numbers_to_their_rounding(batch_invariant: bool) -> None:
    """Logits of up to 10 are rounded by up to 1/32 outside of batch_invariant; gradients have 8 bits."""
    generator = torch.Generator().manual_seed(0)
    batch = with_kept_sets(replace(random_batch(), loss_mask=torch.ones(random_batch().num_tokens, dtype=torch.bool)))
    assert batch.kept_counts is not None and batch.kept_ids is not None
    hidden, weight = (torch.randn(size, 16, generator=generator).bfloat16() for size in (batch.num_tokens, VOCAB))
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    kept = batch.kept_counts, batch.kept_ids
    ours, entropies = head_logprobs(h, w, batch.token_ids, chunk_tokens=7, batch_invariant=batch_invariant, kept=kept)
    (ours + entropies).sum().backward()
    wide_h, wide_w, outside = hidden.float().requires_grad_(), weight.float().requires_grad_(), is_outside(batch)
    log_p = torch.log_softmax((wide_h @ wide_w.t()).masked_fill(outside, -torch.inf), -1)
    theirs = log_p.gather(1, batch.token_ids[:, None])[:, 0]
    (theirs - (log_p.exp() * log_p.masked_fill(outside, 0.0)).sum(-1)).sum().backward()
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-5 if batch_invariant else 0.1)
    for mine, wide in ((h.grad, wide_h.grad), (w.grad, wide_w.grad)):
        assert mine is not None and wide is not None and float((mine.float() - wide).norm() / wide.norm()) < 0.02


def sampled(learner: LearnerRank, batch: PackedBatch) -> PackedBatch:
    """With mu and pi_prox some way from the present policy, each over the kept sets."""
    proximal = with_noisy_behavior(batch, learner.logprobs(batch), std=0.25, seed=5).behavior_logprobs
    batch = with_noisy_behavior(batch, proximal, std=0.6, seed=6)
    batch = replace(batch, behavior_logprobs=batch.behavior_logprobs.clamp(max=0.0))
    return replace(batch, proximal_logprobs=proximal.clamp(max=0.0))


def drawn(kind: str, folder: Path) -> tuple[PackedBatch, PackedBatch]:
    """(batch as it reaches the learner, its kept sets as they were drawn)."""
    batch = with_kept_sets(grouped_batch(SHARED, temperature=0.8) if kind == "shared prompts" else random_batch(temperature=0.8))
    if kind not in ("resume", "hand-back"):
        return batch, batch
    groups = as_groups(batch, is_handed_back=kind == "hand-back")
    return packed(resumed(groups, folder) if kind == "resume" else groups, 0.8), batch


def one_step(learner: LearnerRank, batch: PackedBatch, *, is_deferred: bool) -> dict[str, Any]:
    """What every forward says, and a step."""
    learner.load_reference(learner._require().folder)
    batch = sampled(learner, batch)
    said = learner.logprobs(batch), learner.proximal(batch).logprobs, learner.reference_logprobs(batch)
    assert torch.equal(said[0], said[1]) and torch.equal(said[0], said[2])
    corrected = defer(batch, TIS) if is_deferred else correct(batch, ENTROPIC)
    result = learner.step(corrected, TIS if is_deferred else ENTROPIC, step=0)
    numbers = {"loss": result.loss, "norm": result.grad_norm, "entropy": result.entropy}
    found = {"batch": batch, "logprobs": said[0], "target": result.target_logprobs, "numbers": numbers}
    return found | {"gradients": gradient_parts(learner)}


def on_a_rank(
    rank: int, ranks: int, port: int, folder: Path, split: str, batch: PackedBatch, is_deferred: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    learner = LearnerRank(LearnerConfig(**{split: ranks}, **settings), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    found = one_step(learner, batch, is_deferred=is_deferred)
    learner.close()
    return found


KINDS = ["staged", "deferred", "shared prompts", "resume", "hand-back"]
CASES = itertools.product([None, "tensor_parallel", "pipeline_parallel"], KINDS)


@pytest.mark.parametrize(
    ("split", "kind"), [*CASES, ("tensor_parallel, batch_invariant", "staged"), ("tensor_parallel, sequence_parallel", "staged")]
)
def test_a_step_equals_autograd_on_a_whole_softmax(tmp_path: Path, split: str | None, kind: str) -> None:
    """Gradients parameter by parameter. A vocabulary of 97 is padded for two tensor-parallel ranks; a set may lie on one of them alone.
    After a resume, and where another engine went on with each answer, against the sets as they were drawn."""
    folder = save_model(tmp_path / "m", tie=split is None, vocab_size=VOCAB + 1)
    settings: dict[str, Any] = {"learning_rate": 0.0, "clip_grad": 0.0, "tokens_per_microbatch": 150, "logprob_chunk_tokens": 11}
    if split is not None:
        split, _, mode = split.partition(", ")
        settings |= {mode: True} if mode else {}
    reaches, was_drawn = drawn(kind, tmp_path)
    if split is None:
        with learner_on(folder, **settings) as learner:
            every = [one_step(learner, reaches, is_deferred=kind == "deferred")]
    else:
        every = run_ranks(on_a_rank, folder, split, reaches, kind == "deferred", settings)
    model, batch = hf_model(folder), every[0]["batch"]
    assert torch.equal(batch.token_ids, was_drawn.token_ids) and torch.equal(batch.loss_mask, was_drawn.loss_mask)
    target, entropies = hf_restricted(model, replace(batch, kept_counts=was_drawn.kept_counts, kept_ids=was_drawn.kept_ids))
    mask = batch.loss_mask
    proximal = target.detach() if kind == "deferred" else batch.proximal_logprobs
    ratio, weight = (target - proximal)[mask].exp(), (proximal - batch.behavior_logprobs)[mask].exp().clamp(max=2.0)
    advantage = batch.advantages[mask]
    loss = (weight * torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))).sum() / mask.sum()
    loss = loss - (kind != "deferred") * ENTROPIC.entropy_coefficient * entropies[mask].mean()
    loss.backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.cat([gradient.flatten() for gradient in theirs.values()]).norm()
    expected = {"loss": float(loss.detach()), "norm": float(norm), "entropy": float(entropies.detach()[mask].mean())}
    for found in every:
        torch.testing.assert_close(found["logprobs"], target.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(found["target"], target.detach(), rtol=0, atol=1e-5)
        assert found["numbers"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert largest_difference(joined_parts([found["gradients"] for found in every], model.config), theirs) < 2e-5


def test_any_part_of_a_batch_keeps_its_own_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences in any order: each token's set is the one that it had. Slices, in which the correction never reads them, have none."""
    batch = with_kept_sets(random_batch())

    def sets_of(part: PackedBatch) -> list[list[int]]:
        assert part.kept_counts is not None and part.kept_ids is not None
        assert len(part.validate().kept_ids) == int(part.kept_counts.sum())
        return [each.tolist() for each in torch.split(part.kept_ids, part.kept_counts.tolist())]

    whole, order = sets_of(batch), [17, 3, 4, 22, 0]
    assert sets_of(batch.select(order)) == [whole[i] for i in batch.token_index(order).tolist()]
    monkeypatch.setattr("evenkeel.correction.batch.CPU_TOKENS", 60)
    slices = [piece.of_batch(batch).validate() for piece in batch_slices(batch)]
    assert len(slices) > 1 and {(one.kept_counts, one.kept_ids) for one in slices} == {(None, None)}
    with pytest.raises(DataError, match=r"PackedBatch.kept_ids has shape"):
        assert batch.kept_ids is not None
        replace(batch, kept_ids=batch.kept_ids[1:]).validate()
    for one in ("kept_counts", "kept_ids"):
        with pytest.raises(DataError, match="Give both, or neither"):
            replace(batch, **{one: None}).validate()
