"""The world in which baselines are compared has exact norms, and the baselines are those of the references."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bounded_apart import ANSWERS, LENGTH, World, batch_of
from benchmarks.least_variance import BASELINES, energies, outcome, squared_norms
from tests.correction import reference_third as third


def scene() -> tuple[World, torch.Tensor, torch.Tensor, torch.Tensor]:
    world = World.of_kl(0.01, 5)
    batch, contexts = batch_of(world, world.start, age=0, draw=torch.Generator().manual_seed(0))
    return world, world.start, contexts, batch.token_ids


def test_norms_are_those_of_autograd() -> None:
    world, logits, contexts, words = scene()
    parameters = torch.zeros(world.features.shape[-1], dtype=torch.float64, requires_grad=True)
    own = world.logits(parameters).log_softmax(-1)[contexts, words].view(ANSWERS, LENGTH).sum(1)
    for answer in (0, 17, ANSWERS - 1):
        (gradient,) = torch.autograd.grad(own[answer], parameters, retain_graph=True)
        assert float(squared_norms(world, logits, contexts, words)[answer]) == pytest.approx(float(gradient.square().sum()), rel=1e-12)


def test_the_baselines_are_those_of_the_references() -> None:
    world, logits, contexts, words = scene()
    draw, count = torch.Generator().manual_seed(1), 8
    rewards, weights = (torch.rand(count, generator=draw, dtype=torch.float64) for _ in range(2))
    norms, spent = squared_norms(world, logits, contexts, words)[:count], energies(logits, contexts, words)[:count]
    groups = [k // 4 for k in range(count)]
    in_groups = [one.view(2, 4, *one.shape[1:]) for one in (rewards, weights, norms, spent)]
    wanted = third.vcpo_baseline(weights=weights.tolist(), norms=norms.sqrt().tolist(), rewards=rewards.tolist(), groups=groups)
    found = BASELINES["vcpo"](*in_groups).expand(-1, 4, 1).flatten()
    assert found.tolist() == pytest.approx(wanted, rel=1e-6)
    p = logits.softmax(-1)
    by_answer = third.otb(
        prox=p[contexts, words].log().view(ANSWERS, LENGTH)[:count].tolist(),
        squares=p.square().sum(-1)[contexts].view(ANSWERS, LENGTH)[:count].tolist(),
        token_rewards=[[0.0] * (LENGTH - 1) + [reward] for reward in rewards.tolist()],
        groups=groups,
        mask=[[1] * LENGTH] * count,
        weights=[[weight] * LENGTH for weight in weights.tolist()],
    ).baselines
    found = BASELINES["otb"](*in_groups).expand(-1, 4, LENGTH).reshape(count, LENGTH)
    assert found.tolist() == [pytest.approx(row, rel=1e-6) for row in by_answer]


def test_a_run_learns_and_its_baselines_differ() -> None:
    """Chance of the start: about a half. Three runs that were the same would compare nothing."""
    ends = {name: outcome(name, 2, 4, 3, steps=20) for name in BASELINES}
    assert min(ends.values()) > 0.6 and len({round(end, 6) for end in ends.values()}) == 3
