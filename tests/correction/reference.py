"""Every preset once more, token by token in plain Python: written from the papers' formulas, without anything of correction/.

A batch is a list of sequences of plain numbers. Only log theta is a tensor, one scalar for each token, so that autograd gives the gradient
of these loops. `rho`, `r`, `q` of a token are prox/mu, theta/prox, theta/mu; in bypass prox is mu, so that r is q, and a weight is on q.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Table = list[float]
"""Probabilities of a whole vocabulary."""


@dataclass
class Sequence:
    """One answer: a value for each of its tokens, prompt and tool tokens included, which `mask` leaves out."""

    mu: list[float]
    """Logs, as the next two."""
    prox: list[float]
    reference: list[float]
    log_theta: list[Tensor]
    """With gradient."""
    advantage: float
    mask: list[bool]
    age: list[int]
    """Versions since the token was sampled."""
    group: int
    tokens: list[int] = field(default_factory=list)
    vocabulary_mu: list[Table] = field(default_factory=list)
    vocabulary_theta: list[Table] = field(default_factory=list)
    listed: list[list[int]] = field(default_factory=list)
    """The K tokens that the sampler found most likely."""

    @property
    def trained(self) -> list[int]:
        return [t for t, is_in in enumerate(self.mask) if is_in]

    def p_mu(self, t: int) -> float:
        return math.exp(self.mu[t])

    def p_prox(self, t: int) -> float:
        return math.exp(self.prox[t])

    def p_theta(self, t: int) -> float:
        return math.exp(self.log_theta[t].item())

    def rho(self, t: int) -> float:
        return self.p_prox(t) / self.p_mu(t)

    def q(self, t: int) -> float:
        return self.p_theta(t) / self.p_mu(t)

    def r_with_gradient(self, t: int) -> Tensor:
        return (self.log_theta[t] - self.prox[t]).exp()

    def product(self, ratio: Callable[[int], float]) -> float:
        """Over the sequence; its log is cut to +-20, as verl and Miles do."""
        return min(max(math.prod(ratio(t) for t in self.trained), math.exp(-20)), math.exp(20))

    def geometric(self, ratio: Callable[[int], float]) -> float:
        return math.prod(ratio(t) for t in self.trained) ** (1 / len(self.trained)) if self.trained else 1.0


TokenRule = Callable[[Sequence, int], Any]


def one(s: Sequence, t: int) -> float:
    return 1.0


def always(s: Sequence, t: int) -> bool:
    return True


@dataclass
class Method:
    """loss = mean over tokens of keep * weight * loss, plus penalty."""

    loss: TokenRule
    """Of a token, with gradient."""
    mean: str = "token"
    """token, sequence (mean of means), sum (mean over sequences of sums), constant (sum / 1024), prompt (mean of groups' token means)."""
    weight: TokenRule = one
    """Detached."""
    keep: TokenRule = always
    normalize: str = ""
    """Weights have mean 1 over: token (all tokens of the mask), sequence (each counts once), kept (kept tokens)."""
    counts_kept: bool = False
    """The denominator counts kept tokens alone."""
    keep_of_batch: Callable[[list[Sequence]], list[list[bool]]] | None = None
    penalty: TokenRule | None = None
    """Added on all tokens of the mask, with the denominator of the mask."""
    bypass: bool = False
    interpolates: bool = False


@dataclass
class Outcome:
    loss: Tensor
    weights: list[float]
    keep: list[bool]
    """Both of all tokens, in order; the weight of a token outside of the mask says nothing."""


def run(method: Method, batch: list[Sequence]) -> Outcome:
    for s in batch:
        if method.bypass:
            s.prox = s.mu
        if method.interpolates:
            s.prox = [m if d == 0 else m / d + (1 - 1 / d) * x.item() for m, d, x in zip(s.mu, s.age, s.log_theta, strict=True)]
    keep = [[is_in and bool(method.keep(s, t)) for t, is_in in enumerate(s.mask)] for s in batch]
    if method.keep_of_batch is not None:
        keep = method.keep_of_batch(batch)
    weights = [[float(method.weight(s, t)) if is_in else 1.0 for t, is_in in enumerate(s.mask)] for s in batch]
    factor = 1 / mean_weight(method.normalize, batch, weights, keep)
    weights = [[w * factor for w in row] for row in weights]
    counted = keep if method.counts_kept else [s.mask for s in batch]
    loss = torch.zeros((), dtype=torch.float64)
    for i, s in enumerate(batch):
        for t in s.trained:
            if keep[i][t]:
                loss = loss + weights[i][t] * method.loss(s, t) * share(method.mean, batch, counted, i)
            if method.penalty is not None:
                loss = loss + method.penalty(s, t) * share(method.mean, batch, [s.mask for s in batch], i)
    return Outcome(loss, [w for row in weights for w in row], [k for row in keep for k in row])


def share(mean: str, batch: list[Sequence], counted: list[list[bool]], i: int) -> float:
    """What a token of sequence i is multiplied by; a sequence without a counted token is none."""
    counts = [sum(row) for row in counted]
    sequences = sum(n > 0 for n in counts)
    if mean == "token":
        return 1 / sum(counts)
    if mean == "sequence":
        return 1 / (counts[i] * sequences)
    if mean == "sum":
        return 1 / sequences
    if mean == "constant":
        return 1 / (1024 * sequences)
    assert mean == "prompt"
    by_group: dict[int, int] = {}
    for s, n in zip(batch, counts, strict=True):
        by_group[s.group] = by_group.get(s.group, 0) + n
    return 1 / (by_group[batch[i].group] * sum(n > 0 for n in by_group.values()))


def mean_weight(over: str, batch: list[Sequence], weights: list[list[float]], keep: list[list[bool]]) -> float:
    if not over:
        return 1.0
    if over == "sequence":
        values = [weights[i][s.trained[0]] for i, s in enumerate(batch) if s.trained]
    else:
        rows = keep if over == "kept" else [s.mask for s in batch]
        values = [w for row, is_in in zip(weights, rows, strict=True) for w, x in zip(row, is_in, strict=True) if x]
    return sum(values) / len(values)


# --- Objectives.


def clipped(x: Tensor, a: float, low: float, high: float) -> Tensor:
    """PPO's -min(x A, clip(x) A), the branch chosen by its value."""
    inside = x if 1 - low <= x.item() <= 1 + high else torch.tensor(min(max(x.item(), 1 - low), 1 + high), dtype=torch.float64)
    return -x * a if x.item() * a <= inside.item() * a else -inside * a


def ppo(low: float = 0.2, high: float = 0.2, dual: float | None = None, rare: float = 0.0, ends: str = "both") -> TokenRule:
    def loss(s: Sequence, t: int) -> Tensor:
        is_rare = s.p_mu(t) < rare
        lower = math.inf if is_rare and ends in ("low", "both") else low
        upper = math.inf if is_rare and ends in ("high", "both") else high
        value = clipped(s.r_with_gradient(t), s.advantage, lower, upper)
        if dual is not None and s.advantage < 0 and value.item() > -s.advantage * dual:
            return torch.tensor(-s.advantage * dual, dtype=torch.float64)
        return value

    return loss


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


def opsm_keep(s: Sequence, t: int) -> bool:
    gap = sum(s.mu[k] - s.log_theta[k].item() for k in s.trained) / len(s.trained)
    return not (s.advantage < 0 and gap > 0.1)


def m2po_keep(batch: list[Sequence]) -> list[list[bool]]:
    """Leave out the tokens with the largest (log rho)^2, one after the other, until the mean of the rest is under 0.04."""
    left = sorted(((s.prox[t] - s.mu[t]) ** 2, i, t) for i, s in enumerate(batch) for t in s.trained)
    while len(left) > 1 and sum(value for value, _, _ in left) / len(left) >= 0.04:
        left.pop()
    kept = {(i, t) for _, i, t in left}
    return [[(i, t) in kept for t in range(len(s.mask))] for i, s in enumerate(batch)]


def mis_full_keep(s: Sequence, t: int) -> bool:
    return 0.5 <= s.rho(t) <= 2 and all(s.rho(k) >= 1e-4 for k in s.trained)


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
    "gspo": Method(gspo, "sequence"),
    "luspo": Method(gspo, "sum"),
    "gmpo": Method(gmpo, "sequence"),
    "sapo": Method(sapo, "sequence"),
    "cispo": score(lambda s, t: min(s.p_theta(t) / s.p_prox(t), 5.0), mean="token", bypass=False),
    "m2po": Method(ppo(), keep_of_batch=m2po_keep),
    "opsm": Method(ppo(), "sequence", keep=opsm_keep),
    "tis-token": Method(ppo(), weight=cut(2.0)),
    "tis-sequence": Method(ppo(), weight=cut_product(2.0)),
    "tis-sequence-normalized": Method(ppo(), weight=cut_product(5.0), normalize="sequence"),
    "tis-geometric-normalized": Method(ppo(), weight=lambda s, t: min(s.geometric(s.rho), 2.0), normalize="sequence"),
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
    "prime-tv": score(raw_q, dppo_mask(binary_tv, 0.2), mean="token", penalty=penalty_of_prime),
    "prime-ipo": score(raw_q, mean="token", keep=lambda s, t: abs(s.p_theta(t) - s.p_mu(t)) <= 0.1, penalty=penalty_of_prime),
}
"""By the preset's name."""


def kl_penalty(estimator: str) -> TokenRule:
    """0.3 times an estimate of KL(theta || reference) from a token of theta, Schulman's k1, k2, k3; with q in front: DeepSeek-V3.2."""

    def penalty(s: Sequence, t: int) -> Tensor:
        gap = s.log_theta[t] - s.reference[t]
        k3 = (-gap).exp() - 1 + gap
        return 0.3 * {"k1": gap, "k2": gap**2 / 2, "k3": k3, "unbiased_k3": (s.log_theta[t] - s.mu[t]).exp() * k3}[estimator]

    return penalty


MINIMAL = {"preset": "minimal-mask"}
RARE = {"below": 0.1}
KEPT_MIS = {"weight": cut(2.0), "keep": rho_inside(0.5, 2.0), "counts_kept": True}
VARIANTS: list[tuple[dict[str, Any], Method]] = [
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
    ({"preset": "mis-token", "denominator": {"count": "kept"}}, Method(ppo(), **KEPT_MIS)),
    ({"preset": "mis-token", "denominator": {"kind": "sequence_mean", "count": "kept"}}, Method(ppo(), "sequence", **KEPT_MIS)),
    ({"preset": "mis-token", "denominator": {"kind": "prompt_mean", "count": "kept"}}, Method(ppo(), "prompt", **KEPT_MIS)),
    ({"preset": "mis-full", "normalize": {"population": "kept"}}, Method(ppo(), weight=cut(2.0), keep=mis_full_keep, normalize="kept")),
    (
        {"preset": "tis-token", "veto": {"quantity": "probability", "lower": 0.01}},
        Method(ppo(), weight=cut(2.0), keep=lambda s, t: all(s.p_prox(k) >= 0.01 for k in s.trained)),
    ),
    *(
        ({"preset": "bypass", "kl": {"coefficient": 0.3, "estimator": name}}, Method(ppo(), bypass=True, penalty=kl_penalty(name)))
        for name in ("k1", "k2", "k3", "unbiased_k3")
    ),
]
"""Settings of parts that no preset has, and what they mean."""
