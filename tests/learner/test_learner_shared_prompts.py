"""A group's prompt is computed once, and nothing else changes.

1. Attention over sequences and their continuations is that of each text on its own: forward and gradient, to 1e-12 in float64.
2. Logprobs, loss and gradient of a batch are those of the plain way, whatever its groups look like.
3. The positions computed are as many as there are different ones: 5,184 for 16 groups of 8 answers of 32 tokens to prompts of 68.
4. What is shared is found by comparing tokens: group ids say no more than where to look.
5. Micro-batches and ranks get prefixes whole where they can; their budget counts computed positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import correct, defer
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model.attention import can_share_prompts, pack, packed_attention
from evenkeel.learner.model.balance import SharedPrefix, plan_microbatches, sequence_cost
from evenkeel.learner.model.inputs import ModelInputs, RowLayout, find_shared_prefixes
from tests.learner.learner_cases import (
    gradients,
    grouped_batch,
    hf_model,
    hf_values,
    largest_difference,
    learner_on,
    random_batch,
    save_model,
    with_noisy_behavior,
)

TIS = CorrectionConfig(preset="tis-token")
ISSUE_SHAPE = [([68] * 8, [32] * 8)] * 16

LAYOUTS = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 45) | st.integers(120, 300), max_size=9)), min_size=1, max_size=6)
"""Sequences, each with its continuations."""
GROUPS = st.lists(
    st.lists(st.tuples(st.integers(1, 24), st.integers(0, 20)), min_size=1, max_size=7).map(
        lambda g: tuple(map(list, zip(*g, strict=True)))
    ),
    min_size=1,
    max_size=5,
)
"""Groups of unequal prompts and answers, some with nothing to train."""
CUTS = st.dictionaries(st.integers(0, 34), st.integers(1, 44))
"""Sequences with a branch, and where it begins."""


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LearnerRank]:
    """Its weights stay as they are: learning rate 0."""
    folder = save_model(tmp_path_factory.mktemp("model") / "m")
    with learner_on(folder, learning_rate=0.0, clip_grad=0.0) as learner:
        yield learner


@contextmanager
def setting(learner: LearnerRank, **changes: Any) -> Iterator[None]:
    before = learner.config
    learner.config = before.model_copy(update=changes)
    try:
        yield
    finally:
        learner.config = before


def rows_computed(learner: LearnerRank, batch: PackedBatch, **changes: Any) -> list[int]:
    """Of each forward pass without gradient: the rows that the transformer's first layer is given."""
    with watched_rows(learner) as rows, setting(learner, **changes):
        learner.logprobs(batch)
    return rows


@contextmanager
def watched_rows(learner: LearnerRank) -> Iterator[list[int]]:
    rows: list[int] = []
    decoder = learner._policies[0].decoder
    hook = decoder.layers[0].register_forward_pre_hook(
        lambda _, args, options: rows.append((args[0] if args else options["hidden_states"]).shape[0]), with_kwargs=True
    )
    yield rows
    hook.remove()


# Attention


@settings(max_examples=60, deadline=None)
@given(shape=LAYOUTS, heads=st.sampled_from([(2, 2), (4, 2)]))
def test_attention_is_that_of_each_text_alone(shape: list[tuple[int, list[int]]], heads: tuple[int, int]) -> None:
    layout = RowLayout(
        tuple(length for length, _ in shape),
        tuple(rows for _, continuations in shape for rows in continuations),
        tuple(t for t, (_, continuations) in enumerate(shape) for _ in continuations),
    )
    total = sum(layout.sequences) + sum(layout.continuations)
    generator = torch.Generator().manual_seed(total)
    inputs = [
        torch.randn(total, n, 8, dtype=torch.float64, generator=generator, requires_grad=True) for n in (heads[0], heads[1], heads[1])
    ]
    slope = torch.randn(total, heads[0], 8, dtype=torch.float64, generator=generator)
    positions, packed = pack(layout, torch.device("cpu"))
    ours = packed_attention(*inputs, packed, None)
    our_gradients = torch.autograd.grad(ours, inputs, slope)

    bounds = torch.tensor([0, *layout.sequences, *layout.continuations]).cumsum(0).tolist()
    rows = [torch.arange(a, b) for a, b in itertools.pairwise(bounds)]
    theirs = torch.zeros_like(ours)
    for i, own in enumerate(rows):
        before = rows[layout.continued[i - len(shape)]] if i >= len(shape) else own[:0]
        text = torch.cat([before, own])
        assert positions[0, own].tolist() == list(range(len(before), len(text)))
        q, k, v = (x[text].transpose(0, 1)[None] for x in inputs)
        values = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        theirs = theirs.index_copy(0, own, values[len(before) :])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for ours_x, theirs_x in zip(our_gradients, torch.autograd.grad(theirs, inputs, slope), strict=True):
        torch.testing.assert_close(ours_x, theirs_x, rtol=0, atol=1e-12)


def test_tiles_waste_little() -> None:
    """8 answers of 31 rows are a tile each, without padding; 8 of 5 are two tiles of 20 rows, all groups of similar prompts in one call."""
    (call,) = pack(RowLayout((68,) * 6, (31,) * 48, tuple(t for t in range(6) for _ in range(8))), torch.device("cpu"))[1].tile_calls
    assert (call.query_rows.shape, call.key_rows.shape) == ((48, 31), (48, 99))
    prompts = (22, 21, 20, 20)
    (call,) = pack(RowLayout(prompts, (5,) * 32, tuple(t for t in range(4) for _ in range(8))), torch.device("cpu"))[1].tile_calls
    assert (call.query_rows.shape, call.key_rows.shape) == ((8, 20), (8, 42))


def test_a_long_answer_is_cut_into_tiles_that_meet_no_keys_beyond_their_end() -> None:
    """300 rows after a prompt of 10: three parts of 100 with 110, 210 and 310 keys; the larger two are similar: one padded call."""
    calls = pack(RowLayout((10,), (300, 300), (0, 0)), torch.device("cpu"))[1].tile_calls
    assert [(tuple(call.query_rows.shape), call.key_rows.shape[1]) for call in calls] == [((4, 100), 310), ((2, 100), 110)]
    assert [call.key_rows.gt(0).sum(1).tolist() for call in calls] == [[309, 309, 209, 209], [109, 109]]  # row 0 is a key, and the padding


# The whole step


def both_ways(learner: LearnerRank, batch: PackedBatch, **changes: Any) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    found = []
    for shared in (False, True):
        with setting(learner, shared_prompts=shared, **changes):
            result = learner.step(defer(batch, TIS), TIS, step=0)
            found.append((result, gradients(learner)))
    return found


@settings(max_examples=30, deadline=None)
@given(shape=GROUPS, budget=st.sampled_from([30, 200, 10_000]), seed=st.integers(0, 5))
@example(shape=[([1, 1], [1, 1])], budget=30, seed=3)  # one position to look at: the gradient of queries and keys is 0, but for rounding
def test_step_equals_the_plain_way(learner: LearnerRank, shape: Any, budget: int, seed: int) -> None:
    """Loss and gradient to 1e-5 of the largest element, logprobs to 1e-5: float32 sums in another order."""
    batch = grouped_batch(shape, seed=seed, temperature=0.8)
    now = learner.logprobs(batch)
    batch = with_noisy_behavior(batch, now, std=0.4)
    (plain, plain_gradient), (shared, shared_gradient) = both_ways(learner, batch, tokens_per_microbatch=budget)
    torch.testing.assert_close(shared.target_logprobs, plain.target_logprobs, rtol=0, atol=1e-5)
    assert shared.loss == pytest.approx(plain.loss, rel=1e-5, abs=1e-6)
    assert shared.metrics == pytest.approx(plain.metrics, rel=1e-4, abs=1e-6)
    assert (shared.entropy is None) == (plain.entropy is None) == (not batch.loss_mask.any())
    if batch.loss_mask.any():
        assert shared.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
        assert largest_difference(shared_gradient, plain_gradient) < 1e-5


def test_logprobs_and_gradient_equal_hugging_face(learner: LearnerRank) -> None:
    """Not only equal to our plain way: to Hugging Face, one sequence at a time, too."""
    batch = grouped_batch([([20] * 6, [9, 1, 14, 3, 0, 7]), ([5, 9, 9], [4, 4, 12]), ([12], [5])])
    assert [prefix.shared for prefix in find_shared_prefixes(batch, share_prompts=True) if len(prefix.members) > 1] == [20, 5]
    ours = learner.logprobs(batch)
    batch = replace(batch, behavior_logprobs=ours, proximal_logprobs=ours)  # on policy: all ratios are 1
    learner.step(correct(batch, TIS), TIS, step=0)
    found = gradients(learner)

    reference = hf_model(learner._require().folder)
    theirs, _ = hf_values(reference, batch)
    loss = -(theirs * batch.advantages)[batch.loss_mask].sum() / batch.loss_mask.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-5)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    assert largest_difference({name: found[name] for name in expected}, expected) < 1e-5


# Positions


def test_positions_computed(learner: LearnerRank) -> None:
    """12,800 the plain way, 16 x (68 + 8 x 32) = 5,184 shared; less 128, because the last token of an answer is never read."""
    batch = grouped_batch(ISSUE_SHAPE)
    assert batch.num_tokens == 12_800
    assert sum(rows_computed(learner, batch, shared_prompts=False)) == 12_800 - 128
    assert sum(rows_computed(learner, batch)) == 5_184 - 128  # by default


def test_budget_counts_computed_positions(learner: LearnerRank) -> None:
    """A group takes 68 + 8 x 31 = 316: six of them fit into 2,048 positions, and sixteen into three micro-batches."""
    rows = rows_computed(learner, grouped_batch(ISSUE_SHAPE), tokens_per_microbatch=2048)
    assert rows == [6 * 316, 5 * 316, 5 * 316]


def test_a_training_pass_is_filled_up(learner: LearnerRank) -> None:
    """50 + 8 x 20 = 210 rows become 256, a multiple of 64, so that few shapes come up; the logprobs are those of the pass that isn't."""
    batch = grouped_batch([([50] * 8, [21] * 8)])
    with watched_rows(learner) as rows:
        logprobs = learner.logprobs(batch)
        trained = learner.step(defer(batch, TIS), TIS, step=0).target_logprobs
    assert rows == [210, 256]
    torch.testing.assert_close(trained, logprobs, rtol=0, atol=1e-6)


def test_a_group_too_large_is_split_and_its_prompt_computed_in_each_part(learner: LearnerRank) -> None:
    batch = grouped_batch([([50] * 8, [21] * 8)])
    assert rows_computed(learner, batch, tokens_per_microbatch=209) == [50 + 4 * 20] * 2
    assert rows_computed(learner, batch, tokens_per_microbatch=210) == [50 + 8 * 20]


def test_demonstrations_share_nothing(learner: LearnerRank) -> None:
    """The supervised start gives each sequence a group of its own: all rows are computed, as without sharing."""
    batch = grouped_batch([([20] * 4, [5] * 4)])
    apart = replace(batch, group_ids=torch.arange(4))
    assert sum(rows_computed(learner, apart)) == 4 * 24


# What is shared


def test_by_hand() -> None:
    """abcdefghij kl | abcdefghij m | abcdefgh XY n of one group: eight tokens are common; read are k, nothing, X, Y beyond them."""
    texts = [[*range(10), 20, 21], [*range(10), 22], [*range(8), 30, 31, 23]]
    masks = [[0] * 10 + [1, 1], [0] * 10 + [1], [0] * 10 + [1]]
    lengths = torch.tensor([len(text) for text in texts])
    n = int(lengths.sum())
    batch = PackedBatch(
        token_ids=torch.tensor([token for text in texts for token in text]),
        offsets=torch.tensor([0, *lengths.cumsum(0).tolist()]),
        loss_mask=torch.tensor([flag for mask in masks for flag in mask], dtype=torch.bool),
        behavior_logprobs=torch.zeros(n),
        advantages=torch.zeros(n),
        weight_versions=torch.zeros(n, dtype=torch.int32),
        group_ids=torch.zeros(3, dtype=torch.int64),
    ).validate()
    assert find_shared_prefixes(batch, share_prompts=True) == [SharedPrefix((0, 1, 2), 8, (3, 2, 2))]
    inputs = ModelInputs.of(batch)
    assert inputs.layout == RowLayout((8,), (3, 2, 2), (0, 0, 0))
    assert inputs.token_ids.tolist() == [*range(8), 8, 9, 20, 8, 9, 30, 31]
    assert inputs.predicted.tolist() == [10, 11, 22, 33]
    assert inputs.predicting_row.tolist() == [9, 10, 12, 14]


def test_one_row_predicts_the_first_token_of_every_answer() -> None:
    inputs = ModelInputs.of(grouped_batch([([12] * 4, [1, 3, 1, 2])]))
    assert inputs.layout == RowLayout((12,), (2, 1), (0, 0))
    assert inputs.predicting_row.tolist() == [11, 11, 12, 13, 11, 11, 14]


@pytest.mark.parametrize("place", [0, 5, 19])
def test_group_ids_are_not_trusted(learner: LearnerRank, place: int) -> None:
    """Another token at some place of one prompt: shared is what comes before it."""
    batch = grouped_batch([([20] * 5, [6] * 5)])
    ids = batch.token_ids.clone()
    ids[batch.offsets[2] + place] = (ids[batch.offsets[2] + place] + 1) % 96
    batch = replace(batch, token_ids=ids)
    assert {prefix.shared for prefix in find_shared_prefixes(batch, share_prompts=True)} == ({25} if place == 0 else {place})
    with setting(learner, shared_prompts=False):
        plain = learner.logprobs(batch)
    torch.testing.assert_close(learner.logprobs(batch), plain, rtol=0, atol=2e-6)


def test_answers_are_not_shared() -> None:
    """Two answers that begin alike: both have their rows, because the shared part ends before the first trained token."""
    batch = grouped_batch([([9, 9], [4, 4])])
    batch = replace(batch, token_ids=batch.token_ids[:13].repeat(2))
    assert find_shared_prefixes(batch, share_prompts=True) == [SharedPrefix((0, 1), 9, (3, 3))]


def branched(batch: PackedBatch, places: dict[int, int], *, new: int = 5) -> PackedBatch:
    """The batch, in which rollouts have a branch.

    Args:
        places: by sequence, how many of its tokens the branch begins with: read there, whether or not they are trained in the sequence.
        new: tokens that follow in a branch, of which the first two are read.
    """
    generator = torch.Generator().manual_seed(9)
    starts, index = batch.offsets.tolist(), [torch.arange(batch.num_tokens)]
    ids, masks, lengths = [batch.token_ids], [batch.loss_mask], batch.lengths.tolist()
    for i, place in places.items():
        index.append(torch.full((place + new,), starts[i]))
        ids += [batch.token_ids[starts[i] : starts[i] + place], torch.randint(0, 96, (new,), generator=generator)]
        masks.append(torch.arange(place + new) >= place + 2)
        lengths.append(place + new)
    found, rollouts = torch.cat(index), torch.tensor([*range(batch.num_sequences), *places])
    return replace(
        batch,
        token_ids=torch.cat(ids),
        loss_mask=torch.cat(masks),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        behavior_logprobs=batch.behavior_logprobs[found],
        advantages=batch.advantages[found],
        weight_versions=batch.weight_versions[found],
        group_ids=batch.group_ids[rollouts],
        rollout_ids=rollouts,
    ).validate()


def test_a_branch_shares_what_was_sampled_before_it(learner: LearnerRank) -> None:
    """Two rollouts of one prompt of 10: 10 + 20 tokens with a branch after 25, and 10 + 4 without one. The branch's 25 are read once, with
    the 15 sampled ones among them trained where they were sampled; the prompt then is read twice."""
    batch = branched(grouped_batch([([10, 10], [20, 4])]), {0: 25})
    assert find_shared_prefixes(batch, share_prompts=True) == [SharedPrefix((0, 2), 25, (4, 4)), SharedPrefix.alone(1, 13)]
    assert rows_computed(learner, batch) == [25 + 4 + 4 + 13]
    assert ModelInputs.of(batch).predicted.numel() == (20 - 2) + 4 + 3


def test_a_thousand_sequences_each_of_which_goes_on_from_the_one_before() -> None:
    """Of a rollout: sequence i reads i + 1 tokens, all of them the next one's first. The longest k share 1001 - k, which saves
    (k - 1) (1001 - k) tokens, most for k = 501."""
    count = 1000
    ids = torch.cat([torch.arange(2 + i) for i in range(count)])
    offsets = torch.tensor([0, *(2 + i for i in range(count))]).cumsum(0)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[offsets[1:] - 1] = True
    same = torch.zeros(count, dtype=torch.int64)
    zeros, versions = torch.zeros(len(ids)), torch.zeros(len(ids), dtype=torch.int32)
    batch = PackedBatch(ids, offsets, mask, zeros, zeros, versions, same, same).validate()
    *alone, together = sorted(find_shared_prefixes(batch, share_prompts=True), key=lambda one: len(one.members))
    assert together == SharedPrefix(tuple(range(499, 1000)), 500, tuple(range(501)))
    assert alone == [SharedPrefix.alone(i, i + 1) for i in range(499)]


@settings(max_examples=20, deadline=None)
@given(
    shape=GROUPS, budget=st.sampled_from([30, 10_000]), seed=st.integers(0, 5), cuts=st.dictionaries(st.integers(0, 34), st.integers(1, 44))
)
def test_a_step_on_branches_equals_the_plain_way(learner: LearnerRank, shape: Any, budget: int, seed: int, cuts: dict[int, int]) -> None:
    """As test_step_equals_the_plain_way."""
    batch = grouped_batch(shape, seed=seed)
    lengths = batch.lengths.tolist()
    batch = branched(batch, {i: place % lengths[i] + 1 for i, place in cuts.items() if i < len(lengths)})
    batch = with_noisy_behavior(batch, learner.logprobs(batch), std=0.4)
    (plain, plain_gradient), (shared, shared_gradient) = both_ways(learner, batch, tokens_per_microbatch=budget)
    torch.testing.assert_close(shared.target_logprobs, plain.target_logprobs, rtol=0, atol=1e-5)
    assert shared.loss == pytest.approx(plain.loss, rel=1e-5, abs=1e-6)
    if batch.loss_mask.any():
        assert largest_difference(shared_gradient, plain_gradient) < 1e-5


def test_a_rollout_cut_in_two_is_as_many_rows_as_the_whole() -> None:
    """One of 12 + 30 tokens; and cut after 20, where the rest is a branch that reads the 20."""
    whole = grouped_batch([([12], [30])])
    ids = torch.cat([whole.token_ids[:20], whole.token_ids])
    mask = torch.cat([whole.loss_mask[:20], whole.loss_mask & (torch.arange(42) >= 20)])
    by_token = {name: getattr(whole, name)[:1].repeat(62) for name in ("behavior_logprobs", "advantages", "weight_versions")}
    cut = replace(
        whole,
        token_ids=ids,
        loss_mask=mask,
        offsets=torch.tensor([0, 20, 62]),
        group_ids=torch.zeros(2, dtype=torch.int64),
        rollout_ids=torch.zeros(2, dtype=torch.int64),
        **by_token,
    ).validate()
    assert len(ModelInputs.of(cut).token_ids) == len(ModelInputs.of(whole).token_ids) == 41
    assert ModelInputs.of(cut).predicted.numel() == ModelInputs.of(whole).predicted.numel()


def test_little_is_not_worth_sharing() -> None:
    """Two answers to a prompt of 6 tokens: 6 rows saved are less than a tenth of 2 x 45 rows, and more of 2 x 15."""
    assert len(find_shared_prefixes(grouped_batch([([6, 6], [40, 40])]), share_prompts=True)) == 2
    assert len(find_shared_prefixes(grouped_batch([([6, 6], [10, 10])]), share_prompts=True)) == 1


def test_a_gpu_in_half_precision_reads_the_plain_way() -> None:
    """torch's variable-length kernel has no continuations."""
    assert not can_share_prompts("cuda", torch.bfloat16)
    assert can_share_prompts("cpu", torch.bfloat16) and can_share_prompts("cpu", torch.float32)


# Plans


FAMILIES = st.lists(st.tuples(st.integers(1, 100), st.lists(st.integers(0, 60), min_size=1, max_size=9)), min_size=1, max_size=20)


@settings(max_examples=200, deadline=None)
@given(shape=FAMILIES, ranks=st.integers(1, 5), budget=st.integers(1, 1000))
def test_plans_of_families(shape: list[tuple[int, list[int]]], ranks: int, budget: int) -> None:
    """Every sequence once; computed positions within the budget unless a micro-batch is one sequence; members stay neighbours."""
    count = 0
    prefixes = []
    for shared, rows in shape:
        prefixes.append(SharedPrefix(tuple(range(count, count + len(rows))), shared, tuple(rows)))
        count += len(rows)
    parts = plan_microbatches(prefixes, ranks, budget, 64).microbatches
    assert sorted(i for rank in parts for part in rank for i in part) == list(range(count))
    assert len(parts) == ranks and len({len(rank) for rank in parts}) == 1
    prefix_of = {i: number for number, prefix in enumerate(prefixes) for i in prefix.members}
    rows_of = {i: rows for prefix in prefixes for i, rows in zip(prefix.members, prefix.rows, strict=True)}
    for part in (part for rank in parts for part in rank if part):
        numbers = [prefix_of[i] for i in part]
        tokens = sum(prefixes[number].shared for number in set(numbers)) + sum(rows_of[i] for i in part)
        assert len(part) == 1 or tokens <= budget


def test_ranks_share_out_a_large_group() -> None:
    """One prefix of 64 on 4 ranks: 16 members each, rather than all on one rank."""
    (prefix,) = find_shared_prefixes(grouped_batch([([10] * 64, [11] * 64)]), share_prompts=True)
    parts = plan_microbatches([prefix], 4, 10_000, 64).microbatches
    assert [sum(map(len, rank)) for rank in parts] == [16] * 4


def test_ranks_with_families_enough_keep_them_whole() -> None:
    prefixes = find_shared_prefixes(grouped_batch(ISSUE_SHAPE), share_prompts=True)
    parts = plan_microbatches(prefixes, 2, 10_000, 64).microbatches
    assert [len({i // 8 for part in rank for i in part}) for rank in parts] == [8, 8]  # 16 groups, none on both ranks


def test_cost_of_a_family() -> None:
    """Work is additive: a beginning and one member cost what the whole sequence does, and each further member what it adds."""
    assert SharedPrefix((0,), 30, (12,)).cost(64) == pytest.approx(sequence_cost(42, 64))
    assert SharedPrefix((0, 1), 30, (12, 12)).cost(64) == pytest.approx(2 * sequence_cost(42, 64) - sequence_cost(30, 64))


def test_random_prompts_are_left_alone() -> None:
    batch = random_batch()
    assert ModelInputs.of(batch, share_prompts=False).layout == ModelInputs.of(batch).layout
