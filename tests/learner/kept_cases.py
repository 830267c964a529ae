"""Batches whose tokens were drawn from a part of the vocabulary, and what Hugging Face and autograd say of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from evenkeel.rollout.config import TrainOverlong
from evenkeel.rollout.continuation import continued, kept, unsampled, with_more_to_read
from evenkeel.rollout.packing import pack_groups
from evenkeel.rollout.trajectory import FinishReason, Group, KeptTokens, Prompt, Trajectory, VersionSpan, ids_of, logprobs_of
from tests.learner.learner_cases import VOCAB


def with_kept_sets(batch: PackedBatch, *, seed: int = 0, most: int = 12) -> PackedBatch:
    """A third of the tokens from the whole vocabulary; the others from the token alone up to `most`, of random ids."""
    generator = torch.Generator().manual_seed(seed)
    counts, ids = torch.zeros(batch.num_tokens, dtype=torch.int32), []
    for place in batch.loss_mask.nonzero()[:, 0].tolist():
        if (size := int(torch.randint(-most // 2, most + 1, (1,), generator=generator))) <= 0:
            continue
        token = int(batch.token_ids[place])
        others = torch.randperm(VOCAB, generator=generator)
        chosen = torch.cat([others[others != token][: size - 1], torch.tensor([token])])
        counts[place] = len(chosen)
        ids.append(chosen[torch.randperm(len(chosen), generator=generator)])
    return replace(batch, kept_counts=counts, kept_ids=torch.cat(ids).int()).validate()


def is_outside(batch: PackedBatch, words: int = VOCAB) -> Tensor:
    """[N, words] bool: what each token could not have been."""
    counts, ids = batch.kept_counts, batch.kept_ids
    assert counts is not None and ids is not None
    outside = (counts > 0)[:, None].repeat(1, words)
    first = 0
    for place, count in enumerate(counts.tolist()):
        outside[place, ids[first : first + count].long()] = False
        first += count
    return outside


def hf_restricted(model: Any, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """[N] logprobs and entropies over the kept sets, 0 outside the loss mask: the whole softmax of each sequence by Hugging Face, all
    logits outside of a set minus infinity; with gradient."""
    logprobs, entropies, outside = [], [], is_outside(batch, model.config.vocab_size)
    for start, end in itertools.pairwise(batch.offsets.tolist()):
        ids = batch.token_ids[start:end]
        logits = model(ids[None]).logits[0, :-1] / batch.temperature
        log_p = torch.log_softmax(logits.masked_fill(outside[start + 1 : end], -torch.inf), -1)
        blank = log_p.new_zeros(1)
        logprobs += [blank, log_p.gather(1, ids[1:, None])[:, 0]]
        entropies += [blank, -(log_p.exp() * log_p.masked_fill(outside[start + 1 : end], 0.0)).sum(-1)]
    return tuple(torch.where(batch.loss_mask, torch.cat(x), 0.0) for x in (logprobs, entropies))  # type: ignore[return-value]


def as_groups(batch: PackedBatch, *, is_handed_back: bool) -> list[Group]:
    """The batch as it comes from engines; rewards are its advantages, and holes in the loss mask were read between two turns.

    Args: is_handed_back: in the middle of each turn the engine leaves, and another one goes on with the answer.
    """
    counts, ids = batch.kept_counts, batch.kept_ids
    assert counts is not None and ids is not None
    sets = [one.tolist() for one in torch.split(ids, counts.tolist())]

    def tokens(places: Sequence[int], why: FinishReason) -> Trajectory:
        span = VersionSpan(0, 0, len(places))
        of_engine = ids_of(batch.token_ids[list(places)].tolist()), logprobs_of([0.0] * len(places)), (span,), why
        return Trajectory("", ids_of(()), *of_engine, kept_tokens=KeptTokens.of([sets[place] for place in places]))

    def answer(start: int, end: int) -> Trajectory:
        so_far: Trajectory | None = None
        for is_sampled, run in itertools.groupby(range(start, end), key=lambda place: bool(batch.loss_mask[place])):
            places = list(run)
            if so_far is None:
                so_far = unsampled(batch.token_ids[places].tolist(), "")
            elif not is_sampled:
                so_far = with_more_to_read(so_far, batch.token_ids[places].tolist())
            elif is_handed_back:
                middle = len(places) // 2
                begun = kept(continued(so_far, tokens(places[: middle + 1], FinishReason.ABORT)), longest=end)
                so_far = continued(begun, tokens(places[middle:], FinishReason.STOP))
            else:
                so_far = continued(so_far, tokens(places, FinishReason.STOP))
        assert so_far is not None
        return replace(so_far, reward=float(batch.advantages[start]))

    answers = [answer(start, end) for start, end in itertools.pairwise(batch.offsets.tolist())]
    return [
        Group(number, Prompt(f"train/0/{number}", "", (1,), ""), tuple(itertools.compress(answers, batch.group_ids == number)), 0)
        for number in batch.group_ids.unique().tolist()
    ]


def resumed(groups: Sequence[Group], folder: Path) -> list[Group]:
    """Finished groups as a run finds them that goes on from a checkpoint."""
    from evenkeel.actors.checkpoints.state import TrainingState
    from evenkeel.actors.groups.book import GroupBook
    from tests.actors.cases import at_hand, snapshot_of

    book = GroupBook(groups_per_step=len(groups), max_staleness=0)
    book.admit([group.prompt for group in groups], now=0.0)
    for group in groups:
        book.finish(at_hand(group), now=0.0)
    TrainingState(0, 0, 0.0, snapshot_of(book), {}, None).save(folder)
    return list(TrainingState.load(folder).book.finished)


def packed(groups: Sequence[Group], temperature: float) -> PackedBatch:
    """Args: temperature: at which they were sampled."""
    how: dict[str, Any] = {"overlong": TrainOverlong(), "max_tokens": {"": 0}, "temperature": temperature}
    return pack_groups(groups, learner_version=0, advantage=lambda rewards, _: rewards, **how).batch
