"""The small models that a correction's settings are made of; config.py puts them together and refuses what makes no sense."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ..errors import ConfigError
from .base import NamedSettings, Settings
from .choices import (
    TOPK_STATISTICS,
    AdvantageEstimator,
    AdvantageSign,
    Count,
    DenominatorKind,
    Level,
    Population,
    ProximalSource,
    Ratio,
    RejectionLevel,
    Statistic,
    WeightMode,
)


def _check_order(place: str, lower: float | None, upper: float | None) -> None:
    if lower is not None and upper is not None and lower > upper:
        raise ConfigError(f"{place}: lower = {lower} is above upper = {upper}: nothing would be inside. Exchange them.")


class AdvantageConfig(NamedSettings):
    """How rewards of a group become advantages."""

    estimator: AdvantageEstimator = AdvantageEstimator.GRPO
    """grpo (mean and std of the group), grpo_no_std (mean), rloo (mean of the others), max_rl (divided by the mean),
    soft_value (R less the group's t log mean exp(R / t))."""
    ddof: Literal[0, 1] = 1
    """1: sample standard deviation, as all frameworks do; 0: population."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""
    temperature: float = Field(default=1.0, gt=0)
    """t of soft_value, in units of the reward: the larger, the nearer V is to the mean; the smaller, to the best answer's reward."""
    level: Literal["rollout", "turn"] = "rollout"
    """rollout: one advantage for all of a rollout's tokens. turn: each turn has that of its own and later turns' rewards (GRPO with
    process supervision), where an environment returns rewards by turn; with grpo or grpo_no_std."""

    @model_validator(mode="after")
    def _turns_have_a_mean(self) -> AdvantageConfig:
        if self.level == "turn" and self.estimator not in (AdvantageEstimator.GRPO, AdvantageEstimator.GRPO_NO_STD):
            raise ConfigError(
                f"advantage.level = turn with advantage.estimator = {self.estimator}: rewards of turns are compared with the mean of all "
                "turns of the group. Set estimator to grpo or grpo_no_std, or level to rollout"
            )
        return self

    @property
    def is_by_turn(self) -> bool:
        return self.level == "turn"

    @property
    def of_group(self) -> dict[str, Any]:
        """What terms/advantages.py takes."""
        return self.model_dump(exclude={"level"})


class ImportanceConfig(Settings):
    """Importance weights: detached factors outside the objective."""

    mode: WeightMode = WeightMode.OFF
    """off, raw, truncate (at upper), clip (into lower and upper), mask (0 outside them)."""
    ratio: Ratio = Ratio.RHO
    """rho = proximal / behaviour, r = target / proximal, q = target / behaviour; in bypass rho means q. With the learner's logprobs at the
    weights that sampled each token: mismatch = at_sampling / behaviour, staleness = proximal / at_sampling, whose product is rho, and
    since_sampling = target / at_sampling."""
    level: Level = Level.TOKEN
    """token, turn, sequence (products), geometric (length-normalised)."""
    lower: float | None = Field(default=None, ge=0)
    """Least weight (clip, mask)."""
    upper: float | None = Field(default=None, gt=0)
    """Largest weight (truncate, clip, mask)."""
    lower_by_staleness: tuple[float, ...] | None = None
    """Entry s replaces lower on units of staleness s; the last entry holds for all older ones."""
    upper_by_staleness: tuple[float, ...] | None = None
    """Entry s replaces upper on units of staleness s; the last entry holds for all older ones."""
    only_negative: bool = False
    """Weights apply where the advantage is negative, and are 1 elsewhere (TOPR)."""

    @model_validator(mode="after")
    def _check_bounds(self) -> ImportanceConfig:
        has_upper = self.upper is not None or self.upper_by_staleness
        has_lower = self.lower is not None or self.lower_by_staleness
        if self.mode is WeightMode.TRUNCATE and not has_upper:
            raise ConfigError("importance.upper is not set: truncated weights need a largest weight. The usual one is 2.0.")
        if self.mode in (WeightMode.CLIP, WeightMode.MASK) and not (has_upper or has_lower):
            raise ConfigError(f"importance.mode = {self.mode}: without lower or upper it does nothing. Set a bound, or mode: raw.")
        _check_order("importance", self.lower, self.upper)
        return self


class CriterionConfig(Settings):
    """One criterion of rejection: what is outside the bounds is dropped."""

    statistic: Statistic = Statistic.RATIO
    """ratio, k1, k2, k3, binary_kl, binary_kl_max, binary_tv, topk_kl, topk_tv, second_moment."""
    ratio: Ratio = Ratio.RHO
    """Which two policies; in bypass rho means q."""
    level: RejectionLevel = RejectionLevel.TOKEN
    """token, turn, sequence (sum; ratio: product), geometric (mean), maximum (largest token)."""
    lower: float | None = None
    """Least accepted value."""
    upper: float | None = None
    """Largest accepted value; for second_moment the budget of the mean."""
    lower_by_staleness: tuple[float, ...] | None = None
    """Entry s replaces lower on units of staleness s; the last entry holds for all older ones."""
    upper_by_staleness: tuple[float, ...] | None = None
    """Entry s replaces upper on units of staleness s; the last entry holds for all older ones."""
    side: AdvantageSign = AdvantageSign.ANY
    """Sign of the advantage of the tokens that it is applied to: any, negative (OPSM), positive."""
    only_outward: bool = False
    """It is applied where the update moves the ratio on, away from 1, which is where a clip works: A > 0 and x > 1, A < 0 and x < 1 (M2PO).
    For second_moment alone."""
    is_open: bool = False
    """A value that equals a bound is rejected; false: it is accepted."""
    usual_kl: float | None = Field(default=None, gt=0)
    """Ratios at geometric level alone: the KL that is to be expected, nats, such as mismatch_k3_kl shows. The band is then moved to where
    geometric means lie, by exp(-usual_kl), and widened by 3 standard errors of a mean over n tokens, sqrt(2 usual_kl / n)."""

    @property
    def label(self) -> str:
        """Name in metrics and messages."""
        return f"{self.statistic.value}_{self.level.value}_{self.ratio.value}"

    @property
    def least_tokens(self) -> int:
        """Tokens that second_moment leaves, however large: one, so that something is trained; none where it looks at some tokens only."""
        return 0 if self.only_outward else 1

    @model_validator(mode="after")
    def _check_bounds(self) -> CriterionConfig:
        if not any((self.lower is not None, self.upper is not None, self.lower_by_staleness, self.upper_by_staleness)):
            raise ConfigError(f"rejection criterion {self.label} has no bound and rejects nothing. Set lower or upper.")
        is_plain_budget = self.level is RejectionLevel.TOKEN and self.upper and self.lower is None
        if self.statistic is Statistic.SECOND_MOMENT and not is_plain_budget:
            raise ConfigError("rejection by second_moment works on tokens and takes upper (the budget, 0.04 in M2PO) alone.")
        if self.only_outward and self.statistic is not Statistic.SECOND_MOMENT:
            raise ConfigError(f"rejection {self.label}: only_outward is for second_moment. Leave it out, or take an objective that clips.")
        if self.statistic in TOPK_STATISTICS and self.ratio is not Ratio.Q:
            raise ConfigError(f"rejection by {self.statistic}: top-K logprobs exist for behaviour and target alone. Set ratio: q.")
        if self.usual_kl is not None and (self.statistic is not Statistic.RATIO or self.level is not RejectionLevel.GEOMETRIC):
            raise ConfigError(f"rejection {self.label}: usual_kl = {self.usual_kl} is for ratios at level: geometric. Leave it out.")
        _check_order(f"rejection {self.label}", self.lower, self.upper)
        return self


class VetoConfig(Settings):
    """One token beyond a hard limit drops its whole sequence."""

    quantity: Literal["ratio", "probability"] = "ratio"
    """ratio: the raw token ratio; probability: that of the sampled token under the proximal policy."""
    ratio: Ratio = Ratio.RHO
    """Which ratio; in bypass rho means q."""
    lower: float | None = Field(default=1e-4, gt=0)
    """A token under it drops its sequence. Default 1e-4 for a ratio (Miles' code), 1e-6 for a probability (the Miles post)."""
    upper: float | None = Field(default=None, gt=0)
    """A token over it drops its sequence."""

    @model_validator(mode="before")
    @classmethod
    def _limit_of_the_quantity(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("quantity") == "probability":
            return {"lower": 1e-6, **values}  # a long answer has many tokens under 1e-4
        return values


class NormalizeConfig(Settings):
    """Batch normalisation of importance weights: their mean over the global batch becomes 1."""

    population: Population = Population.OFF
    """off, all (units of the loss mask, before rejection), kept (units that rejection left)."""


class RelaxConfig(Settings):
    """No clip for rare tokens: a bound is infinite where the behaviour policy's probability is under `below`."""

    below: float = Field(default=0.1, gt=0, lt=1)
    """Probability of the sampled token under the behaviour policy; the Trust Region paper's alpha."""
    ends: Literal["low", "high", "both"] = "both"
    """Bounds from which rare tokens are exempt: low (ratios may fall), high (ratios may rise), both."""


class ClipGate(Settings):
    """Blocks a token where PPO's clip would have no gradient."""

    kind: Literal["clip"] = "clip"
    ratio: Ratio = Ratio.R
    """Ratio that the gate watches."""
    low: float = Field(default=0.2, ge=0)
    """Blocks negative advantages where ratio < 1 - low."""
    high: float = Field(default=0.2, ge=0)
    """Blocks positive advantages where ratio > 1 + high."""
    relax: RelaxConfig | None = None
    """Rare tokens that it lets through."""
    side: AdvantageSign = AdvantageSign.ANY
    """Sign of the advantage of the tokens that it may block: any (both), negative, positive."""
    is_open: bool = False
    """A ratio that equals a bound is blocked; false: it passes."""


class DivergenceGate(Settings):
    """Blocks a token that is already too far and would move further (DPPO)."""

    kind: Literal["divergence"] = "divergence"
    divergence: Statistic = Statistic.BINARY_TV
    """binary_tv, binary_kl, topk_tv or topk_kl, from the anchor to the target."""
    ratio: Ratio = Ratio.Q
    """q anchors on the behaviour policy; since_sampling on the learner at the weights that sampled; r, to study it, on the proximal one
    (collapses in the paper)."""
    threshold: float = Field(default=0.15, gt=0)
    """Divergence over which a token is blocked."""
    side: AdvantageSign = AdvantageSign.ANY
    """Sign of the advantage of the tokens that it may block: any (both), negative (the minimal mask), positive."""
    is_open: bool = False
    """A divergence that equals the threshold is blocked (>=); false: it passes, and only what is over it is blocked (>)."""

    @model_validator(mode="after")
    def _check(self) -> DivergenceGate:
        if self.divergence not in (Statistic.BINARY_TV, Statistic.BINARY_KL, *TOPK_STATISTICS):
            raise ConfigError(f"objective.gate.divergence = {self.divergence}: take binary_tv, binary_kl, topk_tv or topk_kl.")
        if not self.ratio.has_target or (self.divergence in TOPK_STATISTICS and self.ratio is not Ratio.Q):
            raise ConfigError(f"objective.gate.ratio = {self.ratio}: the gate compares the target with an anchor. Set ratio: q.")
        return self


class BandConfig(Settings):
    """Clips that follow the token's probability under the ratio's denominator: as far as it may go, the other tokens scaled evenly,
    until the two distributions are `delta` apart (BandPO). clip_low and clip_high are what each band is widened to at least; 0 leaves it
    alone."""

    divergence: Literal["kl", "tv", "chi2"] = "kl"
    """kl: KL(old || new), in nats; tv: total variation; chi2: chi-square of new to old."""
    delta: float = Field(default=0.05, gt=0)
    """Radius."""
    largest: float = Field(default=100.0, gt=1)
    """Largest upper bound of a ratio, that of rare tokens."""


class ClipObjective(Settings):
    """PPO clip: max(-A x, -A clip(x, 1 - clip_low, 1 + clip_high)); geometric level is GSPO."""

    kind: Literal["clip"] = "clip"
    ratio: Ratio = Ratio.R
    """r, q or since_sampling; in bypass the first two are target / behaviour."""
    level: Level = Level.TOKEN
    """token (PPO), sequence, turn, geometric (GSPO)."""
    clip_low: float = Field(default=0.2, ge=0)
    """Lower clip, as distance from 1."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip, as distance from 1; larger than clip_low is clip-higher (DAPO)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Largest ratio that counts where the advantage is negative, rare tokens' too; None: off."""
    relax: RelaxConfig | None = None
    """Rare tokens that are not clipped; for level: token."""
    band: BandConfig | None = None
    """Wider clips for the less probable tokens; for level: token, and instead of relax."""

    @model_validator(mode="after")
    def _check(self) -> ClipObjective:
        if self.band is not None and (self.level is not Level.TOKEN or self.relax is not None):
            raise ConfigError(
                f"objective.band with objective.level = {self.level}{' and relax' if self.relax else ''}: the band is that of one token, "
                "and sets its clip alone. Set level: token and relax: null, or band: null."
            )
        if self.relax is not None and self.level is not Level.TOKEN:
            raise ConfigError(
                f"objective.relax with objective.level = {self.level}: a token may be rare, a {self.level} ratio belongs to many tokens. "
                "Set level: token, or relax: null."
            )
        return self


class GeometricClipObjective(Settings):
    """GMPO: log ratios clipped on the advantage's side, then their geometric mean over the sequence."""

    kind: Literal["geometric_clip"] = "geometric_clip"
    ratio: Ratio = Ratio.R
    """r, q or since_sampling."""
    log_clip: float = Field(default=0.4, gt=0)
    """Bound of the log ratio."""
    level: ClassVar[Level] = Level.TOKEN
    """Level of the ratios that are clipped."""


class PrefixClipObjective(Settings):
    """CTPO: PPO's clip on the product of the ratios up to the token, whose log bounds widen with the token's number n in its answer."""

    kind: Literal["prefix_clip"] = "prefix_clip"
    ratio: Ratio = Ratio.R
    """r, q or since_sampling."""
    log_low: float = Field(default=0.025, gt=0)
    """The lower clip is at the ratio exp(-log_low n^power)."""
    log_high: float = Field(default=0.05, gt=0)
    """The upper clip is at exp(log_high n^power)."""
    log_dual: float = Field(default=0.05, gt=0)
    """Where the advantage is negative no ratio counts for more than exp(log_dual n^power)."""
    power: float = Field(default=0.5, ge=0)
    """0.5 is the root, with which the sum of n log ratios scatters; 0: the same bounds at each token."""
    level: ClassVar[Level] = Level.SEQUENCE
    """A token without a finite ratio leaves its answer without prefixes."""


class SoftGateObjective(Settings):
    """SAPO: -A sigmoid(tau (x - 1)) 4 / tau."""

    kind: Literal["soft_gate"] = "soft_gate"
    ratio: Ratio = Ratio.R
    """r, q or since_sampling."""
    tau_positive: float = Field(default=1.0, gt=0)
    """Temperature where the advantage is positive."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Temperature elsewhere."""
    level: ClassVar[Level] = Level.TOKEN


class DelightConfig(Settings):
    """Delightful policy gradient: a factor on the coefficient, gain sigmoid(A l / temperature), with the surprisal l = -log theta."""

    temperature: float = Field(default=1.0, gt=0)
    """The paper's eta; the smaller, the harder the gate."""
    surprisal_limit: float = Field(default=10.0, gt=0)
    """Largest surprisal that counts, nats; the paper has none."""
    gain: float = Field(default=1.0, gt=0)
    """2 gives a token without any delight (A l = 0) the factor 1, and with it the step size of the policy gradient without this part."""


class ScoreObjective(Settings):
    """Score form: -c A log target, with a detached coefficient c = M bound(x): the gradient of policy gradient methods."""

    kind: Literal["score"] = "score"
    ratio: Ratio | None = None
    """Ratio in the coefficient; null: none, plain policy gradient."""
    level: Level = Level.TOKEN
    """token, turn, sequence, geometric."""
    lower: float | None = Field(default=None, ge=0)
    """Least ratio in the coefficient."""
    upper: float | None = Field(default=None, gt=0)
    """Largest ratio in the coefficient."""
    only_negative: bool = False
    """The ratio applies where the advantage is negative; elsewhere the coefficient is 1 (TOPR)."""
    gate: Annotated[ClipGate | DivergenceGate, Field(discriminator="kind")] | None = None
    """Tokens that get no gradient (MiniRL, DPPO)."""
    delight: DelightConfig | None = None
    """Rare tokens of good answers weigh more, rare tokens of bad ones less; null: off."""


class GammaObjective(Settings):
    """VESPO: score form with the coefficient e^l w^k e^(-l w) of the sequence's ratio w."""

    kind: Literal["gamma"] = "gamma"
    ratio: Ratio = Ratio.Q
    """Ratio whose product over the sequence is w."""
    k_positive: float = Field(default=2.0, gt=0)
    """Exponent k where the advantage is >= 0."""
    lambda_positive: float = Field(default=3.0, gt=0)
    """Decay l where the advantage is >= 0."""
    k_negative: float = Field(default=3.0, gt=0)
    """Exponent k where the advantage is negative."""
    lambda_negative: float = Field(default=2.0, gt=0)
    """Decay l where the advantage is negative."""
    level: ClassVar[Level] = Level.SEQUENCE


Objective = Annotated[
    ClipObjective | GeometricClipObjective | PrefixClipObjective | SoftGateObjective | ScoreObjective | GammaObjective,
    Field(discriminator="kind"),
]


def gate_of(objective: Objective) -> ClipGate | DivergenceGate | None:
    """What takes the gradient of tokens away, where the objective has it apart from its ratio."""
    return objective.gate if objective.kind == "score" else None


class DenominatorConfig(Settings):
    """What the sum of token losses is divided by."""

    kind: DenominatorKind = DenominatorKind.TOKEN_MEAN
    """token_mean, sequence_mean, sequence_sum, constant, prompt_mean, rollout_mean; over the global batch. Where a rollout has several
    sequences (docs/agents.md), rollout_mean gives each rollout the same weight, and sequence_mean each of its sequences."""
    count: Count = Count.ORIGINAL
    """original: rejected tokens and sequences still count; kept: they don't."""
    constant: float = Field(default=1024.0, gt=0)
    """Tokens; the length that kind: constant divides by. Choose the largest response length."""


class KlConfig(Settings):
    """KL penalty towards another policy, on all tokens of the loss mask, rejected ones too, with the loss's denominator."""

    coefficient: float = Field(default=0.0, ge=0)
    """Factor of the penalty; 0: off."""
    estimator: Literal["k1", "k2", "k3", "unbiased_k3"] = "k3"
    """k1, k2, k3, or k3 times the ratio that makes it unbiased off-policy (DeepSeek-V3.2). As a term of the loss k2 has the gradient of
    KL(target || anchor) on-policy, unbiased_k3 off-policy too, k3 that of the KL in the other direction; k1 has an expected gradient of 0:
    it only reports, and is refused above a coefficient of 1e-6."""
    anchor: Literal["reference", "behavior", "proximal"] = "reference"
    """The other policy."""
    level: Literal["token", "sequence"] = "token"
    """sequence, for k2: half the square of the sequence's summed log ratio (Kimi k1.5, OAPL), whose pull grows with its length."""
    ratio: Ratio = Ratio.Q
    """Ratio of unbiased_k3, differentiable: q corrects from the sampling policy, r from the proximal one, since_sampling from the learner's
    at the weights that sampled."""


class CovarianceConfig(Settings):
    """Tokens whose advantage and logprob lie far on the same side of their means, by which entropy falls: a few of each optimizer step are
    left out (Clip-Cov) or held back (KL-Cov). Each step needs a forward pass before it."""

    action: Literal["drop", "penalty"] = "drop"
    """drop: tokens drawn at random of those between lower and upper, which no clip stops, are left out of the loss; they count in the
    denominator as rejected ones do. penalty: those of the largest covariance have coefficient |log r| added to their loss."""
    share: float = Field(default=2e-4, gt=0, le=1)
    """How many, of the step's trained tokens; rounded down, at least one."""
    lower: float = 1.0
    """drop: covariance over which a token may be drawn."""
    upper: float = 5.0
    """drop: covariance under which it may."""
    coefficient: float = Field(default=1.0, gt=0)
    """penalty: its factor."""
    seed: int = 0
    """drop: of the draw, together with the learner's version."""

    @model_validator(mode="after")
    def _check_bounds(self) -> CovarianceConfig:
        _check_order("covariance", self.lower, self.upper)
        return self


class StepSizeConfig(Settings):
    """How far an optimizer step goes, by what its batch is worth: a factor on the learning rate."""

    by: Literal["off", "ess"] = "off"
    """ess: the root of ESS / S over the step's S sequences, with ESS = (sum w)^2 / sum w^2 of the products w of q, before any bound
    (VCPO, arXiv 2602.17616). The root is for Adam, whose steps don't feel the gradient's size."""


class ModulationConfig(Settings):
    """Injected distortion of token weights, for experiments on objective-level hacking."""

    probability_below: float | None = Field(default=None, gt=0, le=1)
    """Tokens with a proximal probability below it have their loss multiplied by `factor`; the paper has 0.1."""
    factor: float = 2.0
    """See probability_below."""
    noise_std: float = Field(default=0.0, ge=0)
    """Standard deviation of independent Gaussian factors of mean 1; the paper's unbiased control has 0.2."""
    noise_seed: int = 0
    """Seed of the noise, together with the learner's version: each step has noise of its own, in the order of tokens in the batch."""


class CorrectionSettings(NamedSettings):
    """How a batch is corrected and what is optimised. Not checked as a whole: CorrectionConfig is."""

    preset: str | None = None
    """Named method whose values the other keys override; `evenkeel presets` lists them."""
    proximal: ProximalSource = ProximalSource.RECOMPUTE
    """Where pi_prox comes from: recompute (a forward pass of the learner), behavior (mu itself: bypass), interpolate (A-3PO)."""
    importance: ImportanceConfig = ImportanceConfig()
    """Importance weights."""
    rejection: tuple[CriterionConfig, ...] = ()
    """Criteria of rejection, all of which a token must pass."""
    veto: VetoConfig | None = None
    """Hard limits that drop whole sequences."""
    normalize: NormalizeConfig = NormalizeConfig()
    """Batch normalisation of the importance weights."""
    objective: Objective = ClipObjective()
    """The trust region."""
    covariance: CovarianceConfig | None = None
    """Tokens that are chosen by the covariance of advantage and logprob."""
    denominator: DenominatorConfig = DenominatorConfig()
    """What the loss is divided by."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    kl: KlConfig = KlConfig()
    """KL penalty."""
    step_size: StepSizeConfig = StepSizeConfig()
    """Factor on the learning rate."""
    topk: int = Field(default=20, ge=1)
    """Most likely tokens of each position that the engine reports, where a part needs a top-K divergence."""
    missing: Literal["neutral", "drop"] = "neutral"
    """A token whose logprob the sampler did not report (NaN), where a part reads it. neutral: its ratios are 1, as TRL has it; it is
    trained without a correction and counts in every denominator. Samplers lose the logprobs of nearly certain tokens, where ratios are
    near 1 anyway. drop: it is left out, and so are turns and sequences about whose whole a part decides: if 1 % of tokens miss
    theirs, 87 % of the answers of 200 tokens."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Entropy bonus: this times the mean entropy is subtracted from the loss."""
    modulation: ModulationConfig = ModulationConfig()
    """Experiments only."""
