"""A third set of published corrections, written plainly from their papers and their authors' code, for tests to compare with.

Nothing here imports the package: floats and lists, token by token, so that an error of ours and an error here would have to be made twice.

Inputs are alike. A batch is a list of sequences; a sequence is a list over its tokens of natural logs of the sampled token's probability:
`mu` (the sampler), `prox` (the anchor, recomputed before the update), `theta` (being trained). `mask` is 1 on trained tokens, else 0.
`advantages` are per token; `rewards` and `groups` (a label) per sequence, where the method makes its own baseline. Every function returns
a `Reference`: the scalar loss, d loss / d theta of each token (0 where not trained) and the per-token factors that the method defines. The
loss is the mean over trained tokens of the whole batch unless the docstring names another denominator.

How well a source was seen stands in each docstring: "read" is the text or code itself, "second hand" is somebody's restatement.

Left out, because neither the text of the paper nor its authors' code could be read:

* MinPRO (2601.22718). The abstract: the product of the prefix's ratios is replaced by "the minimum token-level ratio observed in the
  preceding prefix". Whether the token's own ratio is a factor beside it, whether the minimum is detached, what is clipped, what the first
  token has: not said there.
* Entropy-scaled trust region, ESTR (2607.22186). Two reading notes agree (second hand): keep a token where delta^2 / (H + eps) <= tau, with
  delta = theta - mu, H the sampler's entropy and eps = 0.01; kept tokens have PPO's clip on theta / mu; divided by all tokens. tau unknown.
* R2VPO (2605.26784, earlier 2601.03320). Third parties write A r - lambda (r - 1)^2 with a fixed lambda 0.04; the paper's lambda comes from
  a primal-dual update whose target and step weren't seen, and the third parties differ in what they detach.
* Length-triggered decay (2602.01826). The algorithm is a figure. A reproduction's script (second hand): the trigger is a mean length 3
  times that of the first 50 steps, then the rate is halved every 198 steps for a trigger at step 110, down to a tenth; where the 198 comes
  from (1.8 times 110?) was not seen.
* BandPO for divergences beside the three of its code; CTPO's geometric variant (same code with a mean for the sum and power -0.5); the
  medians and winsorised means that VCPO's code offers for its baseline; SAO's critic and its GAE over actions only.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

Tokens = Sequence[Sequence[float]]
Mask = Sequence[Sequence[int]]


class Reference(NamedTuple):
    """`loss`; `coefficients`: d loss / d theta per token; `factors`: what the method multiplies a token with, or keeps, by token."""

    loss: float
    coefficients: list[list[float]]
    factors: list[list[float]]


class Advantages(NamedTuple):
    """`baselines` and `advantages` by token, `weights` by token: what a baseline is the weighted mean under."""

    baselines: list[list[float]]
    advantages: list[list[float]]
    weights: list[list[float]]


def _places(mask: Mask) -> list[tuple[int, int]]:
    """Trained tokens in reading order: (sequence, position)."""
    return [(i, t) for i, row in enumerate(mask) for t, trained in enumerate(row) if trained]


def _zeros(mask: Mask) -> list[list[float]]:
    return [[0.0 for _ in row] for row in mask]


def _members(groups: Sequence[Any]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for i, group in enumerate(groups):
        found.setdefault(group, []).append(i)
    return found


def _sum(values: Sequence[float], row: Sequence[int]) -> float:
    return sum(value for value, trained in zip(values, row, strict=True) if trained)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


# --- Squared log ratios -----------------------------------------------------------------------------------------------------------------


def dro(*, theta: Tokens, anchor: Tokens, advantages: Tokens, mask: Mask, beta: float) -> Reference:
    """DRO by token: the policy gradient with half of beta times the squared log ratio as a penalty.

        l_t = -( A_t theta_t - beta / 2 (theta_t - anchor_t)^2 )        d l_t / d theta_t = -A_t + beta (theta_t - anchor_t)

    No ratio multiplies the advantage, nothing is clipped and nothing needs detaching: the anchor is data. The penalty is the k2 estimate of
    the KL times beta.

    Source: tinker's documentation `losses/dro` (read: formula and code; anchor = the sampler's logprobs) and verl 0.9.1
    `trainer/ppo/core_algos.py`, `compute_policy_loss_dro` (read: anchor = `old_log_prob`, which is `prox`, or `mu` in bypass mode; beta has
    no default and must be positive; the ratio is not clamped; verl's weights, if any, multiply the whole of l_t, penalty included). Both
    cite Richemond et al. 2405.19107 and Kimi k1.5 2501.12599; `kimi_mirror_descent` is the latter's own formula, by sequence.
    Helped or failed: neither page says; tinker calls it "a general off-policy (and even offline)" method; its example has beta 0.05.
    Unclear: the denominator. tinker sums over tokens, verl takes the configured mean (by token unless set), which is the one here, so a
    beta and a learning rate don't carry over. tinker says the advantage needs a "soft" estimate made by the caller, and doesn't give it.
    """
    places = _places(mask)
    loss, coefficients, factors = 0.0, _zeros(mask), _zeros(mask)
    for i, t in places:
        log_ratio = theta[i][t] - anchor[i][t]
        loss += -(advantages[i][t] * theta[i][t] - 0.5 * beta * log_ratio**2)
        coefficients[i][t] = (-advantages[i][t] + beta * log_ratio) / len(places)
        factors[i][t] = log_ratio
    return Reference(loss / len(places), coefficients, factors)


def kimi_mirror_descent(
    *, theta: Tokens, anchor: Tokens, rewards: Sequence[float], groups: Sequence[Any], mask: Mask, tau: float
) -> Reference:
    """Kimi k1.5's policy optimisation: mirror descent, by sequence, around the policy at the iteration's start.

        gradient ascended = 1/k sum_j ( grad log pi(y_j) (r_j - mean r) - tau / 2 grad (log pi(y_j) - log pi_i(y_j))^2 )

    with log pi(y) = sum_t theta_t and log pi_i(y) = sum_t anchor_t,
    so a loss with that gradient is 1/k sum_j [ -(r_j - mean r) log pi(y_j) + tau / 2 (log pi(y_j) - log pi_i(y_j))^2 ], the mean over the
    group's k answers, then over groups. mean r is over the group, the answer itself included, with no division by a deviation.
    Denominator: answers and groups, never tokens: a sequence's log ratio is a sum, so tau's effect grows with length.
    Per-token factors: the sequence's log ratio on each of its trained tokens.

    Source: arXiv 2501.12599, section 2.3.2, equation 3 (read). Helped: the report's long-CoT runs; it gives no comparison without the
    squared term there. The squared regression from which it comes has tau log Z where mean r stands, "mean ... yields effective practical
    results"; the optimizer is reset whenever the anchor moves.
    Unclear: tau is not printed in that section; whether the anchor's logprobs are the sampler's own or recomputed is not said.
    """
    by_group = _members(groups)
    loss, coefficients, factors = 0.0, _zeros(mask), _zeros(mask)
    for members in by_group.values():
        mean = sum(rewards[i] for i in members) / len(members)
        for i in members:
            log_pi = _sum(theta[i], mask[i])
            log_ratio = log_pi - _sum(anchor[i], mask[i])
            share = 1.0 / (len(members) * len(by_group))
            loss += share * (-(rewards[i] - mean) * log_pi + 0.5 * tau * log_ratio**2)
            for t, trained in enumerate(mask[i]):
                if trained:
                    coefficients[i][t] = share * (-(rewards[i] - mean) + tau * log_ratio)
                    factors[i][t] = log_ratio
    return Reference(loss, coefficients, factors)


def oapl(
    *, theta: Tokens, mu: Tokens, rewards: Sequence[float], groups: Sequence[Any], mask: Mask, beta1: float = 1.0, beta2: float = 1e-3
) -> Reference:
    """OAPL: regress the sequence's log ratio to the lagged sampler onto an optimal advantage; no importance weight, no clip.

        V = beta1 log( 1/G sum_j exp(r_j / beta1) )     over the group
        residual_i = beta2 ( sum_t theta_t - sum_t mu_t ) - (r_i - V)       loss = 1/B sum_i residual_i^2

    Denominator: sequences of the batch. V is data (nothing flows through it); d loss / d theta_t = 2 beta2 residual_i / B on each trained
    token. beta1 -> infinity makes V the group's mean, beta1 -> 0 its maximum. Per-token factors: the sequence's residual.

    Source: arXiv 2602.19362; its authors' code danieldritter/OAPL, `verl/trainer/oapl/core_algos.py` (loss) and
    `verl/trainer/oapl/ray_trainer.py` (V), read; constants beta1 = 1, beta2 = 1e-3 from `scripts/oapl_deepcoder_offline.sh`, read.
    Helped (abstract, read): beats GRPO with importance sampling on competition mathematics, a third of DeepCoder's samples for the same
    score, lags above 400 steps.
    Unclear: the paper's anchor is the inference engine's policy; the published code is the offline experiment, recomputes the anchor with
    a reference model, and takes the group's rewards from the data set (with the mean for V as its other setting).
    """
    values: dict[Any, float] = {}
    for group, members in _members(groups).items():
        values[group] = beta1 * math.log(sum(math.exp(rewards[i] / beta1) for i in members) / len(members))
    loss, coefficients, factors = 0.0, _zeros(mask), _zeros(mask)
    for i, row in enumerate(mask):
        residual = beta2 * (_sum(theta[i], row) - _sum(mu[i], row)) - (rewards[i] - values[groups[i]])
        loss += residual**2 / len(mask)
        for t, trained in enumerate(row):
            if trained:
                coefficients[i][t] = 2.0 * beta2 * residual / len(mask)
                factors[i][t] = residual
    return Reference(loss, coefficients, factors)


# --- Factors and masks of the score -----------------------------------------------------------------------------------------------------


def delightful(
    *, theta: Tokens, advantages: Tokens, mask: Mask, eta: float = 1.0, surprisal_cap: float | None = None, gain: float = 1.0
) -> Reference:
    """Delightful policy gradient: each term gated by the sigmoid of advantage times surprisal.

        surprisal_t = -theta_t, at most surprisal_cap       w_t = gain * sigmoid(A_t surprisal_t / eta)       l_t = -sg[w_t] A_t theta_t

    The gate is detached. It is 1/2 for a token of no surprise or no advantage, so with gain 1 the whole gradient is about half of
    REINFORCE's and a learning rate doesn't carry over; gain 2 makes the neutral gate 1. Per-token factors: w_t, for whoever multiplies
    another loss's terms with it.

    Source: arXiv 2603.14608 (abstract and summary read; equations not), open-instruct pull request 1628 (description read: the detached
    gate on `new_logprobs`, eta "fixed to 1 as in the paper") and miles pull request 2348 (description read in part: gate on the per-token
    term of the policy loss; a surprisal of at most 10 and a gain of 2 as options are second hand).
    Helped (abstract): over REINFORCE, PPO and advantage weighting on MNIST as a bandit, token reversal by a transformer and continuous
    control, more so on harder tasks. No result on a language model of size was found.
    Unclear: the surprisal is the current policy's in all three, on-policy in the paper; off-policy, no source here says whether the gate
    should see mu. The paper has no ratio; in miles the gate multiplies a clipped surrogate.
    """
    places = _places(mask)
    loss, coefficients, factors = 0.0, _zeros(mask), _zeros(mask)
    for i, t in places:
        surprisal = -theta[i][t]
        if surprisal_cap is not None:
            surprisal = min(surprisal, surprisal_cap)
        gate = gain * _sigmoid(advantages[i][t] * surprisal / eta)
        loss += -gate * advantages[i][t] * theta[i][t]
        coefficients[i][t] = -gate * advantages[i][t] / len(places)
        factors[i][t] = gate
    return Reference(loss / len(places), coefficients, factors)


def current_policy_weight(*, theta: Tokens, mu: Tokens, advantages: Tokens, mask: Mask, low: float, high: float) -> Reference:
    """The current policy's ratio to the sampler, clipped on both sides and detached, as the weight of a REINFORCE loss.

        w_t = clip( exp(theta_t - mu_t), low, high )        l_t = -sg[w_t] A_t theta_t

    Every token keeps a gradient: one beyond a bound has the bound's weight. No token leaves the loss or its denominator.
    `low` and `high` are the bounds themselves. Per-token factors: w_t.

    Source: miles pull request 1344 (description read: bounds 1 - eps_clip and 1 + eps_clip_high; "canonical single-sided CISPO:
    --eps-clip 1.0") and THUDM/slime pull request 2084 (description read: bounds `--tis-clip-low` and `--tis-clip`, whose defaults in miles'
    table are 0 and 2). Both: the weight has theta of the running update where TIS has the recomputed `prox`, and multiplies the policy
    loss of whatever base is chosen; with a REINFORCE base it is CISPO on theta / mu.
    Helped or failed: neither request shows a run. tinker-cookbook pull request 763 warns that a positive lower bound lifts the weight of
    tokens the policy has moved away from and "can make the sampler/trainer KL run away", and advises low 0, high about 4.
    Unclear: both are open requests, so this is a proposal and no released behaviour.
    """
    places = _places(mask)
    loss, coefficients, factors = 0.0, _zeros(mask), _zeros(mask)
    for i, t in places:
        weight = min(max(math.exp(theta[i][t] - mu[i][t]), low), high)
        loss += -weight * advantages[i][t] * theta[i][t]
        coefficients[i][t] = -weight * advantages[i][t] / len(places)
        factors[i][t] = weight
    return Reference(loss / len(places), coefficients, factors)


def sao_mask(
    *, theta: Tokens, mu: Tokens, advantages: Tokens, mask: Mask, eps_low: float, eps_high: float, detached: bool = True
) -> Reference:
    """SAO's direct double-sided importance sampling: the ratio to the sampler inside a band, zero outside, whatever the advantage's sign.

        q_t = exp(theta_t - mu_t)       f(q) = q where 1 - eps_low < q < 1 + eps_high, else 0       l_t = -f(q_t) A_t theta_t

    Strict inequalities: a ratio on a bound is out. Out means no gradient at all, not the bound's weight. Per-token factors: f.
    `detached` (the reading of every implementation seen) has d l / d theta = -f A; the formula as printed, with f in the graph, has
    -f A (1 + theta), which is no policy gradient.

    Source: arXiv 2607.07508 equations 1 to 3 (second hand, four restatements and implementations that agree) and the report that it comes
    from, GLM-5 2602.15763 section 4.1.2 equations 3 to 5 (read: the same formula and the strict inequalities; its prose has a closed
    interval). verl issue 7100 names it among the parts that SAO asks for.
    Helped (verl issue 7100, and notes on the paper): about 1000 stable steps where GRPO collapses near step 160. The mask is one part:
    SAO also has one answer a prompt, a critic of two steps to the policy's one, and GAE over actions only.
    Unclear: the bounds. GLM-5 prints none; ports use (0.7, 6) and [0.2, 4]. Whether rejected tokens count in the mean: the expectation in
    the formula is over all tokens, so they do here.
    """
    places = _places(mask)
    loss, coefficients, factors = 0.0, _zeros(mask), _zeros(mask)
    for i, t in places:
        ratio = math.exp(theta[i][t] - mu[i][t])
        factor = ratio if 1.0 - eps_low < ratio < 1.0 + eps_high else 0.0
        loss += -factor * advantages[i][t] * theta[i][t]
        slope = 1.0 if detached else 1.0 + theta[i][t]
        coefficients[i][t] = -factor * advantages[i][t] * slope / len(places)
        factors[i][t] = factor
    return Reference(loss / len(places), coefficients, factors)


class Rejection(NamedTuple):
    """`kept` and `statistics` per sequence; `mask` by token: the trained tokens of the kept sequences."""

    kept: list[bool]
    statistics: list[float]
    mask: list[list[int]]


def k3_rejection(*, numerator: Tokens, mu: Tokens, mask: Mask, threshold: float = 0.01) -> Rejection:
    """A sequence is rejected when the mean over its trained tokens of k3, an estimate of KL(mu || numerator), is above a threshold.

        d_t = clamp(numerator_t - mu_t, -20, 20)        k3_t = exp(d_t) - 1 - d_t >= 0        keep where mean_t k3_t <= threshold

    A criterion, not a loss: the statistic is data. `numerator` is `prox` in verl's decoupled mode; in bypass mode verl computes it within
    the loss from the current policy's detached logprobs. One-sided, since k3 has one: a ratio of 0.2 counts 0.81, one of 5 counts 2.39.
    A sequence without a trained token has statistic 0 and is kept (verl divides by the count + 1e-8).

    Source: verl 0.9.1 `trainer/ppo/rollout_corr_helper.py`, `compute_rollout_rejection_mask`, option `seq_mean_k3`, and
    `trainer/config/algorithm.py`, `decoupled_k3_rs` and `bypass_ppo_clip_k3_rs`, threshold 0.01, "typical range 0.001-0.1" (read).
    Helped or failed: "more stable than geometric mean for small KL values", without a figure.
    Unclear: the denominator of the loss afterwards. The function edits the mask: in decoupled mode the loss then divides by kept tokens, in
    bypass mode by all of them.
    """
    kept, statistics, left = [], [], []
    for i, row in enumerate(mask):
        terms = []
        for t, trained in enumerate(row):
            if trained:
                d = min(max(numerator[i][t] - mu[i][t], -20.0), 20.0)
                terms.append(math.exp(d) - 1.0 - d)
        statistic = sum(terms) / len(terms) if terms else 0.0
        statistics.append(statistic)
        kept.append(statistic <= threshold)
        left.append([int(bool(trained)) if kept[-1] else 0 for trained in row])
    return Rejection(kept, statistics, left)


# --- Covariance of advantage and logprob ------------------------------------------------------------------------------------------------


def covariances(*, theta: Tokens, advantages: Tokens, mask: Mask) -> list[list[float]]:
    """(A_t - mean A) (theta_t - mean theta) of each trained token, both means over all trained tokens; 0 elsewhere. Data, no gradient.

    The batch's covariance is the mean of these. verl takes the means over the micro-batch that the loss sees, not over the global batch,
    so there the choice of tokens depends on packing; here the batch is what is passed.
    """
    places = _places(mask)
    mean_advantage = sum(advantages[i][t] for i, t in places) / len(places)
    mean_theta = sum(theta[i][t] for i, t in places) / len(places)
    found = _zeros(mask)
    for i, t in places:
        found[i][t] = (advantages[i][t] - mean_advantage) * (theta[i][t] - mean_theta)
    return found


def clip_cov_eligible(
    *,
    theta: Tokens,
    prox: Tokens,
    advantages: Tokens,
    mask: Mask,
    eps_low: float,
    eps_high: float,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> list[tuple[int, int]]:
    """The tokens, in reading order, from which Clip-Cov draws: cov_low < covariance < cov_high, strictly, and not cut by PPO's clip."""
    cov = covariances(theta=theta, advantages=advantages, mask=mask)
    found = []
    for i, t in _places(mask):
        ratio, advantage = math.exp(theta[i][t] - prox[i][t]), advantages[i][t]
        bounded = min(max(ratio, 1.0 - eps_low), 1.0 + eps_high)
        if cov_low < cov[i][t] < cov_high and not -advantage * bounded > -advantage * ratio:
            found.append((i, t))
    return found


def clip_cov(
    *,
    theta: Tokens,
    prox: Tokens,
    advantages: Tokens,
    mask: Mask,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    order: Sequence[int] | None = None,
) -> Reference:
    """Clip-Cov: a few tokens, drawn at random among those of high covariance, lose their gradient; the others have PPO's clip.

        k = max(1, floor(fraction N)) tokens are drawn of `clip_cov_eligible`; for those l_t = 0, else
        l_t = max( -A r_t, -A clip(r_t, 1 - eps_low, 1 + eps_high) ),    r_t = exp(theta_t - prox_t)

    `order` is the random permutation of the eligible tokens (its first k are taken); None takes them in reading order. N: all trained
    tokens; the drawn ones stay in the denominator. Per-token factors: 0 on the drawn, 1 on the other trained tokens. Nothing flows
    through the covariance. r is not clamped.

    Source: arXiv 2505.22617 and PRIME-RL/Entropy-Mechanism-of-RL, from which verl 0.9.1 `trainer/ppo/core_algos.py`,
    `compute_policy_loss_clip_cov`, says it is adapted; verl's was read, with its defaults (2e-4, 1, 5).
    Helped (abstract second hand): keeps entropy up; a 32B model of Qwen2.5 gains 6.4 points on average over its baseline.
    Unclear: at least one token is drawn however small the micro-batch, so with fraction 2e-4 any micro-batch under 5000 tokens loses more
    than the fraction; whether the paper has the exclusion of tokens already clipped was not seen. verl reports a clip fraction that counts
    the drawn tokens only.
    """
    places = _places(mask)
    eligible = clip_cov_eligible(
        theta=theta, prox=prox, advantages=advantages, mask=mask, eps_low=eps_low, eps_high=eps_high, cov_low=cov_low, cov_high=cov_high
    )
    chosen = [eligible[n] for n in (range(len(eligible)) if order is None else order)]
    drawn = set(chosen[: max(int(fraction * len(places)), 1)])
    loss, coefficients, factors = 0.0, _zeros(mask), _zeros(mask)
    for i, t in places:
        if (i, t) in drawn:
            continue
        factors[i][t] = 1.0
        ratio, advantage = math.exp(theta[i][t] - prox[i][t]), advantages[i][t]
        free = -advantage * ratio
        cut = -advantage * min(max(ratio, 1.0 - eps_low), 1.0 + eps_high)
        loss += max(free, cut)
        if free >= cut:
            coefficients[i][t] = free / len(places)
    return Reference(loss / len(places), coefficients, factors)


def kl_cov(
    *, theta: Tokens, prox: Tokens, advantages: Tokens, mask: Mask, fraction: float = 2e-4, kl_coefficient: float = 1.0
) -> Reference:
    """KL-Cov: the tokens of the largest covariance have a penalty on their absolute log ratio; no token is clipped.

        k = max(1, floor(fraction N)); of the k largest covariances l_t = -A r_t + kl_coefficient |theta_t - prox_t|, else l_t = -A r_t

    Ties go to the token read first. d |x| / dx is taken as 0 at x = 0, as torch does. Per-token factors: 1 on the penalised tokens.

    Source: arXiv 2505.22617; verl 0.9.1 `trainer/ppo/core_algos.py`, `compute_policy_loss_kl_cov` (read). verl's coefficient is 1.0 if the
    setting is absent and 0.1 in its configuration file; the fraction is 2e-4 in both.
    Helped (second hand): a smoother entropy curve than Clip-Cov's, entropy more than ten times the baseline's where that levels off.
    Unclear: the paper writes a KL, the code has |log ratio|, which is neither k1, k2 nor k3. There's no clip at all in this loss, also
    for tokens far from prox. The covariance's theta is detached, its means are the micro-batch's, as above.
    """
    places = _places(mask)
    cov = covariances(theta=theta, advantages=advantages, mask=mask)
    largest = sorted(places, key=lambda place: -cov[place[0]][place[1]])  # a stable sort keeps reading order among equals
    penalised = set(largest[: max(1, int(len(places) * fraction))])
    loss, coefficients, factors = 0.0, _zeros(mask), _zeros(mask)
    for i, t in places:
        log_ratio = theta[i][t] - prox[i][t]
        term = slope = -advantages[i][t] * math.exp(log_ratio)
        if (i, t) in penalised:
            factors[i][t] = 1.0
            term += kl_coefficient * abs(log_ratio)
            slope += kl_coefficient * ((log_ratio > 0) - (log_ratio < 0))
        loss += term
        coefficients[i][t] = slope / len(places)
    return Reference(loss / len(places), coefficients, factors)


# --- Baselines of least variance, and the learning rate ---------------------------------------------------------------------------------


def sum_of_squares(distribution: Sequence[float]) -> float:
    """sum_v pi_v^2 of a full distribution (probabilities), which `otb` takes by token."""
    return sum(p * p for p in distribution)


def otb(
    *,
    prox: Tokens,
    squares: Tokens,
    token_rewards: Tokens,
    groups: Sequence[Any],
    mask: Mask,
    weights: Tokens | None = None,
    weight_inside: bool = True,
    zero_tail: bool = True,
) -> Advantages:
    """The optimal token baseline: at each position the group's mean return, weighted by the energy its sequences have spent up to there.

        e_j = 1 - 2 pi_j + sum_v pi_v^2, which is || onehot - pi ||^2, the squared gradient of the logprob by the logits
        W_t = sum_{j <= t} e_j over trained tokens        G_t = sum_{j >= t} of the token's rewards
        B_t = sum_i G_t W_t / ( sum_i W_t + 1e-8 ), over the group's sequences i that have a trained token at t       A_t = G_t - B_t

    pi_j = exp(prox_j). `squares` is sum_v pi_v^2 by token. A group of one has baseline 0. `zero_tail`: where one sequence alone is the
    longest of its group, its baseline is 0 from the second longest's length on (it would be its own return, and the advantage 0).
    `weights`: importance weights, detached; inside means e_j weight_j^2 in the running sum, which is what the code does; outside means
    W_t weight_t^2, which is what its docstring says. They agree for one weight per sequence. Everything is data, nothing is differentiated.

    Source: arXiv 2602.07078 (abstract read); verl 0.9.1 `trainer/ppo/core_algos.py`, `compute_optimal_token_baseline_advantage`, and verl
    `docs/algo/otb.md` (both read). Helped (abstract): stable training, groups of 4 as good as groups of 32, 65 % fewer tokens.
    Unclear: the baseline includes the sequence itself, so it is not independent of its action. A position is an index from the answer's
    start, tool tokens counted, but the tail's lengths count trained tokens only: with tool tokens the tail starts too early. verl has a
    second estimator for turns, not written here.
    """
    energy, returns, length = _zeros(mask), _zeros(mask), []
    for i, row in enumerate(mask):
        spent = 0.0
        for t, trained in enumerate(row):
            if trained:
                step = 1.0 - 2.0 * math.exp(prox[i][t]) + squares[i][t]
                spent += step * (weights[i][t] ** 2 if weights is not None and weight_inside else 1.0)
            energy[i][t] = spent * (weights[i][t] ** 2 if weights is not None and not weight_inside else 1.0)
        ahead = 0.0
        for t in range(len(row) - 1, -1, -1):
            ahead += token_rewards[i][t] if row[t] else 0.0
            returns[i][t] = ahead
        length.append(sum(1 for trained in row if trained))
    baselines, advantages = _zeros(mask), _zeros(mask)
    for members in _members(groups).values():
        ordered = sorted(length[i] for i in members)
        for i in members:
            for t, trained in enumerate(mask[i]):
                there = [j for j in members if t < len(mask[j]) and mask[j][t]]
                tail = zero_tail and len(members) > 1 and length[i] == ordered[-1] > ordered[-2] and t >= ordered[-2]
                if trained and len(members) > 1 and not tail:
                    baselines[i][t] = sum(returns[j][t] * energy[j][t] for j in there) / (sum(energy[j][t] for j in there) + 1e-8)
                if trained:
                    advantages[i][t] = returns[i][t] - baselines[i][t]
    return Advantages(baselines, advantages, energy)


def sequence_weights(*, numerator: Tokens, mu: Tokens, mask: Mask, cap: float | None = None) -> list[float]:
    """exp( sum_t numerator_t - mu_t ) over each sequence's trained tokens, at most `cap`."""
    found = [math.exp(_sum(numerator[i], row) - _sum(mu[i], row)) for i, row in enumerate(mask)]
    return found if cap is None else [min(weight, cap) for weight in found]


def vcpo_learning_rate_factor(weights: Sequence[float], *, base: float = 1.0) -> float:
    """VCPO's factor of the learning rate: the root of the effective share of the batch, at most 1.

        ESS = (sum_i w_i)^2 / ( sum_i w_i^2 + 1e-8 )        factor = sqrt( min(1, ESS / B / base) )

    w_i are sequence weights prox / mu over one optimizer step's minibatch (all ranks). The factor acts on this step only; the schedule's
    rate is put back afterwards.

    Source: arXiv 2602.17616 (abstract read); mit-han-lab/vcpo README, `recipe/fully_async_policy/staleness_utils.py`,
    `verl/workers/actor/megatron_actor.py`, `verl/workers/config/actor.py` (read). The root is meant for AdamW; "linear" is the code's other
    rule. Helped (README): asynchronous runs at lag 10 and 2 reach the synchronous score in fewer GPU hours (AIME 2025 27.8 % in 168.9 hours
    against 26.7 % in 420.2), stable to 128 steps of lag, where truncated sequence weights collapse. One figure for both parts together.
    Unclear: the README has a proportionality, the code the constant `base` (1.0) and the bound at 1. The weights of the ESS are unbounded
    by default, those of the loss truncated: `use_clipped` is off in the configuration class, and what the runs had was not looked up.
    """
    ess = sum(weights) ** 2 / (sum(weight * weight for weight in weights) + 1e-8)
    return math.sqrt(min(1.0, ess / len(weights) / max(base, 1e-8)))


def vcpo_baseline(*, weights: Sequence[float], norms: Sequence[float], rewards: Sequence[float], groups: Sequence[Any]) -> list[float]:
    """VCPO's baseline of least variance, per sequence (its group's): the mean reward weighted by squared weight and squared gradient norm.

        b = sum_i w_i^2 g_i^2 R_i / ( sum_i w_i^2 g_i^2 + 1e-8 ),      g_i = || grad log pi(y_i) ||, summed over tokens, no advantage in it

    The sequence itself is included. `norms` are g; the source has them from one backward pass a sequence.

    Source: as `vcpo_learning_rate_factor` (`compute_opob_baseline`, read).
    Unclear: in the code g is the norm of the gradient of the loss with advantage 1, "g_i <- w_i * grad(log pi)" in its own comment, so
    where that loss has the importance weight in it, the default (`use_is_weights`) has w^4 where the README has w^2. This is the README's.
    The code's g is of the whole loss that the run uses (a clipped one has its own gradient), times the length if the loss is a mean over
    the sequence. Its other settings (a median, a winsorised mean, division by squared length, the whole minibatch as group with
    advantages in place of rewards) are left out.
    """
    found = [0.0] * len(rewards)
    for members in _members(groups).values():
        importance = {i: (weights[i] * norms[i]) ** 2 for i in members}
        value = sum(importance[i] * rewards[i] for i in members) / (sum(importance.values()) + 1e-8)
        for i in members:
            found[i] = value
    return found


def vcpo(
    *, theta: Tokens, weights: Sequence[float], norms: Sequence[float], rewards: Sequence[float], groups: Sequence[Any], mask: Mask
) -> Reference:
    """REINFORCE with sequence weights around VCPO's baseline.

        loss = -1/B sum_i sg[w_i] (R_i - b_i) sum_t theta_t

    Denominator: sequences. Weights, norms and baseline are data. Per-token factors: w_i (R_i - b_i). What multiplies the learning rate is
    `vcpo_learning_rate_factor`. Division of R - b by the group's deviation (population, "norm_by_std") is off in the source by default.
    """
    baselines = vcpo_baseline(weights=weights, norms=norms, rewards=rewards, groups=groups)
    loss, coefficients, factors = 0.0, _zeros(mask), _zeros(mask)
    for i, row in enumerate(mask):
        factor = weights[i] * (rewards[i] - baselines[i])
        loss += -factor * _sum(theta[i], row) / len(mask)
        for t, trained in enumerate(row):
            if trained:
                coefficients[i][t] = -factor / len(mask)
                factors[i][t] = factor
    return Reference(loss, coefficients, factors)


# --- Clips whose bounds depend on the token ---------------------------------------------------------------------------------------------


def band(probability: float, *, divergence: str, delta: float) -> tuple[float, float]:
    """The ratios that keep one token's probability p within a divergence ball of radius delta, the rest of the mass scaled evenly.

        g(p, r) = p f(r) + (1 - p) f( (1 - r p) / (1 - p) ) <= delta,      0 <= r <= 1 / p

        "tv"    f(u) = |u - 1| / 2        r = 1 -+ delta / p
        "chi2"  f(u) = (u - 1)^2          r = 1 -+ sqrt( delta (1 - p) / p )
        "kl"    f(u) = u - 1 - log u      KL(old || new); the two roots, by bisection

    Each end is cut at 0 and 1 / p. Source: OpenMOSS/BandPO `RLtraining/verl/verl/bandpo/band/band.py` and `solver.py` (read), which name
    theorem 1 and propositions 3 and 4 of arXiv 2603.04918.
    """
    p = probability
    if divergence == "tv":
        return max(0.0, 1.0 - delta / p), min(1.0 / p, 1.0 + delta / p)
    if divergence == "chi2":
        width = math.sqrt(delta * (1.0 - p) / p)
        return max(0.0, 1.0 - width), min(1.0 / p, 1.0 + width)
    if divergence != "kl":
        raise ValueError(f"divergence is {divergence!r}: one of 'tv', 'chi2', 'kl'")

    def excess(r: float) -> float:
        # The two linear parts cancel: p (r - 1) + (1 - p) ((1 - r p) / (1 - p) - 1) = 0.
        if r <= 0.0 or r * p >= 1.0:
            return math.inf
        return -p * math.log(r) - (1.0 - p) * math.log((1.0 - r * p) / (1.0 - p)) - delta

    ends = []
    for outside in (0.0, 1.0 / p):
        inside = 1.0
        for _ in range(200):
            middle = 0.5 * (inside + outside)
            inside, outside = (middle, outside) if excess(middle) <= 0.0 else (inside, middle)
        ends.append(inside)
    return ends[0], ends[1]


def bandpo(
    *,
    theta: Tokens,
    prox: Tokens,
    advantages: Tokens,
    mask: Mask,
    divergence: str = "kl",
    delta: float = 0.05,
    relax: bool = True,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    largest: float = 100.0,
) -> Reference:
    """BandPO: PPO's clip with bounds from `band` at the token's old probability.

        low_t, high_t = band( exp(prox_t) )       l_t = max( -A r_t, -A clip(r_t, low_t, high_t) ),    r_t = exp(theta_t - prox_t)

    `relax` (on by default in the code) widens the band to hold [1 - eps_low, 1 + eps_high]; then high_t <= `largest`. The bounds are data.
    Per-token factors: 0 where the clip takes the gradient, 1 on the other trained tokens.

    Source: arXiv 2603.04918 (abstract read), the code named at `band` (read), whose docstring has this loss. Helped (abstract): over clip
    and clip-higher on several models, against the collapse of entropy, since the fixed clip leaves rare tokens no room to grow.
    Unclear: with `relax` the band only ever widens the clip, so at high p the divergence is not what bounds the token; whether the paper's
    figures had it is not said in the code. The code replaces the solution by limits at p > 1 - 1e-6 (high 1, low exp(-delta) for KL,
    1 - delta for TV, 1 for chi-square) and p < 1e-6 (low 0, high 1 / p); these are not written here, nor its 1e-6 tolerance.
    """
    places = _places(mask)
    loss, coefficients, factors = 0.0, _zeros(mask), _zeros(mask)
    for i, t in places:
        low, high = band(math.exp(prox[i][t]), divergence=divergence, delta=delta)
        if relax:
            low, high = min(low, 1.0 - eps_low), max(high, 1.0 + eps_high)
        high = min(high, largest)
        ratio = math.exp(theta[i][t] - prox[i][t])
        free = -advantages[i][t] * ratio
        cut = -advantages[i][t] * min(max(ratio, low), high)
        loss += max(free, cut)
        if free >= cut:
            coefficients[i][t] = free / len(places)
            factors[i][t] = 1.0
    return Reference(loss / len(places), coefficients, factors)


def ctpo(
    *,
    theta: Tokens,
    prox: Tokens,
    advantages: Tokens,
    mask: Mask,
    log_low: float = 0.025,
    log_high: float = 0.05,
    log_dual: float = 0.05,
    power: float = 0.5,
) -> Reference:
    """CTPO: the product of the ratios up to the token as its ratio, in bounds that widen with the root of the position.

        c_t = sum_{j <= t} clamp(theta_j - prox_j, -20, 20) over trained tokens, at most 10         R_t = exp(c_t)
        n = the token's number among the trained ones, from 1         s = n^power
        l_t = max( -A R_t, -A exp( clip(c_t, -log_low s, log_high s) ) ),  and for A < 0 at most  -A exp(log_dual s)

    The gradient flows through the token's own logprob only (R_t = exp( sg[c_t - theta_t] + theta_t )), not to the earlier ones:
    d l_t / d theta_t = -A R_t, or 0 where a bound holds. Per-token factors: R_t.

    Source: arXiv 2605.07331 (abstract read); horizon-llm/CTPO `verl/trainer/ppo/core_algos.py`, "cum-token-cumprod-la" (read), and
    `ctpo.sh` (constants; read). Helped (abstract): the best average against GRPO and GSPO with tools on mathematics, at two model sizes.
    Unclear: `log_dual` equals `log_high` in the published script, so a token of negative advantage stops at the same bound above; is that
    the paper's clip? The script adds weights or rejection on prox / mu, by its settings, so prox is not mu there. Its denominator is the
    configured one, by token unless set.
    """
    places = _places(mask)
    loss, coefficients, factors = 0.0, _zeros(mask), _zeros(mask)
    for i, row in enumerate(mask):
        total, number = 0.0, 0
        for t, trained in enumerate(row):
            if not trained:
                continue
            number += 1
            total += min(max(theta[i][t] - prox[i][t], -20.0), 20.0)
            log_ratio, scale, advantage = min(total, 10.0), number**power, advantages[i][t]
            ratio = math.exp(log_ratio)
            free = -advantage * ratio
            term = max(free, -advantage * math.exp(min(max(log_ratio, -log_low * scale), log_high * scale)))
            if advantage < 0.0:
                term = min(term, -advantage * math.exp(log_dual * scale))
            loss += term
            if term == free and total <= 10.0:
                coefficients[i][t] = free / len(places)
            factors[i][t] = ratio
    return Reference(loss / len(places), coefficients, factors)


# --- Worked examples ----------------------------------------------------------------------------------------------------------------------
# Inputs, and the figures that the formula gives, worked by hand to six digits. "call" names the function.


def _logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def _shifted(values: Sequence[float], ratios: Sequence[float]) -> list[float]:
    """Logprobs to which `values` have the given ratios."""
    return [value - math.log(ratio) for value, ratio in zip(values, ratios, strict=True)]


_COV_THETA = [-0.1, -3.1, -0.1, -0.7]  # mean -1; with advantages of mean 0 the covariances are 0.9, -2.1, -0.9, -0.3
_COV = {
    "theta": [_COV_THETA],
    "prox": [_shifted(_COV_THETA, (1.1, 1.5, 0.9, 0.5))],
    "advantages": [[1.0, 1.0, -1.0, -1.0]],
    "mask": [[1, 1, 1, 1]],
}
_RATIOS = {  # theta / mu = 0.3, 1.45, 6
    "theta": [_logs(0.03, 0.58, 0.30)],
    "mu": [_logs(0.10, 0.40, 0.05)],
    "advantages": [[1.0, 1.0, -1.0]],
    "mask": [[1, 1, 1]],
}
_PAIR_THETA = [_logs(0.5, 0.25), _logs(0.2)]  # two answers of one prompt, rewards 1 and 0; sequence ratios 0.625 and 2
_PAIR_OLD = [_logs(0.4, 0.5), _logs(0.1)]
_PAIR = {"rewards": [1.0, 0.0], "groups": ["a", "a"], "mask": [[1, 1], [1]]}

EXAMPLES: list[dict[str, Any]] = [
    {
        "call": dro,
        "inputs": {"theta": [_logs(0.5, 0.25)], "anchor": [_logs(0.4, 0.5)], "advantages": [[1.0, -1.0]], "mask": [[1, 1]], "beta": 0.5},
        "loss": -0.280293,  # 0.705595 and -1.266181
        "coefficients": [[-0.444214, 0.326713]],
    },
    {
        "call": kimi_mirror_descent,
        "inputs": {"theta": _PAIR_THETA, "anchor": _PAIR_OLD, "tau": 0.5, **_PAIR},
        "loss": 0.205171,  # (1.094947 - 0.684606) / 2
        "coefficients": [[-0.367501, -0.367501], [0.423287]],
    },
    {
        "call": oapl,  # V = log((e + 1) / 2) = 0.620115
        "inputs": {"theta": _PAIR_THETA, "mu": _PAIR_OLD, "beta1": 1.0, "beta2": 0.5, **_PAIR},
        "loss": 0.656287,  # residuals -0.614887 and 0.966689
        "coefficients": [[-0.307443, -0.307443], [0.483344]],
        "factors": [[-0.614887, -0.614887], [0.966689]],
    },
    {
        "call": delightful,  # at probability 1/4, sigmoid(2 log 4) = 16/17 and sigmoid(-log 4) = 1/5
        "inputs": {"theta": [_logs(0.25, 0.25, 0.5)], "advantages": [[2.0, -1.0, 0.0]], "mask": [[1, 1, 1]]},
        "loss": 0.777412,
        "coefficients": [[-0.627451, 0.066667, 0.0]],
        "factors": [[0.941176, 0.2, 0.5]],
    },
    {
        "call": delightful,  # surprisal at most 1: sigmoid(2), sigmoid(-1); times 2
        "inputs": {
            "theta": [_logs(0.25, 0.25, 0.5)],
            "advantages": [[2.0, -1.0, 0.0]],
            "mask": [[1, 1, 0]],
            "surprisal_cap": 1.0,
            "gain": 2.0,
        },
        "loss": 2.069256,  # (4.884176 - 0.745664) / 2
        "coefficients": [[-1.761594, 0.268941, 0.0]],
        "factors": [[1.761594, 0.537883, 0.0]],
    },
    {
        "call": current_policy_weight,
        "inputs": {**_RATIOS, "low": 0.5, "high": 2.0},
        "loss": 0.045062,
        "coefficients": [[-0.166667, -0.483333, 0.666667]],
        "factors": [[0.5, 1.45, 2.0]],
    },
    {
        "call": sao_mask,
        "inputs": {**_RATIOS, "eps_low": 0.3, "eps_high": 1.0},
        "loss": 0.263285,
        "coefficients": [[0.0, -0.483333, 0.0]],
        "factors": [[0.0, 1.45, 0.0]],
    },
    {
        "call": sao_mask,  # the formula as printed: the ratio stays in the graph
        "inputs": {**_RATIOS, "eps_low": 0.3, "eps_high": 1.0, "detached": False},
        "loss": 0.263285,
        "coefficients": [[0.0, -0.220049, 0.0]],
        "factors": [[0.0, 1.45, 0.0]],
    },
    {
        "call": k3_rejection,  # ratios 1, 1.25, 0.2, 1.1 and 1.02, 0.99
        "inputs": {
            "numerator": [_logs(0.5, 0.5, 0.02, 0.88), _logs(0.612, 0.693)],
            "mu": [_logs(0.5, 0.4, 0.10, 0.80), _logs(0.6, 0.7)],
            "mask": [[1, 1, 1, 1], [1, 1]],
        },
        "kept": [False, True],
        "statistics": [0.210246, 0.000124],
    },
    {
        "call": clip_cov,  # only the first token is between 0.5 and 5; the second and the fourth are PPO's to clip
        "inputs": {**_COV, "cov_low": 0.5},
        "loss": 0.125,  # (0 - 1.2 + 0.9 + 0.8) / 4
        "coefficients": [[0.0, 0.0, 0.225, 0.0]],
        "factors": [[0.0, 1.0, 1.0, 1.0]],
    },
    {
        "call": kl_cov,
        "inputs": {**_COV, "fraction": 0.25, "kl_coefficient": 0.5},
        "loss": -0.288086,  # (-1.1 + 0.5 log 1.1 - 1.5 + 0.9 + 0.5) / 4
        "coefficients": [[-0.15, -0.375, 0.225, 0.125]],
        "factors": [[1.0, 0.0, 0.0, 0.0]],
    },
    {
        "call": otb,  # two symbols, so that a token of probability p spends 2 (1 - p)^2; rewards 1 and -1 at the end
        "inputs": {
            "prox": [_logs(0.5, 0.5), _logs(0.5, 0.2, 0.5)],
            "squares": [[0.5, 0.5], [0.5, 0.68, 0.5]],
            "token_rewards": [[0.0, 1.0], [0.0, 0.0, -1.0]],
            "groups": ["a", "a"],
            "mask": [[1, 1], [1, 1, 1]],
        },
        "baselines": [[0.0, -0.280576], [0.0, -0.280576, 0.0]],  # at the second token (1.0 - 1.78) / 2.78
        "advantages": [[1.0, 1.280576], [-1.0, -0.719424, -1.0]],
        "weights": [[0.5, 1.0], [0.5, 1.78, 2.28]],
    },
    {
        "call": vcpo_learning_rate_factor,  # 4.5^2 / 6.25 = 3.24 of 4 sequences: a share of 0.81
        "inputs": {"weights": [1.0, 1.0, 0.5, 2.0]},
        "value": 0.9,
    },
    {
        "call": vcpo_baseline,  # squared weights times squared norms: 4, 4 and 1, 4
        "inputs": {"weights": [1.0, 2.0, 1.0, 2.0], "norms": [2.0, 1.0, 1.0, 1.0], "rewards": [1.0, 0.0, 1.0, 0.0], "groups": [0, 0, 1, 1]},
        "value": [0.5, 0.5, 0.2, 0.2],
    },
    {
        "call": vcpo,  # b = 0.2: factors 1 * 0.8 and 2 * -0.2; log pi -2.079442 and -1.609438
        "inputs": {"theta": _PAIR_THETA, "weights": [1.0, 2.0], "norms": [1.0, 1.0], **_PAIR},
        "loss": 0.509889,  # (1.663553 - 0.643775) / 2
        "coefficients": [[-0.4, -0.4], [0.2]],
        "factors": [[0.8, 0.8], [-0.4]],
    },
    {"call": band, "inputs": {"probability": 0.1, "divergence": "tv", "delta": 0.05}, "value": (0.5, 1.5)},
    {"call": band, "inputs": {"probability": 0.02, "divergence": "tv", "delta": 0.05}, "value": (0.0, 3.5)},
    {"call": band, "inputs": {"probability": 0.2, "divergence": "chi2", "delta": 0.05}, "value": (0.552786, 1.447214)},
    {"call": band, "inputs": {"probability": 0.5, "divergence": "kl", "delta": 0.5 * math.log(4 / 3)}, "value": (0.5, 1.5)},
    {
        "call": bandpo,  # TV at 0.05: bands [0, 3.5] at 0.02 and [0.9, 1.1] at 0.5, the latter widened to [0.8, 1.28]
        "inputs": {
            "theta": [_logs(0.05, 0.08, 0.6, 0.7)],  # ratios 2.5, 4, 1.2, 1.4
            "prox": [_logs(0.02, 0.02, 0.5, 0.5)],
            "advantages": [[1.0, 1.0, 1.0, 1.0]],
            "mask": [[1, 1, 1, 1]],
            "divergence": "tv",
        },
        "loss": -2.12,  # (-2.5 - 3.5 - 1.2 - 1.28) / 4
        "coefficients": [[-0.625, 0.0, -0.3, 0.0]],
        "factors": [[1.0, 0.0, 1.0, 0.0]],
    },
    {
        "call": ctpo,  # sums 0.01, 0.03, 0.13 in bounds 0.05, 0.0707, 0.0866; a token that isn't trained neither counts nor adds
        "inputs": {
            "theta": [[-0.99, -5.0, -0.98, -0.9], [-0.9], [-1.1], [-1.01]],
            "prox": [[-1.0, -1.0, -1.0, -1.0], [-1.0], [-1.0], [-1.0]],
            "advantages": [[1.0, 1.0, 1.0, 1.0], [-1.0], [-1.0], [-1.0]],
            "mask": [[1, 0, 1, 1], [1], [1], [1]],
        },
        "loss": -0.019056,  # (-1.010050 - 1.030455 - 1.090463 + 1.051271 + 0.975310 + 0.990050) / 6
        "coefficients": [[-0.168342, 0.0, -0.171742, 0.0], [0.0], [0.0], [0.165008]],
        "factors": [[1.010050, 0.0, 1.030455, 1.138828], [1.105171], [0.904837], [0.990050]],
    },
]
