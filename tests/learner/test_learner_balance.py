"""Sequences over ranks and micro-batches: none lost, none split, ranks about equal."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.learner.model.balance import SharedPrefix, plan_microbatches, sequence_cost


def alone(lengths: list[int]) -> list[SharedPrefix]:
    return [SharedPrefix.alone(i, length) for i, length in enumerate(lengths)]


LENGTHS = st.lists(st.integers(0, 400), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(1, 1000), multiple=st.integers(1, 4))
def test_every_sequence_is_in_one_microbatch_within_the_budget(lengths: list[int], ranks: int, budget: int, multiple: int) -> None:
    parts = plan_microbatches(alone(lengths), ranks, budget, 64, multiple=multiple).microbatches
    assert sorted(i for rank in parts for part in rank for i in part) == list(range(len(lengths)))
    assert len(parts) == ranks and len({len(rank) for rank in parts}) == 1 and len(parts[0]) % multiple == 0
    assert len(parts[0]) - max(sum(map(bool, rank)) for rank in parts) < multiple, "no more empty ones than it takes"
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= budget for rank in parts for part in rank if part)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 5))
def test_the_busiest_rank_has_little_more_than_the_mean(lengths: list[int], ranks: int) -> None:
    """Giving work to the least busy keeps the busiest within mean + (1 - 1/ranks) of the largest piece (Graham 1966)."""
    plan = plan_microbatches(alone(lengths), ranks, 512, 64)
    work = [sum(sequence_cost(lengths[i], 64) for part in rank for i in part) for rank in plan.microbatches]
    costs = [sequence_cost(length, 64) for length in lengths]
    assert max(work) <= sum(costs) / ranks + (1 - 1 / ranks) * max(costs) + 1e-6


def test_cost_counts_attention() -> None:
    """At 12 times the hidden size attention costs as much as the matrices."""
    assert sequence_cost(12 * 64, 64) == 2 * 12 * 64
    long_and_short = plan_microbatches(alone([768, 768, *[96] * 16]), 2, 10_000, 64).microbatches
    assert [sum(1 for part in rank for i in part if i < 2) for rank in long_and_short] == [1, 1]


def test_microbatches_are_about_equally_full() -> None:
    """1,100 tokens under a budget of 1,000 make two of about 550, not one of 1,000 and one of 100."""
    (rank,) = plan_microbatches(alone([10] * 110), 1, 1000, 64).microbatches
    assert [sum(10 for _ in part) for part in rank] == [550, 550]
