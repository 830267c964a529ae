"""Every preset as rules for a token, written from the papers' formulas and not from correction/presets."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.correction.reference import Method, Sequence, TokenRule, one

# --- Objectives.


def clipped(x: Tensor, a: float, low: float, high: float) -> Tensor:
    """PPO's -min(x A, clip(x) A), the branch chosen by its value."""
    inside = x if 1 - low <= x.item() <= 1 + high else torch.tensor(min(max(x.item(), 1 - low), 1 + high), dtype=torch.float64)
    return -x * a if x.item() * a <= inside.item() * a else -inside * a


def ppo(
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    rare: float = 0.0,
    ends: str = "both",
    on: Callable[[Sequence, int], Tensor] = Sequence.r_with_gradient,
) -> TokenRule:
    def loss(s: Sequence, t: int) -> Tensor:
        is_rare = s.p_mu(t) < rare
        lower = math.inf if is_rare and ends in ("low", "both") else low
        upper = math.inf if is_rare and ends in ("high", "both") else high
        value = clipped(on(s, t), s.advantage, lower, upper)
        if dual is not None and s.advantage < 0 and value.item() > -s.advantage * dual:
            return torch.tensor(-s.advantage * dual, dtype=torch.float64)
        return value

    return loss


def kl_end(p: float, end: float) -> float:
    """The ratio between 1 and `end` at which KL(p || x p), with the rest scaled evenly, is 0.05; the nearest to `end` if none is."""
    inside, outside = 1.0, end
    for _ in range(200):
        x = (inside + outside) / 2
        far = not 0 < x * p < 1 or kl_of_two(p, x * p) > 0.05
        inside, outside = (inside, x) if far else (x, outside)
    return inside


def bandpo(s: Sequence, t: int) -> Tensor:
    p = s.p_prox(t)
    low, high = min(kl_end(p, 0.0), 0.8), min(max(kl_end(p, 1 / p), 1.28), 100.0)
    return clipped(s.r_with_gradient(t), s.advantage, 1 - low, high - 1)


def gspo(s: Sequence, t: int) -> Tensor:
    """The sequence's loss, at each of its tokens."""
    mean = sum((s.log_theta[k] - s.prox[k] for k in s.trained), torch.zeros((), dtype=torch.float64)) / len(s.trained)
    return clipped(mean.exp(), s.advantage, 3e-4, 4e-4)


def gmpo(s: Sequence, t: int) -> Tensor:
    if s.advantage == 0:
        return torch.zeros((), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for k in s.trained:
        d = s.log_theta[k] - s.prox[k]
        is_over = d.item() > 0.4 if s.advantage > 0 else d.item() < -0.4
        total = total + (math.copysign(0.4, s.advantage) if is_over else d)
    return -s.advantage * (total / len(s.trained)).exp()


def ctpo(s: Sequence, t: int) -> Tensor:
    """The product of the ratios up to the token, of which its own factor alone has a gradient."""
    earlier = [k for k in s.trained if k < t]
    product = (s.log_theta[t] - s.prox[t] + sum(float(s.log_theta[k].item() - s.prox[k]) for k in earlier)).exp()
    root = math.sqrt(1 + len(earlier))
    value = clipped(product, s.advantage, 1 - math.exp(-0.025 * root), math.exp(0.05 * root) - 1)
    largest = -s.advantage * math.exp(0.05 * root)
    return torch.tensor(largest, dtype=torch.float64) if s.advantage < 0 and value.item() > largest else value


def sapo(s: Sequence, t: int) -> Tensor:
    tau = 1.0 if s.advantage > 0 else 1.05
    return -s.advantage * 4 / tau / (1 + (-tau * (s.r_with_gradient(t) - 1)).exp())


def policy_gradient(coefficient: TokenRule = one, blocks: TokenRule = lambda s, t: False) -> TokenRule:
    """-sg[M c] A log theta: the one formula of the Trust Region paper, Eq. 23."""

    def loss(s: Sequence, t: int) -> Tensor:
        return -(0.0 if blocks(s, t) else float(coefficient(s, t))) * s.advantage * s.log_theta[t]

    return loss


def at_most(c: float) -> TokenRule:
    return lambda s, t: min(s.q(t), c)


def raw_q(s: Sequence, t: int) -> float:
    return s.q(t)


def vespo(s: Sequence, t: int) -> float:
    w = max(s.product(s.q), 1e-8)
    k, decay = (2.0, 3.0) if s.advantage >= 0 else (3.0, 2.0)
    return math.exp(decay) * w**k * math.exp(-decay * w)


def delight(temperature: float = 1.0, limit: float = 10.0, gain: float = 1.0, ratio: TokenRule = one) -> TokenRule:
    """Advantage times surprisal, through a sigmoid."""
    return lambda s, t: ratio(s, t) * gain / (1 + math.exp(-s.advantage * min(-s.log_theta[t].item(), limit) / temperature))


def topr(s: Sequence, t: int) -> float:
    return 1.0 if s.advantage >= 0 else min(s.product(s.q), 1.0)


# --- Masks of the trust region.


def ppo_mask(low: float, high: float, *, on: str = "q", rare: float = 0.0, at_bound: bool = False) -> TokenRule:
    """M = 0 where PPO's clip has no gradient; `rare` lets tokens with mu below it through."""

    def blocks(s: Sequence, t: int) -> bool:
        x = s.q(t) if on == "q" else s.p_theta(t) / s.p_prox(t)
        if s.p_mu(t) < rare:
            return False
        over = x > 1 + high or (at_bound and x == 1 + high)
        under = x < 1 - low or (at_bound and x == 1 - low)
        return (s.advantage > 0 and over) or (s.advantage < 0 and under)

    return blocks


def kl_of_two(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def dppo_mask(divergence: Callable[[Sequence, int], float], delta: float) -> TokenRule:
    def blocks(s: Sequence, t: int) -> bool:
        outwards = (s.advantage > 0 and s.q(t) > 1) or (s.advantage < 0 and s.q(t) < 1)
        return outwards and divergence(s, t) > delta

    return blocks


def binary_tv(s: Sequence, t: int) -> float:
    return abs(s.p_mu(t) - s.p_theta(t))


def binary_kl(s: Sequence, t: int) -> float:
    return kl_of_two(s.p_mu(t), s.p_theta(t))


def partition(s: Sequence, t: int) -> list[tuple[float, float]]:
    """(mu, theta) of the K listed tokens, of the sampled one, and of all others together."""
    alone = sorted({*s.listed[t], s.tokens[t]})
    pairs = [(s.vocabulary_mu[t][v], s.vocabulary_theta[t][v]) for v in alone]
    others = [v for v in range(len(s.vocabulary_mu[t])) if v not in alone]
    return [*pairs, (sum(s.vocabulary_mu[t][v] for v in others), sum(s.vocabulary_theta[t][v] for v in others))]


def topk_tv(s: Sequence, t: int) -> float:
    return sum(abs(a - b) for a, b in partition(s, t)) / 2


def topk_kl(s: Sequence, t: int) -> float:
    return sum(a * math.log(a / b) for a, b in partition(s, t))


def minimal_mask(delta: float, anchor: str = "mu") -> TokenRule:
    """Trust Region, sec. 5.3: A < 0 and mu - theta >= delta."""
    return lambda s, t: s.advantage < 0 and (s.p_mu(t) if anchor == "mu" else s.p_prox(t)) - s.p_theta(t) >= delta


# --- Weights and rejection.


def cut(c: float) -> TokenRule:
    return lambda s, t: min(s.rho(t), c)


def cut_product(c: float) -> TokenRule:
    return lambda s, t: min(s.product(s.rho), c)


def rho_inside(low: float, high: float) -> TokenRule:
    return lambda s, t: low <= s.rho(t) <= high


def geometric_inside(low: float, high: float) -> TokenRule:
    return lambda s, t: low <= s.geometric(s.rho) <= high


def kpop_keep(s: Sequence, t: int) -> bool:
    p, q = s.p_prox(t), s.p_mu(t)
    return kl_of_two(p, q) <= 0.1 and kl_of_two(q, p) <= 0.1


def k3_keep(s: Sequence, t: int) -> bool:
    return sum(s.rho(k) - 1 - math.log(s.rho(k)) for k in s.trained) / len(s.trained) <= 0.01


def opsm_keep(s: Sequence, t: int) -> bool:
    gap = sum(s.mu[k] - s.log_theta[k].item() for k in s.trained) / len(s.trained)
    return not (s.advantage < 0 and gap > 0.1)


def m2po_keep(batch: list[Sequence]) -> list[list[bool]]:
    """Algorithm 1: of the tokens in PPO's two clipping quadrants leave out the largest, until their second moment is within 0.04."""
    left = []
    for i, s in enumerate(batch):
        for t in s.trained:
            log_q = s.log_theta[t].item() - s.mu[t]
            if (s.advantage > 0 and log_q > 0) or (s.advantage < 0 and log_q < 0):
                left.append((log_q**2, i, t))
    left.sort()
    dropped = set()
    while left and sum(value for value, _, _ in left) / len(left) > 0.04:
        dropped.add(left.pop()[1:])
    return [[s.mask[t] and (i, t) not in dropped for t in range(len(s.mask))] for i, s in enumerate(batch)]


def areal_keep(batch: list[Sequence]) -> list[list[bool]]:
    """Leave out the tokens with the largest (log rho)^2, one after the other, until the mean of the rest is under 0.04."""
    left = sorted(((s.prox[t] - s.mu[t]) ** 2, i, t) for i, s in enumerate(batch) for t in s.trained)
    while len(left) > 1 and sum(value for value, _, _ in left) / len(left) >= 0.04:
        left.pop()
    kept = {(i, t) for _, i, t in left}
    return [[(i, t) in kept for t in range(len(s.mask))] for i, s in enumerate(batch)]


def covariances(batch: list[Sequence]) -> dict[tuple[int, int], float]:
    """Of advantage and logprob, by (sequence, token), around the means over all trained tokens."""
    places = [(i, t) for i, s in enumerate(batch) for t in s.trained]
    mean_a = math.fsum(batch[i].advantage for i, _ in places) / len(places)
    mean_log = math.fsum(batch[i].log_theta[t].item() for i, t in places) / len(places)
    return {(i, t): (batch[i].advantage - mean_a) * (batch[i].log_theta[t].item() - mean_log) for i, t in places}


def lot(logprob: float, seed: int) -> int:
    """splitmix64 of a float's bits, in 64 bits with a sign."""

    def signed(x: int) -> int:
        return (x + 2**63) % 2**64 - 2**63

    x = signed(struct.unpack("<q", struct.pack("<d", logprob))[0] + seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = signed((x ^ (x >> shift)) * factor)
    return x ^ (x >> 31)


def mark_drawn(batch: list[Sequence]) -> None:
    """One in 5,000 of those between 1 and 5 that PPO doesn't clip, at least one token; by lot."""
    values, eligible = covariances(batch), []
    for (i, t), value in values.items():
        s = batch[i]
        r = s.p_theta(t) / s.p_prox(t)
        is_clipped = (s.advantage > 0 and r > 1.2) or (s.advantage < 0 and r < 0.8)
        if 1 < value < 5 and not is_clipped:
            eligible.append((lot(s.log_theta[t].item(), hash((0, s.version))), i, t))
    for _, i, t in sorted(eligible, reverse=True)[: max(len(values) // 5000, 1)]:
        batch[i].chosen.add(t)


def mark_largest(batch: list[Sequence]) -> None:
    values = covariances(batch)
    for i, t in sorted(values, key=lambda place: -values[place])[: max(len(values) // 5000, 1)]:
        batch[i].chosen.add(t)


def kl_cov(s: Sequence, t: int) -> Tensor:
    log_r = s.log_theta[t] - s.prox[t]
    return -math.exp(log_r.item()) * s.advantage * s.log_theta[t] + (log_r.abs() if t in s.chosen else 0)


def mis_full_keep(s: Sequence, t: int) -> bool:
    return 0.5 <= s.rho(t) <= 2 and all(s.rho(k) >= 1e-4 for k in s.trained)


def square_of_sequence(s: Sequence, t: int) -> Tensor:
    """The whole sequence's, an equal part at each of its tokens."""
    total = sum((s.log_theta[k] - s.mu[k] for k in s.trained), torch.zeros((), dtype=torch.float64))
    return 1e-3 / 2 * total**2 / len(s.trained)


def penalty_of_prime(s: Sequence, t: int) -> Tensor:
    return 1e-3 * (s.log_theta[t] - s.mu[t]) ** 2


def score(coefficient: TokenRule, blocks: TokenRule = lambda s, t: False, mean: str = "sum", **more: Any) -> Method:
    """A policy gradient in bypass, unless said otherwise."""
    return Method(policy_gradient(coefficient, blocks), mean, **{"bypass": True, **more})


def miles(**more: Any) -> Method:
    return Method(ppo(high=0.28), "sequence", **more)


METHODS: dict[str, Method] = {
    "ppo": Method(ppo()),
    "ppo-dual-clip": Method(ppo(dual=3.0)),
    "grpo": Method(ppo(), "sequence"),
    "dr-grpo": Method(ppo(), "constant"),
    "dapo": Method(ppo(high=0.28)),
    "bandpo": Method(bandpo),
    "gspo": Method(gspo, "sequence"),
    "luspo": Method(gspo, "sum"),
    "gmpo": Method(gmpo, "sequence"),
    "ctpo": Method(ctpo),
    "sapo": Method(sapo, "sequence"),
    "cispo": score(lambda s, t: min(s.p_theta(t) / s.p_prox(t), 5.0), mean="token", bypass=False),
    "m2po": score(raw_q, mean="token", bypass=False, keep_of_batch=m2po_keep),
    "m2po-areal": Method(ppo(), keep_of_batch=areal_keep, counts_kept=True),
    "k3-sequence": Method(ppo(), keep=k3_keep),
    "clip-cov": Method(ppo(), keep=lambda s, t: t not in s.chosen, mark=mark_drawn),
    "kl-cov": Method(kl_cov, mark=mark_largest),
    "opsm": Method(ppo(), "sequence", keep=opsm_keep),
    "tis-token": Method(ppo(), weight=cut(2.0)),
    "tis-sequence": Method(ppo(), weight=cut_product(2.0)),
    "tis-sequence-normalized": Method(ppo(), weight=cut_product(5.0), normalize="sequence"),
    "tis-geometric-normalized": Method(ppo(), weight=lambda s, t: min(s.geometric(s.rho), 2.0), normalize="sequence"),
    "split-tis": Method(ppo(on=Sequence.since_with_gradient), weight=lambda s, t: min(s.m(t), 2.0)),
    "split-mis": Method(ppo(on=Sequence.since_with_gradient), weight=lambda s, t: min(s.m(t), 2.0), keep=lambda s, t: 0.5 <= s.m(t) <= 2),
    "mis-token": Method(ppo(), weight=cut(2.0), keep=rho_inside(0.5, 2.0)),
    "mis-token-upper": Method(ppo(), weight=lambda s, t: s.rho(t) if s.rho(t) <= 3 else 0.0),
    "mis-sequence": Method(ppo(), weight=cut_product(2.0), keep=lambda s, t: 0.5 <= s.product(s.rho) <= 2),
    "mis-sequence-upper": Method(ppo(), weight=lambda s, t: s.product(s.rho) if s.product(s.rho) <= 3 else 0.0),
    "mis-geometric": Method(ppo(), weight=cut(2.0), keep=geometric_inside(0.999, 1.001)),
    "mis-geometric-miles": Method(ppo(), weight=lambda s, t: min(max(s.rho(t), 0.5), 1.5), keep=geometric_inside(0.99, 1.001)),
    "mis-full": Method(ppo(), weight=cut(2.0), keep=mis_full_keep, normalize="token"),
    "miles-baseline": miles(),
    "miles-is": miles(weight=cut(2.0)),
    "miles-mis": miles(weight=cut(2.0), keep=rho_inside(0.5, 2.0)),
    "miles-mis-normalized": miles(weight=cut(2.0), keep=rho_inside(0.5, 2.0), normalize="token"),
    "icepop": Method(ppo(), "sequence", weight=lambda s, t: s.rho(t) if 0.5 <= s.rho(t) <= 5 else 0.0),
    "kpop": Method(ppo(), "sequence", weight=lambda s, t: s.rho(t), keep=kpop_keep),
    "seq-mask-tis": Method(ppo(), weight=lambda s, t: s.rho(t), keep=geometric_inside(0.999, 1.002)),
    "decoupled-ppo": Method(ppo(), weight=lambda s, t: s.rho(t)),
    "a-3po": Method(ppo(), weight=lambda s, t: s.rho(t), interpolates=True),
    "bypass": Method(ppo(), bypass=True),
    "pg": score(one, mean="token"),
    "pg-is": score(raw_q),
    "pg-tis": score(at_most(3.0)),
    "pg-tis-scale": score(at_most(5.0)),
    "pg-sequence": score(one, mean="token", weight=lambda s, t: min(s.product(s.q), 2.0)),
    "pg-clip": score(lambda s, t: min(max(s.q(t), 0.8), 1.28), mean="sequence"),
    "dro": score(one, penalty=lambda s, t: 0.05 / 2 * (s.log_theta[t] - s.mu[t]) ** 2),
    "mirror-descent": score(one, penalty=square_of_sequence),
    "oapl": score(one, penalty=square_of_sequence),
    "delightful": score(delight(), mean="token"),
    "grpo-clip-higher": score(raw_q, ppo_mask(0.2, 0.28)),
    "grpo-clip-higher-scale": score(at_most(5.0), ppo_mask(0.2, 0.27)),
    "grpo-relax-both": score(raw_q, ppo_mask(0.2, 0.28, rare=0.1)),
    "minimal-mask": score(raw_q, minimal_mask(0.5)),
    "minirl": score(at_most(5.0), ppo_mask(0.2, 0.27, on="r"), bypass=False),
    "minirl-untruncated": score(raw_q, ppo_mask(0.2, 0.28, on="r"), bypass=False),
    "minirl-tis": score(at_most(3.0), ppo_mask(0.2, 0.28, on="r"), bypass=False),
    "dppo-binary-tv": score(raw_q, dppo_mask(binary_tv, 0.15)),
    "dppo-binary-tv-scale": score(at_most(5.0), dppo_mask(binary_tv, 0.2)),
    "dppo-binary-kl": score(raw_q, dppo_mask(binary_kl, 0.05)),
    "dppo-binary-kl-scale": score(at_most(5.0), dppo_mask(binary_kl, 0.05)),
    "dppo-topk-tv": score(at_most(5.0), dppo_mask(topk_tv, 0.2)),
    "dppo-topk-kl": score(at_most(5.0), dppo_mask(topk_kl, 0.05)),
    "topr": score(topr),
    "vespo": score(vespo, mean="token"),
    "rollout-is": score(raw_q, mean="token", keep=lambda s, t: 0.8 < s.q(t) < 1.28),
    "sao-mask": score(raw_q, mean="token", keep=lambda s, t: 0.2 < s.q(t) < 4.0),
    "prime-tv": score(raw_q, dppo_mask(binary_tv, 0.2), mean="token", penalty=penalty_of_prime),
    "prime-ipo": score(raw_q, mean="token", keep=lambda s, t: abs(s.p_theta(t) - s.p_mu(t)) <= 0.1, penalty=penalty_of_prime),
}
"""By the preset's name."""


def kl_penalty(estimator: str) -> TokenRule:
    """0.3 times an estimate of KL(theta || reference) from a token of theta, Schulman's k2, k3; with q in front: DeepSeek-V3.2."""

    def penalty(s: Sequence, t: int) -> Tensor:
        gap = s.log_theta[t] - s.reference[t]
        k3 = (-gap).exp() - 1 + gap
        return 0.3 * {"k2": gap**2 / 2, "k3": k3, "unbiased_k3": (s.log_theta[t] - s.mu[t]).exp() * k3}[estimator]

    return penalty


MINIMAL = {"preset": "minimal-mask"}
RARE = {"below": 0.1}
KEPT_MIS = {"weight": cut(2.0), "keep": rho_inside(0.5, 2.0), "counts_kept": True}
SINCE = {"kind": "score", "ratio": "since_sampling", "upper": 1.5}
VARIANTS: list[tuple[dict[str, Any], Method]] = [
    (
        {"importance": {"mode": "truncate", "ratio": "mismatch", "upper": 1.2}, "objective": SINCE},
        Method(
            lambda s, t: -min(s.since_with_gradient(t).item(), 1.5) * s.advantage * s.log_theta[t],
            weight=lambda s, t: min(s.m(t), 1.2),
        ),
    ),
    (  # the two parts together are rho, which is the whole weight where nothing is bounded
        {
            "importance": {"mode": "clip", "ratio": "staleness", "lower": 0.7, "upper": 1.4},
            "rejection": [{"ratio": "mismatch", "level": "geometric", "lower": 0.8, "upper": 1.3}, {"ratio": "staleness", "upper": 3.0}],
            "veto": {"ratio": "mismatch", "lower": 0.3},
        },
        Method(
            ppo(),
            weight=lambda s, t: min(max(s.s(t), 0.7), 1.4),
            keep=lambda s, t: 0.8 <= s.geometric(s.m) <= 1.3 and s.s(t) <= 3 and all(s.m(k) >= 0.3 for k in s.trained),
        ),
    ),
    (
        {
            **MINIMAL,
            "proximal": "recompute",
            "objective": {"ratio": "since_sampling", "gate": {"ratio": "since_sampling", "threshold": 0.1, "side": "any"}},
            "importance": {"mode": "raw", "ratio": "mismatch", "level": "sequence"},
        },
        score(
            lambda s, t: s.since_with_gradient(t).item(),
            lambda s, t: s.advantage * (s.p_theta(t) - math.exp(s.log_then(t))) > 0.1 * abs(s.advantage),
            weight=lambda s, t: s.product(s.m),
            bypass=False,
        ),
    ),
    ({**MINIMAL, "proximal": "recompute", "objective": {"gate": {"ratio": "r"}}}, score(raw_q, minimal_mask(0.5, "prox"), bypass=False)),
    ({**MINIMAL, "objective": {"gate": {"threshold": 0.1, "side": "any"}}}, score(raw_q, dppo_mask(binary_tv, 0.1))),
    (
        {**MINIMAL, "objective": {"gate": {"threshold": 0.1, "side": "positive"}}},
        score(raw_q, lambda s, t: s.advantage > 0 and s.p_theta(t) - s.p_mu(t) >= 0.1),
    ),
    (
        {"preset": "grpo-clip-higher", "objective": {"gate": {"side": "negative"}}},
        score(raw_q, lambda s, t: s.advantage < 0 and s.q(t) < 0.8),
    ),
    (
        {"preset": "grpo-relax-both", "objective": {"gate": {"relax": {"ends": "low"}}}},
        score(raw_q, lambda s, t: (s.advantage > 0 and s.q(t) > 1.28) or (s.advantage < 0 and s.q(t) < 0.8 and s.p_mu(t) >= 0.1)),
    ),
    (
        {"preset": "grpo-relax-both", "objective": {"gate": {"relax": {"ends": "high"}}}},
        score(raw_q, lambda s, t: (s.advantage > 0 and s.q(t) > 1.28 and s.p_mu(t) >= 0.1) or (s.advantage < 0 and s.q(t) < 0.8)),
    ),
    ({"preset": "dapo", "objective": {"relax": RARE}}, Method(ppo(high=0.28, rare=0.1))),
    ({"preset": "dapo", "objective": {"relax": {**RARE, "ends": "low"}}}, Method(ppo(high=0.28, rare=0.1, ends="low"))),
    ({"preset": "bypass", "objective": {"relax": {**RARE, "ends": "high"}}}, Method(ppo(rare=0.1, ends="high"), bypass=True)),
    ({"preset": "ppo-dual-clip", "objective": {"relax": RARE, "dual_clip": 1.5}}, Method(ppo(dual=1.5, rare=0.1))),
    (
        {"preset": "delightful", "objective": {"ratio": "q", "delight": {"temperature": 0.5, "surprisal_limit": 2.0, "gain": 2.0}}},
        score(delight(0.5, 2.0, 2.0, raw_q), mean="token"),
    ),
    (
        {"preset": "minirl", "objective": {"delight": {}}},
        score(delight(ratio=at_most(5.0)), ppo_mask(0.2, 0.27, on="r"), bypass=False),
    ),
    ({"preset": "mis-token", "denominator": {"count": "kept"}}, Method(ppo(), **KEPT_MIS)),
    ({"preset": "mis-token", "denominator": {"kind": "sequence_mean", "count": "kept"}}, Method(ppo(), "sequence", **KEPT_MIS)),
    ({"preset": "mis-token", "denominator": {"kind": "prompt_mean", "count": "kept"}}, Method(ppo(), "prompt", **KEPT_MIS)),
    ({"preset": "bypass", "denominator": {"kind": "rollout_mean"}}, Method(ppo(), "rollout", bypass=True)),
    ({"preset": "mis-token", "denominator": {"kind": "rollout_mean", "count": "kept"}}, Method(ppo(), "rollout", **KEPT_MIS)),
    ({"preset": "mis-full", "normalize": {"population": "kept"}}, Method(ppo(), weight=cut(2.0), keep=mis_full_keep, normalize="kept")),
    (
        {"preset": "tis-token", "veto": {"quantity": "probability", "lower": 0.01}},
        Method(ppo(), weight=cut(2.0), keep=lambda s, t: all(s.p_prox(k) >= 0.01 for k in s.trained)),
    ),
    *(
        ({"preset": "bypass", "kl": {"coefficient": 0.3, "estimator": name}}, Method(ppo(), bypass=True, penalty=kl_penalty(name)))
        for name in ("k2", "k3", "unbiased_k3")
    ),
]
"""Settings of parts that no preset has, and what they mean."""
