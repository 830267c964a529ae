"""The sampler in SGLang's processes: tokens come from the reported distribution, and from the request's own seed alone.

Seeds are fixed, so each of these outcomes is one number: a p-value that is fine once stays so.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.sampler import sample_seed
from tests.conftest import BackgroundLoop
from tests.rollout.hf_reference import hf_model

pytestmark = pytest.mark.engine

PROBABILITIES = torch.tensor([0.3, 0.0, 0.05, 0.25, 1e-3, 0.199, 0.0, 0.2])
"""The last token but one, and another, can't come."""


@pytest.fixture
def draw(shared_engine: RolloutEngine):
    from evenkeel.rollout.sglang_plugin.seeded_sampler import draw

    return draw


def assert_is_sample_of(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square goodness of fit; tokens that are expected fewer than 5 times share a cell (the test's usual condition)."""
    from scipy.stats import chisquare  # it imports for a second, in every process of the suite

    assert counts[probabilities == 0].sum() == 0
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    is_rare = expected < 5
    seen = [*counts[~is_rare].tolist(), int(counts[is_rare].sum())]
    wanted = [*expected[~is_rare].tolist(), float(expected[is_rare].sum())]
    if wanted[-1] < 5:
        seen, wanted = [*seen[:-2], seen[-2] + seen[-1]], [*wanted[:-2], wanted[-2] + wanted[-1]]
    p = chisquare(seen, wanted).pvalue
    assert 1e-3 < p < 1 - 1e-3, p


def test_the_uniform_numbers_are_splitmix64(draw) -> None:
    from evenkeel.rollout.sglang_plugin.seeded_sampler import uniform

    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    found = uniform(torch.full((5,), 1234567), torch.arange(5))  # a widely published vector of seed 1234567
    assert [int(number * 2**50) for number in found.tolist()] == [word >> 14 for word in published]


@pytest.mark.parametrize(("rows", "words"), [(1, 7), (5, 3000), (9, 49_152)])
def test_the_compiled_draw_gives_the_same_tokens(draw, rows: int, words: int) -> None:
    """Of both, sums go from left to right in float64: the large vocabulary's are cut in two by torch's operators."""
    from evenkeel.rollout.sglang_plugin.seeded_sampler import CompiledDraw

    probabilities = torch.rand(rows, words, generator=torch.Generator().manual_seed(words)) ** 8
    probabilities[0, -1], seeds = 0.0, torch.arange(rows)
    expected, found = (
        torch.stack([function(probabilities, seeds, torch.full((rows,), place)) for place in range(20)])
        for function in (draw, CompiledDraw())
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_drawn_frequencies_are_the_probabilities(draw, varied: str) -> None:
    count = 100_000
    if varied == "seed":
        seeds, positions = torch.tensor([sample_seed(0, f"train/0/{i // 8}", i % 8) for i in range(count)]), torch.full((count,), 17)
    else:
        seeds, positions = torch.full((count,), sample_seed(3, "train/0/5", 2)), torch.arange(count)
    tokens = draw(PROBABILITIES.expand(count, -1), seeds, positions)
    assert_is_sample_of(tokens.bincount(minlength=len(PROBABILITIES)), PROBABILITIES)


@pytest.mark.parametrize("neighbour", ["position", "sample", "prompt", "run"])
def test_neighbours_are_independent(draw, neighbour: str) -> None:
    """A token and the one at the next position, of the next sample, prompt or run: the table of pairs shows no dependence."""
    from scipy.stats import chi2_contingency

    count, halves = 20_000, torch.full((4,), 0.25)

    def tokens(step: int) -> Tensor:
        at = {"position": 0, "sample": 0, "prompt": 0, "run": 0, neighbour: step}
        seeds = [sample_seed(at["run"], f"train/0/{2 * i + at['prompt']}", at["sample"]) for i in range(count)]
        return draw(halves.expand(count, -1), torch.tensor(seeds), torch.full((count,), 40 + at["position"]))

    table = torch.bincount(4 * tokens(0) + tokens(1), minlength=16).view(4, 4)
    assert chi2_contingency(table.numpy()).pvalue > 1e-3


def test_a_row_is_drawn_alone(draw) -> None:
    """Rows of any batch, in any order, over a vocabulary of odd size: always the tokens that each row gets on its own."""
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.softmax(3 * torch.randn(65, 1537, generator=generator), -1)
    seeds, positions = torch.randint(2**62, (65,), generator=generator), torch.randint(500, (65,), generator=generator)
    alone = torch.cat([draw(probabilities[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(65)])
    assert len(alone.unique()) > 30
    for size in (2, 3, 31, 65):
        rows = torch.randperm(65, generator=generator)[:size]
        assert torch.equal(draw(probabilities[rows], seeds[rows], positions[rows]), alone[rows])


@pytest.mark.parametrize("summed", [1, 7, 512, 1536, 1537])
def test_parts_of_the_vocabulary_draw_what_the_whole_draws(draw, monkeypatch: pytest.MonkeyPatch, summed: int) -> None:
    """Bit for bit the sums of a whole row from its left, whatever the parts; rows have parts of probability 0, one is no number."""
    from evenkeel.rollout.sglang_plugin import seeded_sampler

    generator = torch.Generator().manual_seed(1)
    probabilities = torch.softmax(3 * torch.randn(4000, 1537, generator=generator), -1)
    probabilities[::2, 512:1100] = 0
    probabilities[::3, 1300:] = 0
    seeds, positions = torch.randint(2**62, (4000,), generator=generator), torch.randint(500, (4000,), generator=generator)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    below = seeded_sampler.uniform(seeds, positions)[:, None] * cumulative[:, -1:]
    expected = torch.searchsorted(cumulative, below, right=True)[:, 0]
    monkeypatch.setattr(seeded_sampler, "SUMMED", summed)
    assert torch.equal(draw(probabilities, seeds, positions), expected) and len(expected.unique()) > 1000
    probabilities[5, 700] = torch.nan
    found = draw(probabilities, seeds, positions)
    assert torch.equal(found[6:], expected[6:]) and 0 <= int(found[5]) < 1537


def test_a_large_vocabulary_is_never_whole_in_float64(draw) -> None:
    """Of 256 requests at 151,936 words that would be 0.3 GB, twice; the largest tensor that a draw makes here are numbers of a part."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from evenkeel.engines.machine import SUMMED

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if isinstance(made, Tensor) and not made._is_view():
                sizes.append(made.untyped_storage().nbytes() if made.untyped_storage().data_ptr() != given else 0)
            return made

    probabilities = torch.rand(4, 151_936)
    given = probabilities.untyped_storage().data_ptr()
    with Watch():
        tokens = draw(probabilities, torch.arange(4), torch.arange(4))
    assert max(sizes) == 4 * SUMMED * 8 < probabilities.nbytes and tokens.max() > SUMMED


def test_a_row_that_is_no_number_gives_a_token_and_leaves_the_others_alone(draw) -> None:
    """A token outside the vocabulary would end the scheduler's process, with all requests that it has."""
    rows, seeds, positions = PROBABILITIES.repeat(3, 1), torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    expected = draw(rows, seeds, positions)
    rows[1, 2] = torch.nan
    found = draw(rows, seeds, positions)
    assert found[[0, 2]].tolist() == expected[[0, 2]].tolist() and 0 <= int(found[1]) < len(PROBABILITIES)


def test_the_engine_samples_what_it_reports(shared_engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model) -> None:
    prompt, count = [7, 80, 200, 33, 401, 9], 3000
    completions = engine_loop.run(
        shared_engine.generate(prompt, max_tokens=1, samples=count, seeds=list(range(count)), temperature=0.7, ignore_stop=True)
    )
    with torch.no_grad():
        probabilities = torch.softmax(hf_model(tiny_model)(torch.tensor([prompt])).logits[0, -1].double() / 0.7, -1)
    counts = torch.tensor([c.response_ids[0] for c in completions]).bincount(minlength=len(probabilities))
    assert_is_sample_of(counts, probabilities)


def test_seeded_greedy_and_other_requests_in_one_batch(shared_engine: RolloutEngine, engine_loop: BackgroundLoop) -> None:
    """A greedy request gets what it gets alone, a seeded one repeats, one without a seed does not."""
    prompt = [11, 60, 300, 45]

    async def together() -> tuple[tuple[int, ...], ...]:
        kinds = [{"temperature": 0.0}, {"seeds": [5]}, {"seeds": [6]}, {}]
        answers = await asyncio.gather(*(shared_engine.generate(prompt, max_tokens=40, ignore_stop=True, **kind) for kind in kinds))
        return tuple(completions[0].response_ids for completions in answers)

    greedy = engine_loop.run(shared_engine.generate(prompt, max_tokens=40, temperature=0.0, ignore_stop=True))[0].response_ids
    first, second = engine_loop.run(together()), engine_loop.run(together())
    assert first[0] == second[0] == greedy
    assert first[1] == second[1] and first[2] == second[2] and first[1] != first[2]
    assert first[3] != second[3]


def test_top_p_samples_from_the_likeliest_tokens_and_leaves_other_rows_alone(
    shared_engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model
) -> None:
    """At top-p 0.5: the smallest set of likeliest tokens that holds half of the probability, in proportion; their logprobs stay those of
    the whole distribution. What is sampled from the whole vocabulary in the same batches gets the tokens that it gets alone."""
    prompt, count = [7, 80, 200, 33, 401, 9], 1000
    settings = {"max_tokens": 1, "temperature": 0.7, "ignore_stop": True}

    async def together() -> tuple[list, list]:
        return await asyncio.gather(
            shared_engine.generate(prompt, samples=count, seeds=list(range(count)), top_p=0.5, **settings),
            shared_engine.generate(prompt, samples=count, seeds=list(range(count)), **settings),
        )

    cut, whole = engine_loop.run(together())
    alone = engine_loop.run(shared_engine.generate(prompt, samples=count, seeds=list(range(count)), **settings))
    assert [one.response_ids for one in whole] == [one.response_ids for one in alone]
    with torch.no_grad():
        probabilities = torch.softmax(hf_model(tiny_model)(torch.tensor([prompt])).logits[0, -1].double() / 0.7, -1)
    ordered, tokens = probabilities.sort(descending=True)
    kept = tokens[ordered.cumsum(0) - ordered <= 0.5]
    nucleus = torch.zeros_like(probabilities).index_copy(0, kept, probabilities[kept])
    assert 3 < len(kept) < len(probabilities) / 2
    sampled = torch.tensor([one.response_ids[0] for one in cut])
    assert_is_sample_of(sampled.bincount(minlength=len(probabilities)), nucleus)
    told = torch.tensor([one.behavior_logprobs[0] for one in cut]).double()
    assert torch.allclose(told.exp(), probabilities[sampled], rtol=1e-4)
