"""A correction once more, token by token in plain Python, without anything of correction/; reference_methods.py has the methods.

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
    rollout: int
    tokens: list[int] = field(default_factory=list)
    vocabulary_mu: list[Table] = field(default_factory=list)
    vocabulary_theta: list[Table] = field(default_factory=list)
    then: list[float] = field(default_factory=list)
    """Log probability that the learner gave at the weights which sampled the token; not a number: it can't say."""
    version: int = 0
    """The learner's."""
    chosen: set[int] = field(default_factory=set)
    """Tokens that a method has marked in the batch."""
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

    def log_then(self, t: int) -> float:
        """At present weights that is prox; and where it isn't known, prox is taken for it."""
        return self.prox[t] if self.age[t] == 0 or math.isnan(self.then[t]) else self.then[t]

    def m(self, t: int) -> float:
        """Mismatch: learner against engine, both as they were."""
        return math.exp(self.log_then(t)) / self.p_mu(t)

    def s(self, t: int) -> float:
        """Staleness: learner now against then."""
        return self.p_prox(t) / math.exp(self.log_then(t))

    def since_with_gradient(self, t: int) -> Tensor:
        return (self.log_theta[t] - self.log_then(t)).exp()

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
    """token, sequence (mean of means), sum (mean over sequences of sums), constant (sum / 1024), prompt, rollout (means of
    groups' or rollouts' token means)."""
    weight: TokenRule = one
    """Detached."""
    keep: TokenRule = always
    normalize: str = ""
    """Weights have mean 1 over: token (all tokens of the mask), sequence (each counts once), kept (kept tokens)."""
    counts_kept: bool = False
    """The denominator counts kept tokens alone."""
    keep_of_batch: Callable[[list[Sequence]], list[list[bool]]] | None = None
    mark: Callable[[list[Sequence]], None] | None = None
    """Fills `chosen` of the sequences, before anything else."""
    penalty: TokenRule | None = None
    """Added on all tokens of the mask, with the denominator of the mask."""
    bypass: bool = False
    interpolates: bool = False


@dataclass
class ReferenceOutcome:
    loss: Tensor
    weights: list[float]
    keep: list[bool]
    """Both of all tokens, in order; the weight of a token outside of the mask says nothing."""


def run(method: Method, batch: list[Sequence]) -> ReferenceOutcome:
    for s in batch:
        if method.bypass:
            s.prox = s.mu
        if method.interpolates:
            s.prox = [m if d == 0 else m / d + (1 - 1 / d) * x.item() for m, d, x in zip(s.mu, s.age, s.log_theta, strict=True)]
    if method.mark is not None:
        method.mark(batch)
    keep = [[is_in and bool(method.keep(s, t)) for t, is_in in enumerate(s.mask)] for s in batch]
    if method.keep_of_batch is not None:
        keep = method.keep_of_batch(batch)
    weights = [[float(method.weight(s, t)) if is_in else 1.0 for t, is_in in enumerate(s.mask)] for s in batch]
    factor = 1 / mean_weight(method.normalize, batch, weights, keep)
    weights = [[w * factor for w in row] for row in weights]
    masks = [s.mask for s in batch]
    counted = keep if method.counts_kept else masks
    loss, of_counted, of_all = torch.zeros((), dtype=torch.float64), share(method.mean, batch, counted), share(method.mean, batch, masks)
    for i, s in enumerate(batch):
        kept_ones = [t for t in s.trained if keep[i][t]]
        if kept_ones:
            terms = [weights[i][t] * method.loss(s, t) for t in kept_ones]
            loss = loss + sum(terms) * of_counted(i)
        if method.penalty is not None and s.trained:
            loss = loss + sum(method.penalty(s, t) for t in s.trained) * of_all(i)
    return ReferenceOutcome(loss, [w for row in weights for w in row], [k for row in keep for k in row])


def share(mean: str, batch: list[Sequence], counted: list[list[bool]]) -> Callable[[int], float]:
    """What a token of sequence i is multiplied by; a sequence without a counted token is none."""
    counts = [sum(row) for row in counted]
    tokens, sequences, by_group, by_rollout = sum(counts), sum(n > 0 for n in counts), dict[int, int](), dict[int, int]()
    for s, n in zip(batch, counts, strict=True):
        by_group[s.group] = by_group.get(s.group, 0) + n
        by_rollout[s.rollout] = by_rollout.get(s.rollout, 0) + n
    groups, rollouts = (sum(n > 0 for n in found.values()) for found in (by_group, by_rollout))
    return {
        "token": lambda i: 1 / tokens,
        "sequence": lambda i: 1 / (counts[i] * sequences),
        "sum": lambda i: 1 / sequences,
        "constant": lambda i: 1 / (1024 * sequences),
        "prompt": lambda i: 1 / (by_group[batch[i].group] * groups),
        "rollout": lambda i: 1 / (by_rollout[batch[i].rollout] * rollouts),
    }[mean]


def mean_weight(over: str, batch: list[Sequence], weights: list[list[float]], keep: list[list[bool]]) -> float:
    if not over:
        return 1.0
    if over == "sequence":
        values = [weights[i][s.trained[0]] for i, s in enumerate(batch) if s.trained]
    else:
        rows = keep if over == "kept" else [s.mask for s in batch]
        values = [w for row, is_in in zip(weights, rows, strict=True) for w, x in zip(row, is_in, strict=True) if x]
    return sum(values) / len(values)
