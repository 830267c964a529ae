"""The words that settings may have: which ratio, which level, which bound. Without torch, so that settings are checked before it is loaded.

What a word does is in the module of its part, in terms/: ratios, segments, importance, rejection, denominators, advantages.
"""

from __future__ import annotations

import enum


class AdvantageEstimator(enum.StrEnum):
    """How rewards of a group become advantages."""

    GRPO = "grpo"
    """(R - mean) / (std + epsilon)."""
    GRPO_NO_STD = "grpo_no_std"
    """R - mean (Dr.GRPO, MiniRL, DPPO)."""
    RLOO = "rloo"
    """R - mean of the others = G / (G - 1) * (R - mean)."""
    MAX_RL = "max_rl"
    """(R - mean) / mean, for rewards >= 0 (prime-rl)."""
    SOFT_VALUE = "soft_value"
    """R - V with V = t log mean exp(R / t): the advantage of the best policy at a KL price of t (OAPL)."""


class ProximalSource(enum.StrEnum):
    """Where log pi_prox comes from."""

    BEHAVIOR = "behavior"
    """Bypass: pi_prox = mu, no extra forward; the ratio of the update is q."""
    RECOMPUTE = "recompute"
    """Decoupled: the learner's own forward with the weights from which the update starts."""
    INTERPOLATE = "interpolate"
    """Between behaviour and target by staleness (A-3PO): no extra forward."""


class Ratio(enum.StrEnum):
    """Which two policies a part compares."""

    RHO = "rho"
    """proximal / behaviour: mismatch and staleness."""
    R = "r"
    """target / proximal: drift, what the optimizer did within this batch."""
    Q = "q"
    """target / behaviour: all of it."""
    MISMATCH = "mismatch"
    """at_sampling / behaviour: the engine against the learner at the weights that sampled the token."""
    STALENESS = "staleness"
    """proximal / at_sampling: what newer weights changed, engines apart. Mismatch times staleness is rho."""
    SINCE_SAMPLING = "since_sampling"
    """target / at_sampling: staleness and drift, all that training did since the token was sampled."""

    @property
    def policies(self) -> tuple[str, str]:
        """(numerator, denominator)."""
        return _POLICIES[self]

    @property
    def has_target(self) -> bool:
        """Whether it has a gradient."""
        return self.policies[0] == "target"

    @property
    def factors(self) -> frozenset[Ratio]:
        """Which of mismatch, staleness and r (drift) it is the product of."""
        return _FACTORS[self]


_POLICIES = {
    Ratio.RHO: ("proximal", "behavior"),
    Ratio.R: ("target", "proximal"),
    Ratio.Q: ("target", "behavior"),
    Ratio.MISMATCH: ("at_sampling", "behavior"),
    Ratio.STALENESS: ("proximal", "at_sampling"),
    Ratio.SINCE_SAMPLING: ("target", "at_sampling"),
}
_FACTORS = {
    Ratio.RHO: frozenset({Ratio.MISMATCH, Ratio.STALENESS}),
    Ratio.R: frozenset({Ratio.R}),
    Ratio.Q: frozenset({Ratio.MISMATCH, Ratio.STALENESS, Ratio.R}),
    Ratio.MISMATCH: frozenset({Ratio.MISMATCH}),
    Ratio.STALENESS: frozenset({Ratio.STALENESS}),
    Ratio.SINCE_SAMPLING: frozenset({Ratio.STALENESS, Ratio.R}),
}


class Level(enum.StrEnum):
    """What a ratio is taken over."""

    TOKEN = "token"
    TURN = "turn"
    """The product over the tokens of one model turn of a trajectory."""
    SEQUENCE = "sequence"
    """The product over the tokens of a trajectory."""
    GEOMETRIC = "geometric"
    """The sequence's product to the power of one over its number of tokens: does not grow with length."""


class WeightMode(enum.StrEnum):
    """What is done to the ratio."""

    OFF = "off"
    RAW = "raw"
    TRUNCATE = "truncate"
    CLIP = "clip"
    MASK = "mask"


class Statistic(enum.StrEnum):
    """What a criterion looks at. x is the ratio, numerator over denominator; divergences go from denominator to numerator."""

    RATIO = "ratio"
    """x; bounds are ratios."""
    K1 = "k1"
    """-log x; bounds are nats, on k1 itself (verl compares log bounds with the opposite sign)."""
    K2 = "k2"
    K3 = "k3"
    BINARY_KL = "binary_kl"
    """KL(denominator || numerator) of the sampled token against all others."""
    BINARY_KL_MAX = "binary_kl_max"
    """The larger of both directions (KPop)."""
    BINARY_TV = "binary_tv"
    """|numerator - denominator|, probabilities of the sampled token."""
    TOPK_KL = "topk_kl"
    """KL(behaviour || target) over the sampler's K tokens, the sampled one, and the rest merged."""
    TOPK_TV = "topk_tv"
    SECOND_MOMENT = "second_moment"
    """(log x)^2 of tokens, the largest dropped until the mean of the rest is at most the upper bound (M2PO): of all tokens together."""


TOPK_STATISTICS = (Statistic.TOPK_KL, Statistic.TOPK_TV)
"""Statistics of more than the sampled token."""


class RejectionLevel(enum.StrEnum):
    """The unit that one decision covers, and how its tokens' statistics are combined."""

    TOKEN = "token"
    TURN = "turn"
    """Sum over a model turn (ratio: product)."""
    SEQUENCE = "sequence"
    """Sum over a trajectory (ratio: product)."""
    GEOMETRIC = "geometric"
    """Mean over a trajectory (ratio: geometric mean)."""
    MAXIMUM = "maximum"
    """The trajectory's largest token."""

    @property
    def unit(self) -> Level:
        """Level whose segments the decision covers."""
        return {"token": Level.TOKEN, "turn": Level.TURN}.get(self.value, Level.SEQUENCE)


class AdvantageSign(enum.StrEnum):
    """The sign of the advantages to which a part applies."""

    ANY = "any"
    NEGATIVE = "negative"
    POSITIVE = "positive"


class Population(enum.StrEnum):
    """The units whose mean weight batch normalisation makes 1."""

    OFF = "off"
    ALL = "all"
    """All units of the loss mask, before rejection; weights set to zero count (verl, Miles)."""
    KEPT = "kept"
    """Units with a weight above zero and at least one token that rejection and veto kept."""


class DenominatorKind(enum.StrEnum):
    """How the token losses are averaged into the batch's loss."""

    TOKEN_MEAN = "token_mean"
    """Sum over tokens / number of tokens (DAPO)."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean over sequences of the mean over their tokens (GRPO, GSPO)."""
    SEQUENCE_SUM = "sequence_sum"
    """Mean over sequences of the sum over their tokens (MiniRL)."""
    CONSTANT = "constant"
    """Mean over sequences of the sum over their tokens / a constant length (Dr.GRPO)."""
    PROMPT_MEAN = "prompt_mean"
    """Mean over groups of the mean over all tokens of a group (SkyRL)."""
    ROLLOUT_MEAN = "rollout_mean"
    """Mean over rollouts of the mean over all tokens of a rollout, whichever of its sequences has them (slime); sequence_mean where each
    rollout is one sequence."""


class Count(enum.StrEnum):
    """Which tokens and sequences the denominator counts."""

    ORIGINAL = "original"
    """Tokens of the loss mask: a rejected token or sequence still counts."""
    KEPT = "kept"
    """Tokens that rejection and veto left."""
