"""A training step does to the weights what the mathematics says, however it is cut into pieces.

1. Its gradient equals that of the same loss computed by Hugging Face and autograd, one sequence at a time.
2. Three steps equal Hugging Face with torch's AdamW: gradients are not doubled from the second step on.
3. Micro-batches, temperature, and the fused against the staged way change nothing.
4. Minibatches are whole groups, each with its own denominator.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import correct, defer, for_step
from evenkeel.correction.diagnostics.batch_numbers import kept_numbers
from evenkeel.correction.diagnostics.diagnose import diagnose
from evenkeel.correction.errors import ConfigError
from evenkeel.correction.settling import settle
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model import balance
from evenkeel.learner.results import SkipReason
from evenkeel.learner.training.step import optimizer_steps
from tests.learner.learner_cases import (
    TIS,
    gradients,
    hf_model,
    hf_values,
    largest_difference,
    learner_on,
    off_policy_batch,
    poisoned,
    random_batch,
    save_model,
    weights,
    with_noisy_behavior,
)


def test_what_leaves_a_rank_takes_its_own_bytes_along_and_no_others(tmp_path: Path) -> None:
    """A tensor is pickled with all of the memory that it is a part of: as a row of a table it would cost the others' rows too."""
    with learner_on(save_model(tmp_path / "m")) as learner:
        batch = off_policy_batch(learner)
        result, proximal = learner.step(correct(batch, TIS), TIS, step=0), learner.proximal(batch)
    sent = (result.target_logprobs, result.decided.importance_weights, result.decided.proximal_logprobs, proximal.logprobs)
    assert [tensor.untyped_storage().nbytes() for tensor in sent] == [4 * batch.num_tokens] * 4


def test_top_k_ids_are_looked_up_at_their_own_tokens(tmp_path: Path) -> None:
    """Where behaviour logprobs and table are Hugging Face's own, every divergence is 0 and no token is blocked; with the table's rows
    moved by one token nearly half of them are: those that move out."""
    gate = {"kind": "divergence", "divergence": "topk_tv", "threshold": 1e-4}
    config = CorrectionConfig(preset="dppo-topk-tv", topk=5, objective={"gate": gate})
    folder = save_model(tmp_path / "m")
    batch = random_batch(temperature=0.8)
    ids = torch.stack([torch.randperm(96, generator=torch.Generator().manual_seed(i))[:5] for i in range(batch.num_tokens)])
    with torch.no_grad():
        model = hf_model(folder)
        rows = []
        for start, end in itertools.pairwise(batch.offsets.tolist()):
            logits = model(batch.token_ids[None, start:end]).logits[0]
            rows += [torch.zeros(1, 96), torch.log_softmax(logits[:-1] / 0.8, -1)]
        log_p = torch.cat(rows)
        behavior = log_p.gather(1, batch.token_ids[:, None])[:, 0]
    batch = replace(batch, behavior_logprobs=behavior, topk_ids=ids, topk_logprobs=log_p.gather(1, ids))
    assert batch.topk_logprobs is not None
    moved = replace(batch, topk_logprobs=batch.topk_logprobs.roll(1, 0))
    for table, lowest, highest in ((batch, 0.0, 0.0), (moved, 0.2, 0.8)):
        with learner_on(folder, learning_rate=1e-3) as learner:
            blocked = learner.step(correct(table, config), config, step=0).metrics["clip_share"]
        assert lowest <= blocked <= highest


def ppo_with_truncated_weights(model: torch.nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Decoupled PPO: mean over trained tokens of min(prox/mu, 2) max(-A r, -A clip(r, 0.8, 1.2)), written out; and the ratio."""
    target, _ = hf_values(model, batch)
    mask = batch.loss_mask
    ratio = (target - batch.proximal_logprobs)[mask].exp()
    weight = (batch.proximal_logprobs - batch.behavior_logprobs)[mask].exp().clamp(max=2.0)
    advantage = batch.advantages[mask]
    return (weight * torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))).sum() / mask.sum(), ratio


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("tie", [True, False])
def test_gradient_equals_hugging_face_and_autograd(tmp_path: Path, tie: bool, temperature: float) -> None:
    folder = save_model(tmp_path / "m", tie=tie)
    reference = hf_model(folder)
    with learner_on(folder, learning_rate=0.0, clip_grad=0.0, tokens_per_microbatch=90) as learner:
        batch = off_policy_batch(learner, temperature=temperature)
        result = learner.step(correct(batch, TIS), TIS, step=0)
        ours = gradients(learner)
    loss, ratio = ppo_with_truncated_weights(reference, batch)
    loss.backward()
    loss = loss.detach()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert 0.05 < float(((ratio < 0.8) | (ratio > 1.2)).float().mean()) < 0.95  # the clip matters here
    assert result.loss == pytest.approx(float(loss), abs=1e-6)
    assert largest_difference(ours, theirs) < 2e-5
    norm = torch.cat([gradient.flatten() for gradient in theirs.values()]).norm()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    expected = {"embedding": 0.0, "attention": 0.0, "mlp": 0.0, "norms": 0.0} | ({} if tie else {"lm_head": 0.0})
    for name, gradient in theirs.items():
        names = {"embedding": "embed_tokens", "lm_head": "lm_head", "norms": "norm", "attention": "self_attn", "mlp": "mlp"}
        group = next(group for group, part in names.items() if part in name)
        expected[group] = math.hypot(expected[group], float(gradient.norm()))
    assert result.group_norms == pytest.approx(expected, rel=1e-5)


def test_three_steps_equal_adamw(tmp_path: Path) -> None:
    """With Megatron's buffer cleared but not `param.grad`, the second and third gradient norms here would be twice as large."""
    folder = save_model(tmp_path / "m")
    reference = hf_model(folder)
    matrices = [parameter for parameter in reference.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in reference.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95), eps=1e-8
    )
    with learner_on(folder, learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.1, clip_grad=0.5, tokens_per_microbatch=120) as learner:
        for step in range(3):
            batch = off_policy_batch(learner, seed=step)
            result = learner.step(correct(batch, TIS), TIS, step=step)
            optimizer.zero_grad()
            loss, _ = ppo_with_truncated_weights(reference, batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            optimizer.step()
            assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
            assert float(norm) > 0.5  # clipped
        ours = weights(learner)
    assert largest_difference(ours, {name: parameter.detach() for name, parameter in reference.named_parameters()}) < 1e-5


class Kept:
    """A tensor that a backward pass will need; counts the bytes of all that are alive."""

    alive = peak = 0

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        Kept.alive += tensor.nbytes
        Kept.peak = max(Kept.peak, Kept.alive)

    def __del__(self) -> None:
        Kept.alive -= self.tensor.nbytes


def test_recomputed_activations_change_memory_and_nothing_else(tmp_path: Path) -> None:
    """Loss and gradients bit for bit; of 8 layers about one is kept at a time."""
    folder, found, peaks = save_model(tmp_path / "m", num_hidden_layers=8), [], []
    for recompute in (False, True):
        with learner_on(folder, recompute_activations=recompute) as learner:
            corrected, Kept.peak = correct(off_policy_batch(learner), TIS), 0
            with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
                result = learner.step(corrected, TIS, step=0)
            found.append((result.loss, result.grad_norm, gradients(learner)))
            peaks.append(Kept.peak)
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(gradient, found[1][2][name]) for name, gradient in found[0][2].items())
    assert peaks[1] < peaks[0] / 3


def test_one_microbatch_equals_many(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    found, results = [], []
    for tokens in (10_000, 150, 1):
        with learner_on(folder, learning_rate=0.0, clip_grad=0.0, tokens_per_microbatch=tokens) as learner:
            batch = off_policy_batch(learner)
            results.append(learner.step(correct(batch, TIS), TIS, step=0))
            found.append(gradients(learner))
    assert [result.microbatches for result in results] == [1, 3, 24]
    for gradient, result in zip(found, results, strict=True):
        assert largest_difference(gradient, found[0]) < 1e-5
        assert result.loss == pytest.approx(results[0].loss, abs=1e-6)
        assert result.metrics == pytest.approx(results[0].metrics, rel=1e-4, abs=1e-6)


DEFERRED = {
    "tis-token": CorrectionConfig(preset="tis-token"),
    "mis-token": CorrectionConfig(preset="mis-token"),
    "icepop": CorrectionConfig(preset="icepop"),
    "normalised": CorrectionConfig(preset="tis-token", normalize={"population": "all"}),
    "kept": CorrectionConfig(preset="mis-token", denominator={"kind": "token_mean", "count": "kept"}),
}


@pytest.mark.parametrize("name", DEFERRED)
def test_fused_equals_staged(tmp_path: Path, name: str) -> None:
    """One forward with proximal = detached current logprobs, against a proximal forward first: the same gradient to 1e-6 relative."""
    config = DEFERRED[name]
    found, results = [], []
    for is_fused in (True, False):
        with learner_on(save_model(tmp_path / str(is_fused)), learning_rate=0.0, clip_grad=0.0, tokens_per_microbatch=100) as learner:
            batch = random_batch()
            now = learner.logprobs(batch)
            batch = with_noisy_behavior(batch, now, std=0.6)
            corrected = defer(batch, config) if is_fused else correct(replace(batch, proximal_logprobs=now), config)
            assert corrected.is_deferred is is_fused
            results.append(learner.step(corrected, config, step=0))
            found.append(gradients(learner))
            torch.testing.assert_close(results[-1].target_logprobs, now, rtol=0, atol=0)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
    assert largest_difference(*found) < 1e-5  # elementwise: rounding of single entries; the norm above is held to 1e-6


def test_result_counts_what_was_done(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    with learner_on(folder, learning_rate=1e-3, warmup_steps=4) as learner:
        batch = off_policy_batch(learner)
        now = learner.logprobs(batch)
        result = learner.step(correct(batch, TIS), TIS, step=17)
        second = learner.step(correct(batch, TIS), TIS, step=18)
    with torch.no_grad():
        _, entropies = hf_values(hf_model(folder), batch)
    assert (result.step, result.tokens, result.trained_tokens) == (17, batch.num_tokens, int(batch.loss_mask.sum()))
    assert (result.optimizer_steps, result.skipped_steps) == (1, 0)
    assert torch.equal(result.target_logprobs, now)  # the weights from which the update started
    assert result.entropy == pytest.approx(float(entropies[batch.loss_mask].mean()), abs=1e-5)
    assert (result.learning_rate, second.learning_rate) == pytest.approx((1e-3 / 4, 2e-3 / 4))


def test_an_update_that_is_not_made_says_why(tmp_path: Path) -> None:
    """One batch was rejected to the last token, one had the same reward for all answers, one a weight that is no number; one is fine."""
    with learner_on(save_model(tmp_path / "m")) as learner:
        batch = off_policy_batch(learner)
        fine = correct(batch, TIS)
        trained, nothing = int(batch.loss_mask.sum()), torch.zeros_like(batch.loss_mask)
        alike = correct(replace(batch, advantages=torch.zeros_like(batch.advantages)), TIS)
        before = weights(learner)
        for corrected, kept, reason in (
            (replace(fine, keep_mask=nothing), 0, SkipReason.NO_GRADIENT),
            (alike, trained, SkipReason.NO_GRADIENT),
            (poisoned(fine, math.nan), trained, SkipReason.NOT_FINITE),
        ):
            result = learner.step(corrected, TIS, step=0)
            assert (result.skipped, result.optimizer_steps) == ((reason,), 0)
            assert (result.trained_tokens, result.kept_tokens) == (trained, kept)
            assert all(torch.equal(before[name], after) for name, after in weights(learner).items())
        result = learner.step(fine, TIS, step=0)
    assert (result.skipped, result.optimizer_steps, result.kept_tokens) == ((), 1, trained)


def test_learning_rate_follows_warmup_and_decay(tmp_path: Path) -> None:
    """Linear to 1e-3 in 2 steps, then linear to 1e-4 at step 6: 0.5, 1, then 1 - 0.9 (k - 2) / 4 of a thousandth."""
    settings = {"learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup_steps": 2, "decay": "linear", "decay_steps": 6}
    batch = random_batch()
    with learner_on(save_model(tmp_path / "m"), **settings) as learner:
        rates = []
        for _ in range(8):
            learner.supervised_step(batch.token_ids, batch.offsets, batch.loss_mask)
            rates.append(learner.optimizer.learning_rate)
    assert rates == pytest.approx([5e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4, 1e-4, 1e-4])


def _root_of_ess(batch: PackedBatch, target: Tensor, sequences: list[int] | None = None) -> float:
    """Of the products of q of some sequences, or all, over their number."""
    q = (target - batch.behavior_logprobs).double().where(batch.loss_mask, 0)
    w = torch.stack([q[a:b].sum() for a, b in itertools.pairwise(batch.offsets.tolist())]).exp()
    w = w if sequences is None else w[sequences]
    return math.sqrt(float(w.sum() ** 2 / (w.square().sum() * len(w))))


def test_the_rate_of_an_update_follows_what_its_sequences_are_worth(tmp_path: Path) -> None:
    """step_size.by = ess: an update is bit for bit that of a learner whose rate is the factor smaller, weight decay included. The next
    one starts from the schedule's rate again, here and after a resume."""
    config = CorrectionConfig(preset="grpo", step_size={"by": "ess"})
    plain, folder, options = CorrectionConfig(preset="grpo"), save_model(tmp_path / "m"), {"learning_rate": 1e-3, "weight_decay": 0.1}
    with learner_on(folder, **options) as learner:
        batches = [with_noisy_behavior(one, learner.logprobs(one), std=std) for one, std in ((random_batch(), 0.3), (random_batch(1), 0.0))]
        first = learner.step(defer(batches[0], config), config, step=0)
        ours = weights(learner)
        learner.save(tmp_path / "c")
        second = learner.step(defer(batches[1], config), config, step=1)
        learner.restore(tmp_path / "c")
        resumed = learner.step(defer(batches[1], config), config, step=1)
    factor = _root_of_ess(batches[0], first.target_logprobs)
    assert 0.5 < factor < 0.95
    assert first.learning_rate == pytest.approx(1e-3 * factor, rel=1e-5)
    assert first.metrics["step_size_factor"] == pytest.approx(factor, rel=1e-5)
    assert second.learning_rate == resumed.learning_rate and 0.9e-3 < second.learning_rate <= 1e-3
    with learner_on(folder, **options | {"learning_rate": first.learning_rate}) as learner:
        learner.step(defer(batches[0], plain), plain, step=0)
        assert all(torch.equal(ours[name], one) for name, one in weights(learner).items())


def test_a_factor_on_the_rate_of_a_step_is_a_rate_that_is_so_much_smaller(tmp_path: Path) -> None:
    """Of each of its updates, bit for bit, weight decay included, and beside the factor that the correction puts on it. The next step has
    the schedule's rate again."""
    config = CorrectionConfig(preset="grpo", step_size={"by": "ess"})
    folder, options, ends = save_model(tmp_path / "m"), {"weight_decay": 0.1, "optimizer_steps_per_batch": 2}, []
    for rate, scale in ((1e-3, 0.25), (2.5e-4, 1.0)):
        with learner_on(folder, learning_rate=rate, **options) as learner:
            batch = with_noisy_behavior(random_batch(), learner.logprobs(random_batch()), std=0.3)
            batch = replace(batch, proximal_logprobs=learner.logprobs(batch))
            found = learner.step(correct(batch, config), config, step=0, rate_scale=scale)
            ends.append((found.learning_rate, weights(learner)))
            assert found.learning_rate < 0.95 * rate * scale, "the correction's own factor is in it"
            shares = optimizer_steps(correct(batch, config), config, learner.config, step=0)
            of_steps = [_root_of_ess(batch, found.target_logprobs, own) for own, _ in shares]
            assert found.learning_rate == pytest.approx(of_steps[-1] * rate * scale, rel=1e-5)
            assert found.metrics["step_size_factor"] == pytest.approx(sum(of_steps) / 2, rel=1e-5)
            assert learner.step(correct(batch, config), config, step=1).learning_rate > found.learning_rate * (2.0 if scale < 1 else 0.5)
    (scaled, ours), (plain, theirs) = ends
    assert scaled == pytest.approx(plain, rel=1e-12)
    assert all(torch.equal(ours[name], one) for name, one in theirs.items())


def test_a_switch_during_the_warmup_begins_it_anew(tmp_path: Path) -> None:
    """Of 4 steps: a quarter and a half of the rate; after the switch a quarter, a half, three quarters, all of it. Not a product of two."""
    switched = ["before"] * 2 + ["after"] * 5
    with learner_on(save_model(tmp_path / "m"), learning_rate=1e-3, warmup_steps=4) as learner:
        optimizer, batch, rates = learner.optimizer, random_batch(), []
        for objective in switched:
            optimizer.follow(objective)
            learner.supervised_step(batch.token_ids, batch.offsets, batch.loss_mask)
            rates.append(optimizer.learning_rate)
    assert rates == pytest.approx([2.5e-4, 5e-4, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_adam_begins_anew_when_the_correction_is_switched(tmp_path: Path) -> None:
    """Two steps with one correction, two with another: bit for bit what a new optimizer, with its warm-up, makes of the same weights and
    batches. So it is after a resume from before the switch. Without the option the averages of the first two steps show."""
    other = CorrectionConfig(preset="tis-token", importance={"upper": 1.5})
    folder = save_model(tmp_path / "m")
    batches = [random_batch(seed) for seed in range(4)]
    options = {"learning_rate": 1e-3, "warmup_steps": 2}

    def train(learner: LearnerRank, steps: list[tuple[int, CorrectionConfig]]) -> tuple[list[float], dict[str, Tensor]]:
        rates = [learner.step(defer(batches[i], config), config, step=i).learning_rate for i, config in steps]
        return rates, weights(learner)

    before, after = [(0, TIS), (1, TIS)], [(2, other), (3, other)]
    with learner_on(folder, reset_optimizer_on_switch=True, **options) as learner:
        train(learner, before)
        learner.save(tmp_path / "c")
        learner.save_hf(tmp_path / "half")
        ours = train(learner, after)
    with learner_on(folder, reset_optimizer_on_switch=True, **options) as learner:
        learner.restore(tmp_path / "c")
        resumed = train(learner, after)
    with learner_on(tmp_path / "half", **options) as learner:
        fresh = train(learner, after)
    with learner_on(folder, **options) as learner:
        kept = train(learner, before + after)
    assert ours[0] == resumed[0] == fresh[0] == [5e-4, 1e-3] and kept[0][2:] == [1e-3, 1e-3]
    assert all(torch.equal(ours[1][name], tensor) and torch.equal(resumed[1][name], tensor) for name, tensor in fresh[1].items())
    assert largest_difference(kept[1], fresh[1]) > 1e-4


def test_minibatches_are_whole_groups_each_with_its_own_denominator(tmp_path: Path) -> None:
    """The same as calling the learner with each minibatch corrected as a batch of its own."""
    folder = save_model(tmp_path / "m")
    options = {"learning_rate": 1e-3, "clip_grad": 0.0}
    with learner_on(folder, optimizer_steps_per_batch=3, **options) as learner:
        batch = off_policy_batch(learner)
        now = learner.logprobs(batch)
        result = learner.step(correct(batch, TIS), TIS, step=4)
        shares = [sequences for sequences, _ in optimizer_steps(correct(batch, TIS), TIS, learner.config, step=4)]
        ours = weights(learner)
    assert sorted(i for share in shares for i in share) == list(range(batch.num_sequences))
    assert all(len(share) == 8 and len(set(batch.group_ids[share].tolist())) == 2 for share in shares)
    with learner_on(folder, **options) as learner:
        whole = correct(batch, TIS)
        single = [learner.step(for_step(whole, share, TIS), TIS, step=0) for share in shares]
        theirs = weights(learner)
    assert result.grad_norms == pytest.approx([one.grad_norm for one in single], rel=1e-5)
    assert result.loss == pytest.approx(sum(one.loss for one in single) / 3, rel=1e-5)
    assert result.optimizer_steps == 3
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    first = batch.token_index(shares[0])
    torch.testing.assert_close(result.target_logprobs[first], now[first], rtol=0, atol=2e-6)
    last = batch.token_index(shares[2])
    assert float((result.target_logprobs[last] - now[last]).abs().max()) > 1e-3  # the weights have moved since
    assert result.decided.before_update is not None
    assert torch.equal(result.decided.before_update.nonzero().flatten(), first.sort().values)
    trained = result.values.entropies[batch.loss_mask]
    assert bool((trained > 0).all()) and result.entropy == pytest.approx(float(trained.mean()))


@pytest.mark.parametrize("proximal", ["recompute", "behavior"])
def test_m2po_has_a_threshold_for_each_optimizer_step(tmp_path: Path, proximal: str) -> None:
    """Of each step's own tokens, at the weights from which it starts: those of its training pass; later ones have moved on."""
    config = CorrectionConfig(preset="m2po", proximal=proximal)
    with learner_on(save_model(tmp_path / "m"), optimizer_steps_per_batch=3, learning_rate=1e-2, clip_grad=0.0) as learner:
        batch = off_policy_batch(learner)
        batch = replace(with_noisy_behavior(batch, learner.logprobs(batch), std=0.4), proximal_logprobs=learner.logprobs(batch))
        corrected = correct(batch, config)
        result = learner.step(corrected, config, step=0)
        shares = [sequences for sequences, _ in optimizer_steps(corrected, config, learner.config, step=0)]
    moved = 0
    for sequences in shares:
        index = batch.token_index(sequences)
        share = for_step(corrected, sequences, config)
        expected = settle(share, result.target_logprobs[index], config).settled & batch.loss_mask[index]
        assert torch.equal(result.decided.keep_mask[index], expected)
        assert 0 < int(expected.sum()) < int(batch.loss_mask[index].sum())
        at_the_start = settle(share, batch.proximal_logprobs[index], config).settled & batch.loss_mask[index]
        moved += int((at_the_start != expected).sum())
    assert moved > 0


def test_mismatch_in_bypass_with_several_optimizer_steps_is_that_of_the_first(tmp_path: Path) -> None:
    """The learner's own logprobs as mu, plus a gap of 0.02 nats: that is the mismatch, whatever the four steps of the batch do."""
    config = CorrectionConfig(preset="bypass")
    with learner_on(save_model(tmp_path / "m"), optimizer_steps_per_batch=4, learning_rate=1e-2, clip_grad=0.0) as learner:
        batch = off_policy_batch(learner)
        behavior = (learner.logprobs(batch) - 0.02).where(batch.loss_mask, torch.zeros(()))
        batch = replace(batch, behavior_logprobs=behavior, proximal_logprobs=None, weight_versions=torch.zeros_like(batch.weight_versions))
        corrected = correct(batch, config)
        result = learner.step(corrected, config, step=0)
    numbers = diagnose(batch, corrected, result.target_logprobs, decided=result.decided, entropy=result.values.entropies)
    assert numbers["mismatch_log_ratio_mean"] == pytest.approx(0.02, abs=1e-4)
    assert numbers["mismatch_k3_kl"] == pytest.approx(2.01e-4, rel=0.02)
    assert numbers["mismatch_tokens"] == int((batch.loss_mask & result.decided.before_update).sum())
    assert numbers["drift_from_behavior_k3_kl"] > 10 * numbers["mismatch_k3_kl"]
    assert torch.equal(result.decided.proximal_logprobs, behavior)  # what the loss took for the proximal policy, in all four steps


def test_epochs_go_through_the_batch_again_in_another_order(tmp_path: Path) -> None:
    with learner_on(save_model(tmp_path / "m"), optimizer_steps_per_batch=2, epochs_per_batch=2) as learner:
        batch = off_policy_batch(learner)
        corrected = correct(batch, TIS)
        result = learner.step(corrected, TIS, step=0)
        shares = [sequences for sequences, _ in optimizer_steps(corrected, TIS, learner.config, step=0)]
    assert result.optimizer_steps == 4
    assert sorted(shares[0] + shares[1]) == sorted(shares[2] + shares[3]) == list(range(batch.num_sequences))
    assert {tuple(shares[0]), tuple(shares[1])} != {tuple(shares[2]), tuple(shares[3])}


def test_a_broken_token_is_counted_once_however_often_the_batch_is_gone_through(tmp_path: Path) -> None:
    """As the correction service counts it, whose number takes the place of the learner's at steps that are diagnosed."""
    with learner_on(save_model(tmp_path / "m"), optimizer_steps_per_batch=2, epochs_per_batch=3) as learner:
        batch = off_policy_batch(learner)
        behavior = batch.behavior_logprobs.clone()
        behavior[batch.loss_mask.nonzero()[:2]] = -math.inf
        corrected = correct(replace(batch, behavior_logprobs=behavior), TIS)
        result = learner.step(corrected, TIS, step=0)
    told = diagnose(corrected.batch, corrected, result.target_logprobs, decided=result.decided)
    numbers = kept_numbers(tokens=result.trained_tokens, kept=result.kept_tokens, broken=result.broken_tokens)
    assert numbers == {name: told[name] for name in ("broken_tokens", "kept_share")} and result.broken_tokens == 2


def test_a_deferred_batch_has_one_optimizer_step(tmp_path: Path) -> None:
    with (
        learner_on(save_model(tmp_path / "m"), optimizer_steps_per_batch=2) as learner,
        pytest.raises(ConfigError, match=r"optimizer_steps_per_batch 2.*correct\(\)"),
    ):
        learner.step(defer(random_batch(), TIS), TIS, step=0)


def test_unequal_groups_are_never_split() -> None:
    ids = torch.tensor([7, 7, 3, 3, 3, 9, 1, 1])
    parts = balance.minibatches(ids, 3, seed=1)
    assert sorted(i for part in parts for i in part) == list(range(8))
    assert all(set(ids[part].tolist()).isdisjoint(ids[other].tolist()) for part in parts for other in parts if other is not part)
    assert balance.minibatches(ids, 100, seed=1) and len(balance.minibatches(ids, 100, seed=1)) == 4  # no more than there are groups


def test_supervised_loss_is_the_mean_cross_entropy(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    batch = random_batch()
    with learner_on(folder) as learner:
        loss = learner.supervised_step(batch.token_ids, batch.offsets, batch.loss_mask)
    with torch.no_grad():
        logprobs, _ = hf_values(hf_model(folder), batch)
    assert loss == pytest.approx(float(-logprobs[batch.loss_mask].mean()), rel=1e-6)
