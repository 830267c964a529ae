"""Laws that hold for every batch: hypothesis looks for one that breaks them.

packing, order and padding of sequences change nothing; micro-batches and ranks add up; rejection and veto only shrink;
decoupled with proximal = behaviour is bypass; the sequence ratio is the product; normalised weights have mean 1;
binary and top-K divergences are lower bounds of the full one.
"""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.correction import PRESETS, CorrectionConfig, correct, for_step, from_padded, policy_loss, policy_scale, settle, to_padded
from evenkeel.correction.settings.choices import Level
from evenkeel.correction.terms.divergence import Estimator, binary_kl, estimate, table_kl, table_tv, topk_table, total_variation
from evenkeel.correction.terms.ratios import aggregate_log_ratio
from evenkeel.correction.terms.segments import Levels
from tests.correction.fixtures import random_batch

TOPK = ("dppo-topk-tv", "dppo-topk-kl")
NAMES = [name for name in PRESETS if name not in TOPK]
seeds = st.integers(0, 10**6)
quick = settings(max_examples=40, deadline=None)


def full_gradient(batch, target, config):
    leaf = target.clone().requires_grad_()
    out = policy_loss(settle(correct(batch, config), target, config), leaf, config)
    out.loss.backward()
    return leaf.grad * policy_scale(out.partials, config)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


@quick
@given(seed=seeds, preset=st.sampled_from(NAMES))
def test_order_of_sequences_changes_nothing(seed, preset):
    config = CorrectionConfig(preset=preset)
    batch, target = random_batch(seed, spread=0.05)
    order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed)).tolist()
    index = batch.token_index(order)
    close(full_gradient(batch.select(order), target[index], config), full_gradient(batch, target, config)[index])


@quick
@given(seed=seeds, preset=st.sampled_from(NAMES))
def test_padding_changes_nothing(seed, preset):
    """The batch as padded tensors, with rubbish in the padding, and with fully masked sequences added."""
    config = CorrectionConfig(preset=preset)
    batch, target = random_batch(seed, spread=0.05)
    real = torch.zeros(batch.num_sequences, int(batch.lengths.max()) + 3, dtype=torch.bool)
    for row, length in enumerate(batch.lengths.tolist()):
        real[row, row % 3 : row % 3 + length] = True
    rubbish = float("nan")
    padded = from_padded(
        token_ids=to_padded(batch.token_ids, real), attention_mask=real, loss_mask=to_padded(batch.loss_mask, real),
        behavior_logprobs=to_padded(batch.behavior_logprobs, real, padding=rubbish), advantages=to_padded(batch.advantages, real),
        group_ids=batch.group_ids, proximal_logprobs=to_padded(batch.proximal_logprobs, real, padding=rubbish),
        at_sampling_logprobs=to_padded(batch.at_sampling_logprobs, real, padding=0.5),
        reference_logprobs=to_padded(batch.reference_logprobs, real), weight_versions=to_padded(batch.weight_versions, real),
        learner_version=batch.learner_version, advantages_by="own",
    )  # fmt: skip
    expected = full_gradient(batch, target, config)
    close(full_gradient(padded, target, config), expected)
    extra, extra_target = random_batch(seed + 1, sequences=2)
    longer = _concatenate(batch, replace(extra, loss_mask=torch.zeros_like(extra.loss_mask)))
    grad = full_gradient(longer, torch.cat([target, extra_target]), config)
    close(grad[: batch.num_tokens], expected)
    assert not grad[batch.num_tokens :].any()


def _concatenate(first, second):
    names = [f.name for f in fields(first) if isinstance(getattr(first, f.name), torch.Tensor) and f.name not in ("offsets", "group_ids")]
    joined = {name: torch.cat([getattr(first, name), getattr(second, name)]) for name in names}
    offsets = torch.cat([first.offsets, second.offsets[1:] + first.num_tokens])
    return replace(first, **joined, offsets=offsets, group_ids=torch.cat([first.group_ids, second.group_ids + 1000])).validate()


@quick
@given(seed=seeds, preset=st.sampled_from(NAMES), ranks=st.integers(1, 4), kept=st.booleans())
def test_micro_batches_and_ranks_add_up(seed, preset, ranks, kept):
    count = "kept" if kept and not preset.startswith("prime") else "original"  # a late kept count together with a penalty is refused
    config = CorrectionConfig(preset=preset, denominator={"count": count})
    batch, target = random_batch(seed, spread=0.05)
    corrected = settle(correct(batch, config), target, config)
    leaf = target.clone().requires_grad_()
    partials = 0
    for rank in range(ranks):
        share = list(range(rank, batch.num_sequences, ranks))
        for micro in (share[: len(share) // 2], share[len(share) // 2 :]):
            out = policy_loss(corrected.select(micro), leaf[batch.token_index(micro)], config)
            out.loss.backward()
            partials = partials + out.partials
    close(leaf.grad * policy_scale(partials, config), full_gradient(batch, target, config))


@quick
@given(seed=seeds, preset=st.sampled_from(NAMES), spread=st.sampled_from([0.001, 0.05, 0.5]))
def test_rejection_only_shrinks_and_stays_inside_the_mask(seed, preset, spread):
    batch, _ = random_batch(seed, spread=spread)
    corrected = correct(batch, CorrectionConfig(preset=preset))
    assert not (corrected.keep_mask & ~batch.loss_mask).any()
    stricter = CorrectionConfig(preset=preset, veto={"lower": 0.9, "ratio": "rho"})
    assert not (correct(batch, stricter).keep_mask & ~corrected.keep_mask).any()


@quick
@given(seed=seeds)
def test_decoupled_with_proximal_of_behaviour_is_bypass(seed):
    batch, target = random_batch(seed)
    same = replace(batch, proximal_logprobs=batch.behavior_logprobs)
    bypass = full_gradient(batch, target, CorrectionConfig(preset="bypass"))
    for preset in ("ppo", "tis-token", "tis-sequence", "mis-token", "mis-full", "decoupled-ppo", "kpop", "m2po-areal"):
        close(full_gradient(same, target, CorrectionConfig(preset=preset, denominator={"kind": "token_mean"})), bypass)


@quick
@given(seed=seeds)
def test_sequence_ratio_is_the_product_and_geometric_its_root(seed):
    batch, _ = random_batch(seed)
    log_ratio = torch.where(batch.loss_mask, batch.proximal_logprobs - batch.behavior_logprobs, 0)
    levels = Levels(batch)
    for level in (Level.TURN, Level.SEQUENCE, Level.GEOMETRIC):
        units = aggregate_log_ratio(log_ratio, batch.loss_mask, levels.at(level), level=level).exp()
        spread = levels.at(level).spread(units).tolist()
        for sequence in range(batch.num_sequences):
            rows = range(int(batch.offsets[sequence]), int(batch.offsets[sequence + 1]))
            for row in rows:
                same = [k for k in rows if level is not Level.TURN or batch.turn_ids[k] == batch.turn_ids[row]]
                product, count = 1.0, 0
                for k in same:
                    if batch.loss_mask[k]:
                        product *= float(log_ratio[k].exp())
                        count += 1
                expected = product ** (1 / count) if level is Level.GEOMETRIC and count else product
                assert spread[row] == pytest.approx(expected, rel=1e-9)


@quick
@given(seed=seeds, level=st.sampled_from(["token", "turn", "sequence", "geometric"]), mode=st.sampled_from(["raw", "truncate", "mask"]))
def test_normalised_weights_have_mean_one(seed, level, mode):
    batch, _ = random_batch(seed)
    importance = {"mode": mode, "level": level, "lower": 0.4, "upper": 3.0}
    config = CorrectionConfig(importance=importance, normalize={"population": "all"})
    weights = correct(batch, config).importance_weights
    segments = Levels(batch).at(Level(level))
    units = segments.maximum(torch.where(batch.loss_mask, weights, -1))
    assert float(units[units >= 0].mean()) == pytest.approx(1.0, rel=1e-9) or not (units > 0).any()


@quick
@given(seed=seeds)
def test_steps_of_a_batch_have_their_own_denominator(seed):
    """The share of one optimizer step is scaled as if it were the batch."""
    config = CorrectionConfig(preset="tis-token")
    batch, target = random_batch(seed)
    share = list(range(0, batch.num_sequences, 2))
    leaf = target[batch.token_index(share)].clone().requires_grad_()
    policy_loss(for_step(correct(batch, config), share, config), leaf, config).loss.backward()
    close(leaf.grad, full_gradient(batch.select(share), target[batch.token_index(share)], config))


@quick
@given(seed=seeds, sharpness=st.floats(0.1, 8))
def test_merged_divergences_are_lower_bounds(seed, sharpness):
    """Merging outcomes can only lose information: binary <= top-K <= full, for TV and KL."""
    generator = torch.Generator().manual_seed(seed)
    p = (sharpness * torch.randn(200, 12, generator=generator, dtype=torch.float64)).log_softmax(1)
    q = (p + 0.7 * torch.randn(200, 12, generator=generator, dtype=torch.float64)).log_softmax(1)
    token = torch.multinomial(p.exp(), 1, generator=generator)
    listed = p.topk(4, dim=1).indices
    of = [(x.gather(1, token)[:, 0], topk_table(listed, x.gather(1, listed), token[:, 0], x.gather(1, token)[:, 0])) for x in (p, q)]
    full_tv, full_kl = 0.5 * (p.exp() - q.exp()).abs().sum(1), (p.exp() * (p - q)).sum(1)
    slack = 1e-6
    assert (total_variation(of[0][0], of[1][0]) <= table_tv(of[0][1], of[1][1]) + slack).all()
    assert (table_tv(of[0][1], of[1][1]) <= full_tv + slack).all()
    assert (binary_kl(of[0][0], of[1][0]) <= table_kl(of[0][1], of[1][1]) + slack).all()
    assert (table_kl(of[0][1], of[1][1]) <= full_kl + slack).all()


@quick
@given(x=st.lists(st.floats(-60, 60), min_size=1))
def test_k3_is_never_negative(x):
    """e^x - 1 - x >= 0 with equality at 0 alone; in floating point it may round to 0, not below."""
    log_ratio = torch.tensor(x, dtype=torch.float64)
    k3 = estimate(log_ratio, Estimator.K3)
    assert (k3 >= 0).all() and (k3[log_ratio.abs() > 1e-7] > 0).all()


def test_presets_differ():
    """No two presets train alike: each pair differs on a batch with wild ratios or on one with ratios near 1, or makes its advantages
    otherwise (here they are given)."""
    wild, tame = random_batch(3, sequences=60, longest=20, spread=0.7), random_batch(4, sequences=60, longest=20, spread=0.002)
    seen = {}
    for preset in NAMES:
        config = CorrectionConfig(preset=preset)
        gradients = tuple(round(x, 12) for batch, target in (wild, tame) for x in full_gradient(batch, target, config).tolist())
        key = gradients, config.advantage.model_dump_json()
        assert key not in seen, f"{preset} = {seen.get(key)}"
        assert any(gradients)
        seen[key] = preset
