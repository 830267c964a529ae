"""The asynchronous world in which bounds apart are compared with bounds on the product."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bounded_apart import FORMS, World, batch_of, kl_between, outcome


@pytest.mark.parametrize("form", FORMS)
def test_without_mismatch_the_product_is_its_one_part(form: str) -> None:
    """Then both ways to bound are one: the same run. With mismatch they are not, or the benchmark would compare nothing."""
    together, apart = FORMS[form]
    assert outcome(apart, 0.0, 2, 3, steps=8).reward == pytest.approx(outcome(together, 0.0, 2, 3, steps=8).reward, abs=1e-9)
    assert abs(outcome(apart, 0.1, 2, 3, steps=8).reward - outcome(together, 0.1, 2, 3, steps=8).reward) > 1e-6


def test_the_engine_s_gap_is_what_is_asked_for_and_tokens_are_its_own() -> None:
    """k3 over tokens of mu estimates KL(mu || pi_v) without bias; of present weights a token has no copy to be scored by."""
    world = World.of_kl(0.01, 5)
    assert kl_between(world.start + world.noise, world.start) == pytest.approx(0.01, rel=1e-6)
    draw, values = torch.Generator().manual_seed(0), []
    for _ in range(20):
        batch, _ = batch_of(world, world.start, age=1, draw=draw)
        assert batch.at_sampling_logprobs is not None
        x = batch.at_sampling_logprobs - batch.behavior_logprobs
        values.append(x.expm1() - x)
    found = torch.cat(values)
    assert float(found.mean()) == pytest.approx(0.01, abs=4 * float(found.std()) / len(found) ** 0.5)
    fresh, _ = batch_of(world, world.start, age=0, draw=draw)
    assert fresh.at_sampling_logprobs is not None and bool(fresh.at_sampling_logprobs.isnan().all())
