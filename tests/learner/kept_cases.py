"""Batches whose tokens were drawn from a part of the vocabulary, and what Hugging Face and autograd say of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
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
