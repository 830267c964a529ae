"""When each part of a correction runs: `Schedule.of` decides it, for a config and a way of preparing the batch.

A part is early if it needs only mu and pi_prox: it runs in the correction service. It is late if it needs pi_theta, or a proximal policy
that exists only inside the training forward: it runs there, by the same functions. In a deferred batch (`defer`) pi_prox is the detached
pi_theta, so that every part on it is late.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..errors import ConfigError
from .choices import TOPK_STATISTICS, Count, DenominatorKind, Population, ProximalSource, Ratio, Statistic, WeightMode
from .parts import CorrectionSettings, CriterionConfig, gate_of


class Stage(enum.Enum):
    """When a part runs."""

    EARLY = "early"
    """The correction service, before training: mu and pi_prox are known."""
    LATE = "late"
    """Inside the training forward, where pi_theta is known."""


def effective_ratio(ratio: Ratio, config: CorrectionSettings) -> Ratio:
    """The ratio that a part really sees: in bypass rho would be 1, so it means q, and r is q."""
    return Ratio.Q if config.proximal is ProximalSource.BEHAVIOR else ratio


@dataclass(frozen=True, slots=True)
class Schedule:
    """The stage of each part; None where a part is off."""

    proximal: Stage
    """From when on log pi_prox is known."""
    criteria: tuple[Stage, ...]
    """One for each criterion of rejection, in the config's order."""
    veto: Stage | None
    importance: Stage | None
    """Importance weights."""
    normalization: Stage | None
    """The mean weight: late where it is known only after the forward of the whole batch."""
    kept_count: Stage | None
    """The kept tokens that the denominator counts; None: it counts the original ones."""

    @classmethod
    def of(cls, config: CorrectionSettings, *, is_deferred: bool) -> Schedule:
        """The one place where this is decided.

        Args:
            is_deferred: a proximal policy that is to be recomputed is the detached target of the training forward.
        """
        recomputes = config.proximal is ProximalSource.RECOMPUTE
        waits_for_forward = (is_deferred and recomputes) or config.proximal is ProximalSource.INTERPOLATE
        proximal = Stage.LATE if waits_for_forward else Stage.EARLY

        def stage_on(ratio: Ratio) -> Stage:
            return Stage.LATE if effective_ratio(ratio, config).has_target else proximal

        criteria = tuple(stage_on(criterion.ratio) for criterion in config.rejection)
        veto = importance = normalization = kept_count = None
        if config.veto is not None:  # a probability under mu (bypass) is known early
            veto = proximal if config.veto.quantity == "probability" else stage_on(config.veto.ratio)
        rejection = Stage.LATE if Stage.LATE in (*criteria, veto) else Stage.EARLY
        if config.importance.mode is not WeightMode.OFF:
            importance = stage_on(config.importance.ratio)
            if config.normalize.population is Population.KEPT:
                normalization = Stage.LATE if Stage.LATE in (importance, rejection) else Stage.EARLY
            elif config.normalize.population is Population.ALL:
                normalization = importance
        if config.denominator.count is Count.KEPT:
            kept_count = Stage.LATE if config.covariance is not None and config.covariance.action == "drop" else rejection
        return cls(proximal, criteria, veto, importance, normalization, kept_count)

    @property
    def has_factor(self) -> bool:
        """Whether the gradient has to be multiplied by a number of the whole batch that is known only after its last forward."""
        return Stage.LATE in (self.normalization, self.kept_count)


def fold_obstacle(config: CorrectionSettings, *, is_deferred: bool, has_auxiliary_loss: bool = False) -> str | None:
    """Why late batch-wide quantities can't be applied as one factor on the gradient (needs_gradient_factor); None if they can, or if there
    are none."""
    schedule = Schedule.of(config, is_deferred=is_deferred)
    if is_deferred and second_moments(config, schedule, Stage.LATE):
        return "the threshold of second_moment depends on all tokens of the batch"
    if is_deferred and config.covariance is not None:
        return "a choice by covariance depends on all tokens of the batch"
    if schedule.kept_count is Stage.LATE and config.denominator.kind in (DenominatorKind.PROMPT_MEAN, DenominatorKind.ROLLOUT_MEAN):
        return "kept counts of groups or rollouts are no single factor"
    adds_terms = config.kl.coefficient > 0 or config.entropy_coefficient > 0
    if schedule.has_factor and (adds_terms or has_auxiliary_loss):
        return "normaliser or kept count would also scale the KL, entropy or auxiliary term"
    return None


def second_moments(config: CorrectionSettings, schedule: Schedule, stage: Stage) -> list[CriterionConfig]:
    """Criteria of second_moment of a stage: the early look at all tokens of the batch together, the late at all of an optimizer step."""
    pairs = zip(config.rejection, schedule.criteria, strict=True)
    return [criterion for criterion, its in pairs if criterion.statistic is Statistic.SECOND_MOMENT and its is stage]


def needs_step_forward(config: CorrectionSettings) -> bool:
    """True if an optimizer step needs a forward pass of its own before its first micro-batch, whose logprobs `settle` is given.

    So it is where the threshold of second_moment is on the target policy, as in M2PO, and where tokens are chosen by covariance. In a
    batch's first step it is the proximal forward.
    """
    return config.covariance is not None or bool(second_moments(config, Schedule.of(config, is_deferred=False), Stage.LATE))


def needs_gradient_factor(config: CorrectionSettings, *, is_deferred: bool = False) -> bool:
    """True if the gradient of a batch must be multiplied by `policy_scale` after the last backward pass, before it is clipped and applied.

    So it is where the mean weight or the kept count is known only after the forward of the whole batch. A trainer without a place between
    backward and optimizer can't train so: see `check_without_gradient_factor`.
    Args:
        is_deferred: the batch comes from `defer`, not from `correct`.
    """
    return Schedule.of(config, is_deferred=is_deferred).has_factor


def check_without_gradient_factor(config: CorrectionSettings, *, is_deferred: bool = False) -> None:
    """Check for trainers that have no place between backward pass and optimizer step, nor before a step's first micro-batch, as TRL's.

    Raises: ConfigError if the config needs `policy_scale` there; without it the loss would be of the wrong size, silently. Also if it
        needs `settle` (needs_step_forward) or scales the learning rate (step_size_factor).
    """
    if config.covariance is not None:
        raise ConfigError(
            "covariance: its choice is of all tokens of an optimizer step, under its target policy: it takes a forward pass before the "
            "first micro-batch, and this trainer has none. Set covariance: null."
        )
    if needs_step_forward(config):
        raise ConfigError(
            "this correction's threshold of second_moment is on the target policy, over all tokens of an optimizer step: it takes a "
            "forward pass before the first micro-batch, and this trainer has none. Take preset: m2po-areal, which decides on the proximal "
            "policy."
        )
    if config.step_size.by != "off":
        raise ConfigError(
            f"step_size.by = {config.step_size.by}: the factor on the learning rate (step_size_factor) is known only after the last "
            "backward pass, and this trainer has no place for it. Set step_size.by: off."
        )
    if not needs_gradient_factor(config, is_deferred=is_deferred):
        return
    remedies = ["normalize.population: off", "denominator.count: original"]
    if is_deferred and not needs_gradient_factor(config):
        remedies = ["proximal logprobs and correct() instead of defer()"]
    raise ConfigError(
        "this correction multiplies the gradient by policy_scale after the backward pass, since its mean weight or kept count is known "
        f"only then, and this trainer has no place for that. Take {', or '.join(remedies)}."
    )


def ratios_of(config: CorrectionSettings) -> list[Ratio]:
    """The ratios that parts look at, as the settings name them."""
    objective, gate, penalty = config.objective, gate_of(config.objective), config.kl
    ratios = [criterion.ratio for criterion in config.rejection]
    if config.importance.mode is not WeightMode.OFF:
        ratios.append(config.importance.ratio)
    if objective.ratio is not None:
        ratios.append(objective.ratio)
    if gate is not None:
        ratios.append(gate.ratio)
    if penalty.coefficient > 0 and penalty.estimator == "unbiased_k3":
        ratios.append(penalty.ratio)
    if config.veto is not None and config.veto.quantity == "ratio":
        ratios.append(config.veto.ratio)
    if config.covariance is not None and config.covariance.action == "penalty":
        ratios.append(Ratio.R)
    if config.step_size.by == "ess":
        ratios.append(Ratio.Q)
    return ratios


def policies_read(config: CorrectionSettings) -> frozenset[str]:
    """Whose logprobs some part reads: of behavior, at_sampling, proximal, target and reference. The one place where this is decided.

    In bypass the proximal policy is the behaviour policy, and an interpolated one is made of that and the target: then it isn't among them.
    """
    objective, gate, penalty = config.objective, gate_of(config.objective), config.kl
    read = {"target"}.union(*(effective_ratio(ratio, config).policies for ratio in ratios_of(config)))
    if "at_sampling" in read:
        read.add("proximal")  # which it is for tokens of the present weights
    if penalty.coefficient > 0:
        read.add(penalty.anchor)
    if (config.veto is not None and config.veto.quantity == "probability") or config.modulation.probability_below is not None:
        read.add("proximal")
    if getattr(objective, "relax", None) is not None or getattr(gate, "relax", None) is not None:
        read.add("behavior")
    if "proximal" in read and config.proximal is not ProximalSource.RECOMPUTE:
        read = (read - {"proximal"}) | {"behavior"}
    return frozenset(read)


def uses_proximal(config: CorrectionSettings) -> bool:
    """True if some part compares with the proximal policy; otherwise a forward for it would be for nothing."""
    return "proximal" in policies_read(config)


def needs_logprobs_at_sampling(config: CorrectionSettings) -> bool:
    """True if some part tells mismatch and staleness apart, for which earlier weights have to say what they make of their tokens."""
    return "at_sampling" in policies_read(config)


def needs_reference_logprobs(config: CorrectionSettings) -> bool:
    """True if the loss reads the frozen reference policy: a KL penalty whose anchor it is, not the behaviour or the proximal policy."""
    return config.kl.coefficient > 0 and config.kl.anchor == "reference"


def needs_topk(config: CorrectionSettings) -> int:
    """How many tokens' logprobs the engine must report at each position, and the learner look up; 0 where no part needs them."""
    statistics = [criterion.statistic for criterion in config.rejection]
    if (gate := gate_of(config.objective)) is not None and gate.kind == "divergence":
        statistics.append(gate.divergence)
    return config.topk if any(statistic in TOPK_STATISTICS for statistic in statistics) else 0


def needs_proximal_forward(config: CorrectionSettings, optimizer_steps_per_batch: int, *, has_auxiliary_loss: bool = False) -> bool:
    """True if the learner must compute proximal logprobs in a forward of their own, before the step.

    With one optimizer step per batch the detached current logprobs are the proximal ones, and the batch can be deferred; unless
    a global quantity is no single factor on the gradient (M2PO's threshold, for which this is the first step's forward, kept counts of
    groups, or any factor on a loss of several terms).
    Args:
        has_auxiliary_loss: the model adds a loss of its own (MoE balancing), which a factor on the gradient would scale too.
    """
    if config.proximal is not ProximalSource.RECOMPUTE or not (uses_proximal(config) or needs_step_forward(config)):
        return False
    if optimizer_steps_per_batch > 1:
        return True
    return fold_obstacle(config, is_deferred=True, has_auxiliary_loss=has_auxiliary_loss) is not None


def defers(config: CorrectionSettings, optimizer_steps_per_batch: int, *, has_auxiliary_loss: bool = False) -> bool:
    """True if the batches of a run are deferred: the training forward itself gives their proximal logprobs, which are to be recomputed.

    Args: as for `needs_proximal_forward`.
    """
    is_alone = config.proximal is ProximalSource.RECOMPUTE and optimizer_steps_per_batch == 1
    return is_alone and not needs_proximal_forward(config, optimizer_steps_per_batch, has_auxiliary_loss=has_auxiliary_loss)
