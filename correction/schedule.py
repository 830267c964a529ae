"""Which parts go together, when each can run, and which combinations are refused.

A part is early if it needs only mu and pi_prox: it runs in the correction service. It is late if it needs pi_theta, or a
proximal policy that only exists inside the training forward: it runs there, by the same functions.
"""

from __future__ import annotations

from correction.denominators import Count, DenominatorKind
from correction.importance import Population, WeightMode
from correction.ratios import ProximalSource, Ratio
from correction.rejection import TOPK_STATISTICS, Statistic
from correction.settings import CorrectionSettings


def effective_ratio(ratio: Ratio, config: CorrectionSettings) -> Ratio:
    """The ratio that a part really sees: in bypass rho would be 1, so it means q, and r is q."""
    return Ratio.Q if config.proximal is ProximalSource.BEHAVIOR else ratio


def is_late(ratio: Ratio, config: CorrectionSettings, *, is_deferred: bool) -> bool:
    """True if a part on this ratio can only run inside the training forward."""
    if effective_ratio(ratio, config) is not Ratio.RHO:
        return True
    return is_deferred or config.proximal is ProximalSource.INTERPOLATE


def importance_is_late(config: CorrectionSettings, *, is_deferred: bool) -> bool:
    """True if importance weights are made inside the training forward."""
    return config.importance.mode is not WeightMode.OFF and is_late(config.importance.ratio, config, is_deferred=is_deferred)


def rejection_is_late(config: CorrectionSettings, *, is_deferred: bool) -> bool:
    """True if a criterion or the veto runs inside the training forward."""
    late = any(is_late(criterion.ratio, config, is_deferred=is_deferred) for criterion in config.rejection)
    return late or veto_is_late(config, is_deferred=is_deferred)


def veto_is_late(config: CorrectionSettings, *, is_deferred: bool) -> bool:
    """True if the veto runs inside the training forward; a probability under mu (bypass) is known early."""
    if config.veto is None:
        return False
    if config.veto.quantity == "probability":
        return is_deferred or config.proximal is ProximalSource.INTERPOLATE
    return is_late(config.veto.ratio, config, is_deferred=is_deferred)


def normalization_is_late(config: CorrectionSettings, *, is_deferred: bool) -> bool:
    """True if the mean weight is only known after the forward of the whole batch."""
    if config.normalize.population is Population.OFF or config.importance.mode is WeightMode.OFF:
        return False
    kept_late = config.normalize.population is Population.KEPT and rejection_is_late(config, is_deferred=is_deferred)
    return kept_late or importance_is_late(config, is_deferred=is_deferred)


def kept_count_is_late(config: CorrectionSettings, *, is_deferred: bool) -> bool:
    """True if the kept denominator is only known after the forward of the whole batch."""
    return config.denominator.count is Count.KEPT and rejection_is_late(config, is_deferred=is_deferred)


def adds_terms(config: CorrectionSettings) -> bool:
    """True if the loss has terms beside the policy's, which a factor on the gradient would scale too."""
    return config.kl.coefficient > 0 or config.entropy_coefficient > 0


def fold_obstacle(config: CorrectionSettings, *, is_deferred: bool, has_auxiliary_loss: bool = False) -> str | None:
    """Why the late global quantities are no single factor on the gradient; None if they are."""
    for criterion in config.rejection:
        if criterion.statistic is Statistic.SECOND_MOMENT and is_late(criterion.ratio, config, is_deferred=is_deferred):
            return "the threshold of second_moment depends on all tokens of the batch"
    if kept_count_is_late(config, is_deferred=is_deferred) and config.denominator.kind is DenominatorKind.PROMPT_MEAN:
        return "kept counts of groups are no single factor"
    has_factor = normalization_is_late(config, is_deferred=is_deferred) or kept_count_is_late(config, is_deferred=is_deferred)
    if has_factor and (adds_terms(config) or has_auxiliary_loss):
        return "normaliser or kept count would also scale the KL, entropy or auxiliary term"
    return None


def uses_proximal(config: CorrectionSettings) -> bool:
    """True if some part compares with the proximal policy; otherwise a forward for it would be for nothing."""
    objective = config.objective
    ratios = [criterion.ratio for criterion in config.rejection]
    if config.importance.mode is not WeightMode.OFF:
        ratios.append(config.importance.ratio)
    if objective.ratio is not None:
        ratios.append(objective.ratio)
    if objective.kind == "score" and objective.gate is not None:
        ratios.append(objective.gate.ratio)
    if config.kl.coefficient > 0 and config.kl.estimator == "unbiased_k3":
        ratios.append(config.kl.ratio)
    veto = config.veto is not None and (config.veto.quantity == "probability" or config.veto.ratio is not Ratio.Q)
    anchored = config.kl.coefficient > 0 and config.kl.anchor == "proximal"
    return veto or anchored or config.modulation.probability_below is not None or any(ratio is not Ratio.Q for ratio in ratios)


def needs_topk(config: CorrectionSettings) -> int:
    """How many tokens' logprobs the engine must report at each position, and the learner look up; 0 where no part needs them."""
    statistics = [criterion.statistic for criterion in config.rejection]
    if config.objective.kind == "score" and config.objective.gate is not None and config.objective.gate.kind == "divergence":
        statistics.append(config.objective.gate.divergence)
    return config.topk if any(statistic in TOPK_STATISTICS for statistic in statistics) else 0
