"""Scores at the weights that sampled a token: those of then, and nothing of the training is any different for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evenkeel.correction.correct import correct
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.kept_weights import KeptWeights
from evenkeel.learner.learner_rank import LearnerRank
from tests.learner.learner_cases import TIS, learner_on, off_policy_batch, random_batch, run_ranks, save_model

SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "tokens_per_microbatch": 150}


def train(learner: LearnerRank, seed: int) -> None:
    learner.step(correct(off_policy_batch(learner, seed=seed), TIS), TIS, step=seed)


def of_versions(learner: LearnerRank, versions: int) -> tuple[Any, Tensor]:
    """A batch whose sequences are of these versions in turn; its first sequence begins in version 0 and ends in 1."""
    batch = random_batch(7)
    turns = torch.arange(batch.num_sequences) % versions
    tokens = torch.repeat_interleave(turns, batch.lengths).int()
    tokens[int(batch.offsets[1]) - 1] = 1
    return replace(batch, weight_versions=tokens, learner_version=versions), batch.loss_mask


def test_each_token_is_scored_at_its_own_weights(tmp_path: Path) -> None:
    with learner_on(save_model(tmp_path / "m"), **SETTINGS) as learner:
        batch, mask = of_versions(learner, 3)
        kept, then = KeptWeights(learner), []
        for version in (0, 1, 2):
            then.append(learner.logprobs(batch))
            if version < 2:
                kept.keep(version, oldest=0)
            train(learner, version)
        now = learner.logprobs(batch)
        found = kept.at_sampling(batch, oldest=1)
        assert torch.equal(learner.logprobs(batch), now)  # the model came back
        for version in (0, 1):
            chosen = mask & (batch.weight_versions == version)
            torch.testing.assert_close(found[chosen], then[version][chosen], rtol=0, atol=2e-6)
            assert float((then[version] - now)[chosen].abs().max()) > 1e-2  # the weights had moved: no other version would do
        assert bool(found[mask & (batch.weight_versions == 2)].isnan().all())  # never kept
        assert kept.versions == (1,)
        kept.keep(3, oldest=2)
        assert kept.versions == (3,)


def state_after(learner: LearnerRank, *, splits: bool) -> list[Tensor]:
    """All weights and all that the optimizer keeps, on this rank, after four steps, with a split before two of them or without."""
    kept = KeptWeights(learner)
    for version in range(4):
        batch, _ = of_versions(learner, 2)
        if splits:
            kept.keep(version, oldest=version - 1)
        if splits and version > 1:
            shifted = replace(batch, weight_versions=batch.weight_versions + version - 2)
            assert bool(kept.at_sampling(shifted, oldest=version - 1)[shifted.weight_versions == version - 1].isfinite().any())
        train(learner, version)
    parameters = [parameter for policy in learner._policies for parameter in policy.parameters()]
    found = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        _, states = learner.optimizer.state_of(parameter)
        found += [states[kind].detach().clone() for kind in sorted(states)]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trained_state_has_the_same_bits_with_and_without_splits(tmp_path: Path, dtype: str) -> None:
    folder, states = save_model(tmp_path / "m"), []
    for splits in (False, True):
        with learner_on(folder, dtype=dtype, **SETTINGS) as learner:
            states.append(state_after(learner, splits=splits))
    without, with_splits = states
    assert len(without) == len(with_splits) > 20
    assert all(torch.equal(one, other) for one, other in zip(without, with_splits, strict=True))


def both_on_a_rank(rank: int, ranks: int, port: int, folder: Path, split: dict[str, Any]) -> list[list[Tensor]]:
    states = []
    learner = LearnerRank(LearnerConfig(**split, **SETTINGS), rank, ranks, "127.0.0.1", port)
    for splits in (False, True):
        learner.load(folder)
        states.append(state_after(learner, splits=splits))
    learner.close()
    return states


@pytest.mark.parametrize("split", [{"data_parallel": 2, "distributed_optimizer": True}, {"tensor_parallel": 2}], ids=["DP2", "TP2"])
def test_on_every_rank_too(tmp_path: Path, split: dict[str, Any]) -> None:
    """Where ranks share the optimizer's state, weights live in one buffer that is gathered after each step."""
    for without, with_splits in run_ranks(both_on_a_rank, save_model(tmp_path / "m"), split):
        assert len(without) > 20
        assert all(torch.equal(one, other) for one, other in zip(without, with_splits, strict=True))
