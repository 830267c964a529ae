"""The sampler in SGLang's processes: tokens come from the reported distribution, and from the request's own seed alone.

Seeds are fixed, so each of these outcomes is one number: a p-value that is fine once stays so.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from evenkeel.rollout.config import Truncation
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.sampler import sample_seed
from evenkeel.rollout.trajectory import KeptTokens, Trajectory
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


def kept_by_hand(row: list[float], top_p: float, top_k: int, min_p: float) -> list[int]:
    """One token after the other, as the three are described."""
    order, found, before = sorted(range(len(row)), key=lambda token: (-row[token], token)), [], 0.0
    for place, token in enumerate(order):
        if before > top_p < 1 or place >= top_k or row[token] < min_p * row[order[0]]:
            break
        found.append(token)
        before += row[token]
    return found


def test_kept_sets_are_what_top_p_top_k_and_min_p_all_keep_and_ties_go_by_the_id(draw) -> None:
    """Against a loop over the tokens and, without ties, against what SGLang itself keeps; probabilities of sixteenths have many ties, and
    a third of the tokens can't come."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    from evenkeel.rollout.sglang_plugin.seeded_sampler import kept_sets

    generator = torch.Generator().manual_seed(0)
    smooth = torch.softmax(4 * torch.randn(300, 2003, generator=generator), -1)
    tied = torch.randint(0, 3, (300, 2003), generator=generator) * 2.0 ** torch.randint(0, 6, (300, 2003), generator=generator)
    top_ps = torch.tensor([1.0, 0.9, 0.31, 1e-6]).repeat(75)
    top_ks = torch.tensor([2003, 2**30, 50, 7, 2]).repeat(60)
    min_ps = torch.tensor([0.0, 0.02, 0.51]).repeat(100)
    sizes = set()
    for rows in (smooth, tied / tied.sum(-1, keepdim=True)):
        ids, counts = kept_sets(rows, top_ps, top_ks, min_ps)
        found = [kept[:count] for kept, count in zip(ids.tolist(), counts.tolist(), strict=True)]
        settings = zip(rows.tolist(), top_ps.tolist(), top_ks.tolist(), min_ps.tolist(), strict=True)
        assert found == [kept_by_hand(*each) for each in settings]
        sizes |= set(map(len, found))
    assert {1, 2, 7, 50, 2003} < sizes and len(sizes) > 50
    cut = top_ps < 1  # SGLang's sums of float32 are over 1 before a row ends
    of_sglang = top_k_top_p_min_p_sampling_from_probs_torch(
        smooth[cut], top_ks[cut], top_ps[cut], min_ps[cut], True, None, torch.zeros(int(cut.sum())), return_filtered_probs=True
    )
    _, weights, tokens, _ = of_sglang
    ids, counts = kept_sets(smooth[cut], top_ps[cut], top_ks[cut], min_ps[cut])
    assert [row[keeps].tolist() for row, keeps in zip(tokens, weights > 0, strict=True)] == [
        row[:count].tolist() for row, count in zip(ids, counts.tolist(), strict=True)
    ]


def test_a_flat_row_makes_no_table_of_the_others_wider(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 40 requests at a high temperature: tables of the whole vocabulary for all of them would be gigabytes with a real one. Rows
    that are sorted at each width, one flat and one that keeps 900 tokens among them; each keeps what it keeps alone."""
    from evenkeel.rollout.sglang_plugin.seeded_sampler import kept_sets

    sharp = torch.softmax(8 * torch.randn(40, 20_000, generator=torch.Generator().manual_seed(0)), -1)
    sharp[7], sharp[30] = torch.arange(20_000, 0, -1), 0.0
    sharp[30, :900] = torch.arange(900, 0, -1).float()
    sharp[30, 900:] = 1e-6
    rows = sharp / sharp.sum(-1, keepdim=True)
    limits = torch.full((40,), 0.95), torch.full((40,), 20_000), torch.zeros(40)
    listed, topk = list[tuple[int, int]](), torch.Tensor.topk

    def noted(table: torch.Tensor, width: int) -> Any:
        listed.append((len(table), width))
        return topk(table, width)

    monkeypatch.setattr(torch.Tensor, "topk", noted)
    ids, counts = kept_sets(rows, *limits)
    assert listed == [(40, 128), (2, 1024), (1, 8192), (1, 20_000)]
    for row in range(40):
        alone, (count,) = kept_sets(rows[row : row + 1], *(limit[:1] for limit in limits))
        assert int(counts[row]) == int(count) and torch.equal(ids[row, : int(count)], alone[0, : int(count)])
    assert int(counts[7]) > 8192 and 128 < int(counts[30]) < 900


def test_a_row_that_is_no_number_has_no_kept_set(draw) -> None:
    """Its logprob is then no number either, for which its request is refused."""
    from evenkeel.rollout.sglang_plugin.seeded_sampler import kept_sets

    rows = torch.stack([PROBABILITIES, torch.full_like(PROBABILITIES, torch.nan)])
    for top_p, top_k, min_p in ((0.5, 100, 0.0), (1.0, 3, 0.0), (1.0, 100, 0.1)):
        _, counts = kept_sets(rows, torch.full((2,), top_p), torch.full((2,), top_k), torch.full((2,), min_p))
        assert counts[0] > 0 and counts[1] == 0


@pytest.mark.parametrize("setting", [{"top_p": 0.5}, {"min_p": 0.05}, {"top_p": 0.7, "top_k": 12, "min_p": 0.05}])
def test_tokens_come_from_the_kept_set_which_is_reported_and_other_rows_are_left_alone(
    shared_engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model, setting: dict[str, float]
) -> None:
    """In proportion to their probabilities; logprobs are those of the kept set. Answers that nothing is trained on are the same ones, and
    come without it. What is sampled from the whole vocabulary in the same batches gets the tokens and logprobs that it gets alone."""
    prompt, count, truncation = [7, 80, 200, 33, 401, 9], 600, Truncation(**setting)
    ask = {"max_tokens": 1, "temperature": 0.7, "ignore_stop": True, "samples": count, "seeds": list(range(count))}

    async def together() -> tuple[list[Trajectory], ...]:
        return await asyncio.gather(
            shared_engine.generate(prompt, truncation=truncation, **ask),
            shared_engine.generate(prompt, truncation=truncation, is_trained=False, **ask),
            shared_engine.generate(prompt, **ask),
            shared_engine.generate(prompt, **ask | {"temperature": 0.0, "samples": 8, "seeds": list(range(8))}),
        )

    cut, evaluated, whole, greedy = engine_loop.run(together())
    alone = engine_loop.run(shared_engine.generate(prompt, **ask))
    tokens_of = [(one.response_ids, one.behavior_logprobs) for one in alone]
    assert [(one.response_ids, one.behavior_logprobs) for one in whole] == tokens_of and whole[0].kept_tokens is None
    with torch.no_grad():
        logits = hf_model(tiny_model)(torch.tensor([prompt])).logits[0, -1].double() / 0.7
    assert {one.response_ids[0] for one in greedy} == {int(logits.argmax())} and greedy[0].kept_tokens is None
    probabilities = torch.softmax(logits, -1)
    kept = kept_by_hand(probabilities.tolist(), truncation.top_p, truncation.top_k or len(logits), truncation.min_p)
    assert 3 < len(kept) < len(probabilities) / 2
    nucleus = torch.zeros_like(probabilities).index_copy(0, torch.tensor(kept), probabilities[kept])
    sampled = torch.tensor([one.response_ids[0] for one in cut])
    assert_is_sample_of(sampled.bincount(minlength=len(probabilities)), nucleus)
    told = torch.tensor([one.behavior_logprobs[0] for one in cut]).double()
    assert torch.allclose(told.exp(), (nucleus / nucleus.sum())[sampled], rtol=1e-4)
    assert all(one.kept_tokens == KeptTokens.of([kept]) for one in cut)
    assert [(one.response_ids, one.behavior_logprobs, one.kept_tokens) for one in evaluated] == [
        (one.response_ids, one.behavior_logprobs, None) for one in cut
    ]


def test_kept_sets_go_on_over_a_long_answer(shared_engine: RolloutEngine, engine_loop: BackgroundLoop, tiny_model) -> None:
    """SGLang sends every 50th token. A token that the whole vocabulary may give (min-p of almost nothing) has a set of size 0."""
    prompt = [11, 60, 300, 45]
    model = hf_model(tiny_model)
    for truncation, is_whole in ((Truncation(top_p=0.8, top_k=20), False), (Truncation(min_p=1e-9), True)):
        ask = {"max_tokens": 130, "seeds": [3], "ignore_stop": True}
        (answer,) = engine_loop.run(shared_engine.generate(prompt, truncation=truncation, **ask))
        sets = answer.kept_tokens
        assert sets is not None and len(sets.counts) == 130 and len(sets.ids) == sum(sets.counts)
        if is_whole:
            assert not sets.ids
            (other,) = engine_loop.run(shared_engine.generate(prompt, **ask))
            assert (other.response_ids, other.behavior_logprobs) == (answer.response_ids, answer.behavior_logprobs)
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.response_ids]])).logits[0, len(prompt) - 1 : -1].double()
        for place, row in enumerate(torch.softmax(logits, -1)):
            kept = sets.ids[sum(sets.counts[:place]) : sum(sets.counts[: place + 1])].tolist()
            assert kept == kept_by_hand(row.tolist(), 0.8, 20, 0.0)
            expected = float(row[answer.response_ids[place]] / row[kept].sum())
            assert math.exp(answer.behavior_logprobs[place]) == pytest.approx(expected, rel=1e-4)
