"""One test for each contradiction of the sources, with a case on which they differ; docs/correction.md has the decisions."""

import math
from dataclasses import replace

import pytest
import torch

from evenkeel.correction import (
    PRESETS,
    ConfigError,
    CorrectionConfig,
    DataError,
    correct,
    diagnose,
    for_step,
    group_advantages,
    policy_loss,
    presets_table,
    settle,
)
from evenkeel.correction.settings.choices import Statistic, WeightMode
from evenkeel.correction.terms.divergence import Estimator, estimate, table_kl, table_tv, topk_table
from evenkeel.correction.terms.importance import bounded_weights
from evenkeel.correction.terms.objectives import clipped_loss
from evenkeel.correction.terms.rejection import second_moment_keep, token_statistic, within
from tests.correction.fixtures import MU, PROX, THETA, flat_log, random_batch, worked_example

LOG_RHO = flat_log(PROX) - flat_log(MU)
ALL = torch.ones(9, dtype=torch.bool)


def run(preset, batch=None, **overrides):
    config = CorrectionConfig(preset=preset, **overrides)
    corrected = correct(worked_example() if batch is None else batch, config)
    theta = flat_log(THETA).requires_grad_()
    out = policy_loss(corrected, theta, config)
    out.loss.backward()
    return corrected, replace(out, loss=out.loss.detach()), theta.grad


def kept_of(config, target):
    """[N] tokens that get a gradient."""
    leaf = target.clone().requires_grad_()
    policy_loss(correct(worked_example(), config), leaf, config).loss.backward()
    return (leaf.grad != 0).tolist()


def test_every_preset_has_its_row():
    table = presets_table()
    assert all(f"| `{name}` |" in table for name in PRESETS)


def test_c01_bounds_are_on_the_ratio():
    ratios = torch.tensor([0.25, 0.4, 1.0, 3.0, 6.0], dtype=torch.float64)
    keep = within(ratios.log(), lower=math.log(0.5), upper=math.log(5.0))
    assert ratios[keep].tolist() == [1.0, 3.0]  # verl's k1 would keep 0.25, 0.4 and 1: the same bounds on 1 / ratio
    k1 = token_statistic(Statistic.K1, ratios.log(), torch.zeros(5).double(), torch.ones(5, dtype=torch.bool))
    assert ratios[within(k1, lower=math.log(0.5), upper=math.log(5.0))].tolist() == [0.25, 0.4, 1.0]


def test_c02_rejected_tokens_count():
    assert float(run("mis-token")[1].loss) == pytest.approx(-0.328333, abs=1e-6)
    assert float(run("mis-token", denominator={"count": "kept"})[1].loss) == pytest.approx(-0.422143, abs=1e-6)


def test_c03_rejected_sequences_count():
    tokens = {"importance": {"level": "token"}}
    assert float(run("mis-sequence", **tokens, denominator={"kind": "sequence_mean"})[1].loss) == pytest.approx(-0.1675, abs=1e-6)
    kept = {"kind": "sequence_mean", "count": "kept"}
    assert float(run("mis-sequence", **tokens, denominator=kept)[1].loss) == pytest.approx(-0.5025, abs=1e-6)


def test_c04_decoupled_carries_rho():
    assert float(run("decoupled-ppo")[1].loss) == pytest.approx(0.178333, abs=1e-6)


def test_c05_c09_kpop_keeps_by_the_larger_direction():
    forward_only = [{"statistic": "binary_kl", "upper": 0.1}]
    assert run("kpop")[0].keep_mask.tolist() == [True] * 4 + [False, True, False, True, True]
    # KL(mu || prox) alone would keep B1: 0.097867 against 0.127630 in the other direction.
    assert run("kpop", rejection=forward_only)[0].keep_mask.tolist() == [True] * 5 + [True, False, True, True]
    assert run("kpop", rejection=[{"statistic": "binary_kl_max", "upper": 2.0}])[0].keep_mask.all()


def test_c06_icepop_keeps_the_ratio():
    weights = run("icepop")[0].importance_weights
    assert weights.tolist() == pytest.approx([1, 1.25, 0, 1.1, 0.8, 1.2, 0, 1.02, 0.99], abs=1e-9)
    at_bounds = bounded_weights(torch.tensor([0.5, 5.0]).double(), mode=WeightMode.MASK, lower=0.5, upper=5.0)
    assert at_bounds.tolist() == pytest.approx([0.5, 5.0])


def test_c07_dppo_has_the_papers_constants():
    token_mean = {"kind": "token_mean"}
    assert float(run("dppo-binary-tv", denominator=token_mean)[1].loss) == pytest.approx(-0.594657, abs=1e-6)
    verl = {"upper": 3.0}
    assert float(run("dppo-binary-tv", denominator=token_mean, objective=verl)[1].loss) == pytest.approx(-0.480337, abs=1e-6)


def test_c08_the_rest_takes_part_in_topk():
    mu, theta = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).double().log(), torch.tensor([0.3, 0.3, 0.15, 0.15, 0.10]).double().log()
    listed, sampled = torch.tensor([[0, 1]]), torch.tensor([3])
    tables = [topk_table(listed, p[None, :2], sampled, p[3:4]) for p in (mu, theta)]
    assert float(table_tv(*tables)) == pytest.approx(0.2)  # 0.175 without the rest
    assert float(table_kl(*tables)) == pytest.approx(0.089145, abs=1e-6)


def test_c10_opsm_compares_with_the_sampler():
    """A sequence D in addition to the example: A = -1, mu .5 .4, theta .4 .3: mean log(mu / theta) = 0.255413."""
    mu, theta = torch.tensor([0.5, 0.4]).double().log(), torch.tensor([0.4, 0.3]).double().log()
    batch = replace(
        worked_example(),
        token_ids=torch.arange(2), offsets=torch.tensor([0, 2]), loss_mask=torch.ones(2, dtype=torch.bool), behavior_logprobs=mu,
        proximal_logprobs=theta, advantages=torch.tensor([-1.0, -1.0]).double(), weight_versions=torch.zeros(2, dtype=torch.int32),
        group_ids=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    for delta, is_kept in ((0.1, False), (0.2, False), (0.5, True)):
        rejection = [{"statistic": "k1", "ratio": "q", "level": "geometric", "upper": delta, "side": "negative"}]
        config = CorrectionConfig(preset="opsm", rejection=rejection)
        leaf = theta.clone().requires_grad_()
        policy_loss(correct(batch, config), leaf, config).loss.backward()
        assert bool((leaf.grad != 0).all()) == is_kept
    # In the example itself B is dropped with prox (statistic 0.362) and kept with mu (-0.222).
    assert run("opsm")[1].partials[4] == 9


def test_c11_a3po_of_fresh_tokens_is_mu():
    fresh, _, _ = run("a-3po", worked_example(proximal_logprobs=None))
    bypass = float(run("bypass")[1].loss)
    assert float(policy_loss(fresh, flat_log(THETA), CorrectionConfig(preset="a-3po")).loss) == pytest.approx(bypass)


def test_c12_m2po_removes_the_fewest():
    """AReaL's rule on all tokens; M2PO's on those in the two quadrants in which a clip works."""
    keep = second_moment_keep(LOG_RHO, ALL, budget=0.04)
    assert keep.tolist() == [True, True, False, True, True, True, False, True, True]
    assert float(LOG_RHO[keep].square().mean()) == pytest.approx(0.020343, abs=1e-6)
    log_q = flat_log(THETA) - flat_log(MU)
    assert float(log_q[second_moment_keep(log_q, ALL, budget=0.04)].square().mean()) == pytest.approx(0.026456, abs=1e-6)
    assert int(second_moment_keep(torch.full((9,), 3.0), ALL, budget=0.04).sum()) == 1
    m2po = CorrectionConfig(preset="m2po")
    kept = settle(correct(worked_example(), m2po), flat_log(THETA), m2po).settled
    assert kept.tolist() == [True] * 4 + [False] + [True] * 4  # q of 0.6 under A < 0; the q of 0.3 and 3.6 are in no quadrant
    quadrants = log_q * worked_example().advantages.sign() > 0
    assert float(log_q[kept & quadrants].square().mean()) == pytest.approx(0.039659, abs=1e-6)
    with pytest.raises(DataError, match="Before the step's first micro-batch call settle"):
        policy_loss(correct(worked_example(), m2po), flat_log(THETA), m2po)


def test_c12_m2po_is_of_a_step_not_of_a_batch():
    """Two optimizer steps: each has a threshold of its own, at its own weights. The first's weights are the proximal ones."""
    config = CorrectionConfig(preset="m2po")
    batch, moved = random_batch(11, spread=0.4)
    corrected = correct(batch, config)
    for sequences, logprobs in ((range(6), batch.proximal_logprobs), (range(6, 12), moved)):
        own = logprobs[batch.token_index(sequences)]
        share = settle(for_step(corrected, sequences, config), own, config)
        alone = replace(batch, proximal_logprobs=None).select(sequences)
        expected = settle(correct(alone, config), own, config)
        assert torch.equal(share.settled, expected.settled) and not share.settled.all()
        results = [policy_loss(one, own, config) for one in (share, expected)]
        torch.testing.assert_close(results[0].token_losses, results[1].token_losses)


def test_c13_minirl_gates():
    """r of 1.275: over minirl's 1.27, under minirl-tis' 1.28. q of 4: cut by minirl-tis alone."""
    theta = flat_log(PROX).clone()
    theta[0] += math.log(1.275)
    assert not kept_of(CorrectionConfig(preset="minirl"), theta)[0]
    assert kept_of(CorrectionConfig(preset="minirl-tis"), theta)[0]
    gradients = [float(run(name)[2][0]) for name in ("minirl", "minirl-tis")]
    assert gradients[0] == pytest.approx(gradients[1])


def test_c14_cispo_has_an_absolute_cap_and_no_floor():
    assert float(run("cispo")[1].loss) == pytest.approx(0.489328, abs=1e-6)
    assert float(run("pg-tis", denominator={"kind": "token_mean"})[1].loss) == pytest.approx(-0.433654, abs=1e-6)


def test_c15_normalisation_counts_all_units_and_each_sequence_once():
    weights = run("tis-sequence", normalize={"population": "all"})[0].importance_weights
    assert weights[[0, 4, 7]].tolist() == pytest.approx([0.251157, 1.826595, 0.922248], abs=1e-6)
    geometric = run("tis-sequence", importance={"level": "geometric"}, normalize={"population": "all"})[0].importance_weights
    assert float(geometric[[0, 4, 7]].mean()) == pytest.approx(1.0)  # Miles stops with an error here


def test_c16_veto_is_on_the_ratio():
    """At 0.1 only a probability is under the limit (prox 0.02); at 0.25 the ratio 0.2 is too."""
    assert run("tis-token", veto={"lower": 0.1})[0].keep_mask.all()
    assert not run("tis-token", veto={"lower": 0.1, "quantity": "probability"})[0].keep_mask[:4].any()
    assert not run("tis-token", veto={"lower": 0.25})[0].keep_mask[:4].any()


def test_c17_grpo_std():
    rewards, groups = torch.tensor([1.0, 0, 0, 0, 5.0]).double(), torch.tensor([3, 3, 3, 3, 8])
    assert group_advantages(rewards, groups).tolist() == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999, 0.0], abs=1e-6)
    assert group_advantages(rewards, groups, ddof=0, epsilon=1e-9)[:2].tolist() == pytest.approx([1.732051, -0.577350], abs=1e-6)
    assert group_advantages(rewards, groups, epsilon=1e-4)[0] == pytest.approx(1.4997, abs=1e-5)
    assert group_advantages(rewards, groups, estimator="grpo_no_std")[:2].tolist() == [0.75, -0.25]
    assert group_advantages(rewards, groups, estimator="max_rl")[:2].tolist() == [3.0, -1.0]
    rloo = group_advantages(torch.tensor([1.0, 0, 0, 1]), torch.zeros(4, dtype=torch.int64), estimator="rloo")
    assert rloo.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_c18_dual_clip():
    log5, log2 = torch.tensor([5.0]).log(), torch.tensor([2.0]).log()
    minus, plus = torch.tensor([-1.0]), torch.tensor([1.0])
    assert float(clipped_loss(log5, minus)[0]) == pytest.approx(5)
    assert float(clipped_loss(log5, minus, dual_clip=3.0)[0]) == pytest.approx(3)
    assert float(clipped_loss(log5, minus, dual_clip=1.4)[0]) == pytest.approx(1.4)
    assert float(clipped_loss(log2, minus, dual_clip=3.0)[0]) == pytest.approx(2)
    assert float(clipped_loss(log5, plus, dual_clip=3.0)[0]) == pytest.approx(-1.2)
    assert CorrectionConfig(preset="ppo").objective.dual_clip is None


def test_c19_unbiased_kl_has_the_gradient_of_the_reverse_kl():
    reference = [math.log(p) for p in (0.55, 0.45, 0.05, 0.70)]
    batch = worked_example(reference_logprobs=torch.tensor(reference + [-1.0] * 5, dtype=torch.float64))
    kl = {"coefficient": 9.0, "estimator": "unbiased_k3"}  # token mean of 9 tokens: coefficients as they are
    objective = {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2}
    _, _, with_kl = run("bypass", batch, objective=objective, kl=kl)
    _, _, without = run("bypass", batch, objective=objective)
    assert (with_kl - without)[:4].tolist() == pytest.approx([0, 0.367982, -0.153248, 0.133531], abs=1e-6)
    by_hand = [t / m * (math.log(t) - ref) for (m, t, ref) in zip(MU[0], THETA[0], reference, strict=True)]
    assert (with_kl - without)[:4].tolist() == pytest.approx(by_hand)
    _, _, plain = run("bypass", batch, objective=objective, kl={"coefficient": 9.0, "estimator": "k3"})
    assert (plain - without)[:4].tolist() == pytest.approx([0, 0.224138, -0.666667, 0.125], abs=1e-6)


def test_c20_k3_is_of_rho():
    assert float(estimate(LOG_RHO, Estimator.K3).mean()) == pytest.approx(0.454477, abs=1e-6)
    assert float(estimate(-LOG_RHO, Estimator.K3).mean()) == pytest.approx(0.379921, abs=1e-6)  # AReaL's filter


def test_c21_nothing_is_on_unless_named():
    config = CorrectionConfig()
    assert config.importance.mode is WeightMode.OFF and config.rejection == () and config.veto is None


def test_c22_sequences_count_once_in_the_effective_sample_size():
    numbers = diagnose(worked_example(), run("tis-sequence")[0])
    assert numbers["ess_sequence"] == pytest.approx(0.482686, abs=1e-6)


def test_c23_c27_upper_bound_alone_or_both():
    assert run("mis-sequence-upper")[0].importance_weights[[0, 4, 7]].tolist() == pytest.approx([0.275, 0, 1.0098])
    assert not run("mis-sequence")[0].keep_mask[:4].any()  # the two-sided form drops A, product 0.275


def test_c24_prime_penalises_masked_tokens_too():
    grad = run("prime-tv")[2]
    log_q = math.log(THETA[1][0] / MU[1][0])
    assert float(grad[4]) == pytest.approx(2e-3 * log_q / 9)  # B1 is masked: only the penalty 1e-3 (log q)^2 is left


def test_c25_gspo_gradient():
    """s_i / n_i * -A_i / 3 on each token of a sequence that is not clipped."""
    grad = run("gspo", objective={"clip_low": 0.5, "clip_high": 0.5})[2]
    lengths, advantages = (4, 3, 2), (1.0, -1.0, 0.5)
    products = [math.prod(t / p for t, p in zip(*rows, strict=True)) for rows in zip(THETA, PROX, strict=True)]
    s = [product ** (1 / n) for product, n in zip(products, lengths, strict=True)]
    expected = [-a * x / n / 3 for a, x, n in zip(advantages, s, lengths, strict=True) for _ in range(n)]
    assert grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("level", "weights"), [("sequence", (0.6, 0.6)), ("geometric", (0.774597, 0.774597)), ("token", (0.8, 0.75))])
def test_c26_topr_takes_the_product(level, weights):
    mu, theta = torch.tensor([0.5, 0.4]).double().log(), torch.tensor([0.4, 0.3]).double().log()
    keep = torch.ones(2, dtype=torch.bool)
    batch = worked_example(
        token_ids=torch.arange(2), offsets=torch.tensor([0, 2]), loss_mask=keep, behavior_logprobs=mu, proximal_logprobs=None,
        advantages=torch.tensor([-1.0, -1.0]).double(), weight_versions=torch.zeros(2, dtype=torch.int32), group_ids=torch.zeros(1).long(),
    )  # fmt: skip
    config = CorrectionConfig(preset="topr", objective={"level": level})
    leaf = theta.clone().requires_grad_()
    policy_loss(correct(batch, config), leaf, config).loss.backward()
    assert leaf.grad.tolist() == pytest.approx(weights, abs=1e-6)
    assert CorrectionConfig(preset="topr").objective.level.value == "sequence"


@pytest.mark.parametrize(
    ("preset", "importance"),
    [
        ("bypass", {"mode": "truncate", "upper": 2}),
        ("pg-is", {"mode": "raw"}),
        ("minirl", {"mode": "raw"}),
        ("dppo-binary-tv", {"mode": "truncate", "upper": 2}),
        ("ppo", {"mode": "raw", "ratio": "q"}),
        ("ppo", {"mode": "raw", "ratio": "r"}),
    ],
)
def test_c28_no_ratio_is_applied_twice(preset, importance):
    with pytest.raises(ValueError, match="would apply it twice"):
        CorrectionConfig(preset=preset, importance=importance)
    assert issubclass(ConfigError, ValueError)
