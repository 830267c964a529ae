"""A batch in shards is the batch: what the correction does to it doesn't depend on how it is split, by closed sums or by an all-reduce.

The independent way is the same correction of the whole batch in one process.
"""

from __future__ import annotations

import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.correction import (
    PRESETS,
    TOTALS,
    ConfigError,
    CorrectionConfig,
    DataError,
    correct,
    defer,
    diagnose,
    diagnostic_sums,
    diagnostics_of,
    for_step,
    needs_gradient_factor,
    needs_proximal_forward,
    needs_step_forward,
    policy_loss,
    policy_scale,
    settle,
    shard_sums,
)
from evenkeel.correction.shards import second_moment_limit
from evenkeel.correction.terms.rejection import second_moment_keep
from tests.correction.fixtures import random_batch

IN_ONE_PROCESS = {"clip-cov", "kl-cov"}
SETTINGS = [
    *({"preset": name} for name in PRESETS if name not in IN_ONE_PROCESS),
    {"preset": "mis-full", "normalize": {"population": "kept"}, "denominator": {"count": "kept"}},
    {"preset": "mis-full", "importance": {"level": "sequence"}, "denominator": {"kind": "sequence_mean", "count": "kept"}},
    {"preset": "tis-token", "denominator": {"kind": "prompt_mean"}},
    {"preset": "mis-token", "denominator": {"kind": "prompt_mean", "count": "kept"}},
    {"preset": "m2po-areal", "denominator": {"kind": "sequence_mean", "count": "kept"}, "rejection": [
        {"statistic": "second_moment", "upper": 0.04}, {"statistic": "second_moment", "upper": 0.01}, {"lower": 0.5, "upper": 2.0}]},
    {"preset": "m2po", "proximal": "behavior", "denominator": {"count": "kept"}},
    {"preset": "grpo", "kl": {"coefficient": 0.1, "estimator": "k3"}, "entropy_coefficient": 0.0},
]  # fmt: skip


def splits(name: str) -> list[tuple[int, float, list[int]]]:
    """Seed and spread of two batches, and the rank of each of their 12 sequences, others for each name; of four ranks the last has none of
    the second batch."""
    draw = random.Random(name)
    return [(draw.randrange(10**6), spread, [draw.randrange(ranks) for _ in range(12)]) for spread, ranks in ((0.3, 4), (0.002, 3))]


def is_sorted_before(config: CorrectionConfig) -> bool:
    """All tokens are looked at before the step, for which sums are not enough; M2PO itself does it with `settle`."""
    return any(criterion.statistic == "second_moment" for criterion in config.rejection) and not needs_step_forward(config)


def on_ranks(count, work):
    """work(rank, reduce) on each rank, where reduce adds up over all of them: an all-reduce of threads."""
    barrier, given_, found = threading.Barrier(count, timeout=60), {}, {}

    def run(rank):
        def reduce(values):
            given_[rank] = values.clone()
            barrier.wait()
            if rank == 0:
                found["sum"] = sum(given_[other] for other in range(count))
            barrier.wait()
            result = found["sum"].clone()
            barrier.wait()
            return result

        try:
            return work(rank, reduce)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def gradient(pieces, target, batch, config):
    """Gradient of the losses of all pieces (indices, corrected batch), each by itself, added up; the late factor is of all of them."""
    leaf, partials = target.clone().requires_grad_(), 0
    for sequences, corrected in pieces:
        index = batch.token_index(sequences)
        listed = None if batch.topk_logprobs is None else batch.topk_logprobs[index] + 0.1
        result = policy_loss(corrected, leaf[index], config, target_topk_logprobs=listed)
        result.loss.backward()
        partials = partials + result.partials
    return leaf.grad * policy_scale(partials, config)


def test_there_is_something_to_split():
    """Some presets have a normaliser or M2PO's threshold, and all have counts: otherwise equality would show nothing."""
    configs = [CorrectionConfig(**one) for one in SETTINGS]
    assert any(c.normalize.population != "off" for c in configs) and any(is_sorted_before(c) for c in configs)
    batch, _ = random_batch(1)
    half = batch.select(range(6))
    for config in configs:
        if config.denominator.kind != "prompt_mean":
            alone, whole = correct(half, config), correct(batch, config).select(range(6))
            assert not torch.allclose(alone.token_scale, whole.token_scale)


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
def test_shards_are_the_whole_batch_for_every_preset_and_any_split(chosen):
    for seed, spread, ranks in splits(str(chosen)):
        check_shards(CorrectionConfig(**chosen), seed, spread, ranks)


def check_shards(config, seed, spread, ranks):
    batch, target = random_batch(seed, spread=spread, topk=3 if "topk" in config.preset else 0)
    whole = settle(correct(batch, config), target, config)
    shards = [[k for k in range(12) if ranks[k] == rank] for rank in range(4)]
    prompts = 4 if config.denominator.kind == "prompt_mean" else None
    own = [target[batch.token_index(shard)] for shard in shards]

    def settled(rank, add_up, **sums):
        return settle(correct(batch.select(shards[rank]), config, num_prompts=prompts, **sums), own[rank], config, reduce=add_up)

    ways = [on_ranks(4, lambda rank, reduce: settled(rank, reduce, reduce=reduce))]
    if not is_sorted_before(config):
        totals = sum(shard_sums(batch.select(shard), config, num_prompts=prompts) for shard in shards)
        ways.append(on_ranks(4, lambda rank, reduce: settled(rank, reduce, totals=totals)))
    expected = gradient([(range(12), whole)], target, batch, config)
    for corrected in ways:
        for shard, found in zip(shards, corrected, strict=True):
            wanted = whole.select(shard)
            assert torch.equal(found.keep_mask, wanted.keep_mask)
            assert (found.settled is not None) == needs_step_forward(config)
            assert found.settled is None or torch.equal(found.settled, wanted.settled)
            torch.testing.assert_close(found.importance_weights, wanted.importance_weights, rtol=1e-9, atol=0)
            torch.testing.assert_close(found.token_scale, wanted.token_scale, rtol=1e-9, atol=0)
        found = gradient(list(zip(shards, corrected, strict=True)), target, batch, config)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_diagnostics_of_shards_are_those_of_the_whole_batch(preset):
    """Sums of the shards, gathered as objects; one shard may be empty. Quantiles are no sums."""
    for detailed, (seed, spread, ranks) in enumerate(splits(preset)):
        check_diagnostics(CorrectionConfig(preset=preset), seed, spread, ranks, bool(detailed))


def check_diagnostics(config, seed, spread, ranks, detailed):
    batch, target = random_batch(seed, spread=spread, topk=3 if "topk" in config.preset else 0)
    if detailed:
        batch = replace(batch, behavior_logprobs=torch.where(torch.arange(batch.num_tokens) % 11 == 3, torch.nan, batch.behavior_logprobs))
    entropy = -target

    def arguments(sequences):
        index = batch.token_index(sequences)
        corrected = replace(whole.select(sequences), counts=None)
        listed = None if batch.topk_logprobs is None else batch.topk_logprobs[index] + 0.1
        decided = policy_loss(corrected, target[index], config, target_topk_logprobs=listed).decided
        return (corrected.batch, corrected, target[index]), {"decided": decided, "entropy": entropy[index], "detailed": detailed}

    whole = settle(correct(batch, config), target, config)
    given_, options = arguments(range(12))
    expected = diagnose(*given_, **options)
    parts = []
    for rank in range(4):
        given_, options = arguments([k for k in range(12) if ranks[k] == rank])
        parts.append(pickle.loads(pickle.dumps(diagnostic_sums(*given_, **options))))
    found = diagnostics_of(sum(parts))
    assert set(found) == {name for name in expected if "quantile" not in name}
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-6, abs=1e-9), name


def test_counts_of_criteria_add_up_over_shards():
    config = CorrectionConfig(preset="mis-full")
    batch, _target = random_batch(3)
    totals = shard_sums(batch, config)
    shards = [correct(batch.select(part), config, totals=totals) for part in (range(5), range(5, 12))]
    numbers = diagnostics_of(sum(diagnostic_sums(shard.batch, shard) for shard in shards))
    assert numbers == pytest.approx(diagnose(batch, correct(batch, config)), rel=1e-9, abs=1e-12)
    assert numbers["rejected_by_ratio_token_rho"] > 0


FUSABLE = [
    name
    for name in PRESETS
    if needs_proximal_forward(CorrectionConfig(preset=name), 2) and not needs_proximal_forward(CorrectionConfig(preset=name), 1)
]


@pytest.mark.parametrize("preset", sorted(IN_ONE_PROCESS))
def test_a_choice_by_covariance_is_refused_in_shards(preset):
    """Means of a shard would choose other tokens than those of the batch: refused before the batch is corrected, and where it's settled."""
    config = CorrectionConfig(preset=preset)
    batch, target = random_batch(0)
    for given_ in ({"totals": torch.zeros(len(TOTALS), dtype=torch.float64)}, {"reduce": lambda sums: sums}):
        with pytest.raises(ConfigError, match=r"covariance in shards: .* select its share afterwards"):
            correct(batch, config, **given_)
    with pytest.raises(ConfigError, match="covariance in shards"):
        settle(correct(batch, config), target, config, reduce=lambda sums: sums)


@pytest.mark.parametrize("preset", FUSABLE)
def test_deferred_shards_are_the_whole_batch(preset):
    config = CorrectionConfig(preset=preset)
    for seed, spread, ranks in splits(preset):
        batch, target = random_batch(seed, spread=spread)
        shards = [[k for k in range(12) if ranks[k] == rank] for rank in range(4)]
        totals = sum(shard_sums(batch.select(shard), config, is_deferred=True) for shard in shards)
        pieces = [(shard, defer(batch.select(shard), config, totals=totals)) for shard in shards]
        expected = gradient([(range(12), defer(batch, config))], target, batch, config)
        torch.testing.assert_close(gradient(pieces, target, batch, config), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "prompt_mean"])
def test_steps_of_a_sharded_batch_count_over_all_shards(kind):
    """Two optimizer steps a batch on two ranks: the shares of a step together have the scales that one process gives them."""
    config = CorrectionConfig(preset="mis-full", denominator={"kind": kind, "count": "kept"})
    batch, _ = random_batch(5)
    whole = for_step(correct(batch, config), [0, 1, 2, 6, 7, 8], config)

    def work(rank, reduce):
        shard = correct(batch.select(range(6 * rank, 6 * rank + 6)), config, reduce=reduce, num_prompts=4)
        return for_step(shard, range(3), config, reduce=reduce, num_prompts=4)

    for rank, found in enumerate(on_ranks(2, work)):
        torch.testing.assert_close(found.token_scale, whole.select(range(3 * rank, 3 * rank + 3)).token_scale, rtol=1e-9, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.floats(0, 2, width=32), min_size=1, max_size=40, unique=True),
    budget=st.sampled_from([1e-4, 0.04, 0.5, 10.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_m2po_threshold_from_histograms_is_that_of_sorting(sizes, budget, dtype):
    """Distinct sizes: what is kept is what sorting all of them keeps, wherever they lie."""
    values = torch.tensor(sizes, dtype=dtype)
    for rule in ({"is_open": True}, {"least": 0}):
        values = values[values > 0] if "least" in rule else values
        keep = second_moment_keep(values, torch.ones_like(values, dtype=torch.bool), budget=budget, **rule)
        limits = on_ranks(3, lambda rank, reduce: second_moment_limit(values[rank::3], budget=budget, reduce=reduce, **rule))  # noqa: B023
        assert all(torch.equal(values <= limit, keep) for limit in limits)


def test_thresholds_on_both_policies_are_each_settled_in_its_stage():
    """On rho before the training forward, on q by `settle`: q isn't known when shards ask for the first."""
    both = [{"statistic": "second_moment", "upper": 0.01}, {"statistic": "second_moment", "ratio": "q", "upper": 0.04}]
    config = CorrectionConfig(preset="m2po", rejection=both)
    batch, _ = random_batch(3)
    shards = [range(0, 12, 2), range(1, 12, 2)]
    found = on_ranks(2, lambda rank, reduce: correct(batch.select(shards[rank]), config, reduce=reduce))
    whole = correct(batch, config)
    assert not torch.equal(whole.keep_mask, batch.loss_mask)
    assert all(torch.equal(one.keep_mask, whole.select(shard).keep_mask) for one, shard in zip(found, shards, strict=True))


def test_m2po_keeps_equal_sizes_together():
    """Four tokens at 0.3 after one at 0: sorting keeps one of the four (0.09 / 2 >= 0.04, so none), and a budget of 0.05 would cut them."""
    values = torch.tensor([0.0, 0.3, 0.3, 0.3, 0.3])
    assert float(second_moment_limit(values, budget=0.05, reduce=lambda x: x)) < 0.3
    assert float(second_moment_limit(values[1:], budget=0.05, reduce=lambda x: x)) == pytest.approx(0.3)  # the smallest stay


def test_what_shards_can_not_settle_is_refused():
    batch, _ = random_batch(0)
    m2po, mean = CorrectionConfig(preset="m2po-areal"), CorrectionConfig(preset="ppo", denominator={"kind": "prompt_mean"})
    noise = CorrectionConfig(preset="ppo", modulation={"noise_std": 0.2})
    with pytest.raises(ConfigError, match="Give correct\\(\\) `reduce`"):
        shard_sums(batch, m2po)
    with pytest.raises(ConfigError, match="Give num_prompts"):
        shard_sums(batch, mean)
    with pytest.raises(ConfigError, match="order of tokens"):
        correct(batch, noise, reduce=lambda x: x)
    with pytest.raises(ConfigError, match="both totals and reduce"):
        correct(batch, CorrectionConfig(preset="ppo"), totals=torch.zeros(len(TOTALS)), reduce=lambda x: x)
    with pytest.raises(DataError, match="num_prompts - 1 = 1"):
        shard_sums(batch, mean, num_prompts=2)
    with pytest.raises(DataError, match="totals have shape"):
        correct(batch, CorrectionConfig(preset="ppo"), totals=torch.zeros(3))


def test_names_of_the_sums():
    """Of the worked numbers of a batch: tokens of the mask, those kept, and what the denominator counts."""
    batch, _ = random_batch(2)
    config = CorrectionConfig(preset="mis-full", denominator={"kind": "sequence_mean", "count": "kept"})
    sums = dict(zip(TOTALS, shard_sums(batch, config).tolist(), strict=True))
    keep = correct(batch, config).keep_mask
    assert sums["tokens"] == int(batch.loss_mask.sum()) == sums["units"]
    assert sums["kept_tokens"] == int(keep.sum()) == sums["counted_tokens"]
    assert sums["counted_sequences"] == sum(bool(keep[batch.token_index([k])].any()) for k in range(12))


@pytest.mark.filterwarnings("error::UserWarning")
def test_an_empty_batch_warns_once_for_all_shards():
    """One shard without a kept token is no empty batch; all together are."""
    config = CorrectionConfig(preset="mis-token")
    batch, _ = random_batch(3)
    lost = replace(batch, proximal_logprobs=batch.behavior_logprobs - 3)
    kept = replace(batch, proximal_logprobs=batch.behavior_logprobs)
    sums = [shard_sums(one, config) for one in (lost, kept)]
    with pytest.warns(UserWarning, match="every token of the batch"):
        correct(lost, config, totals=sums[0] + sums[0])
    correct(lost, config, totals=sums[0] + sums[1])  # a warning would be an error


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_which_presets_need_a_factor_after_backward(preset):
    """Those whose policy_scale is not 1 on batches with late decisions; no preset does by itself when it is corrected before training."""
    config = CorrectionConfig(preset=preset)
    batch, target = random_batch(4, topk=3 if "topk" in preset else 0)
    for is_deferred in (False, True):
        if is_deferred and (needs_proximal_forward(config, 1) or config.proximal != "recompute"):
            continue
        corrected = settle((defer if is_deferred else correct)(batch, config), target, config)
        partials = policy_loss(corrected, target, config, target_topk_logprobs=batch.topk_logprobs).partials
        assert (policy_scale(partials, config) != 1.0) == needs_gradient_factor(config, is_deferred=is_deferred)
