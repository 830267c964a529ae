"""Which parts go together, when each can run, and which combinations are refused.

A part is early if it needs only mu and pi_prox: it runs in the correction service. It is late if it needs pi_theta, or a
proximal policy that only exists inside the training forward: it runs there, by the same functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from correction.choices import TOPK_STATISTICS, Count, DenominatorKind, Population, ProximalSource, Ratio, Statistic, WeightMode
from correction.errors import ConfigError

if TYPE_CHECKING:
    from correction.config import CorrectionConfig


def effective_ratio(ratio: Ratio, config: CorrectionConfig) -> Ratio:
    """The ratio that a part really sees: in bypass rho would be 1, so it means q, and r is q."""
    return Ratio.Q if config.proximal is ProximalSource.BEHAVIOR else ratio


def is_late(ratio: Ratio, config: CorrectionConfig, *, is_deferred: bool) -> bool:
    """True if a part on this ratio can only run inside the training forward."""
    if effective_ratio(ratio, config) is not Ratio.RHO:
        return True
    return is_deferred or config.proximal is ProximalSource.INTERPOLATE


def importance_is_late(config: CorrectionConfig, *, is_deferred: bool) -> bool:
    """True if importance weights are made inside the training forward."""
    return config.importance.mode is not WeightMode.OFF and is_late(config.importance.ratio, config, is_deferred=is_deferred)


def rejection_is_late(config: CorrectionConfig, *, is_deferred: bool) -> bool:
    """True if a criterion or the veto runs inside the training forward."""
    late = any(is_late(criterion.ratio, config, is_deferred=is_deferred) for criterion in config.rejection)
    return late or veto_is_late(config, is_deferred=is_deferred)


def veto_is_late(config: CorrectionConfig, *, is_deferred: bool) -> bool:
    """True if the veto runs inside the training forward; a probability under mu (bypass) is known early."""
    if config.veto is None:
        return False
    if config.veto.quantity == "probability":
        return is_deferred or config.proximal is ProximalSource.INTERPOLATE
    return is_late(config.veto.ratio, config, is_deferred=is_deferred)


def normalization_is_late(config: CorrectionConfig, *, is_deferred: bool) -> bool:
    """True if the mean weight is only known after the forward of the whole batch."""
    if config.normalize.population is Population.OFF or config.importance.mode is WeightMode.OFF:
        return False
    kept_late = config.normalize.population is Population.KEPT and rejection_is_late(config, is_deferred=is_deferred)
    return kept_late or importance_is_late(config, is_deferred=is_deferred)


def kept_count_is_late(config: CorrectionConfig, *, is_deferred: bool) -> bool:
    """True if the kept denominator is only known after the forward of the whole batch."""
    return config.denominator.count is Count.KEPT and rejection_is_late(config, is_deferred=is_deferred)


def adds_terms(config: CorrectionConfig) -> bool:
    """True if the loss has terms beside the policy's, which a factor on the gradient would scale too."""
    return config.kl.coefficient > 0 or config.entropy_coefficient > 0


def fold_obstacle(config: CorrectionConfig, *, is_deferred: bool, has_auxiliary_loss: bool = False) -> str | None:
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


def uses_proximal(config: CorrectionConfig) -> bool:
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


def needs_topk(config: CorrectionConfig) -> int:
    """How many tokens' logprobs the engine must report at each position, and the learner look up; 0 where no part needs them."""
    statistics = [criterion.statistic for criterion in config.rejection]
    if config.objective.kind == "score" and config.objective.gate is not None and config.objective.gate.kind == "divergence":
        statistics.append(config.objective.gate.divergence)
    return config.topk if any(statistic in TOPK_STATISTICS for statistic in statistics) else 0


def check_sense(config: CorrectionConfig) -> None:
    """Refuse combinations that would be silently wrong.

    Raises: ConfigError with the reason and the remedy.
    """
    _refuse_counting_twice(config)
    _refuse_rho_in_objective(config)
    if config.normalize.population is not Population.OFF and config.importance.mode is WeightMode.OFF:
        raise ConfigError(
            f"normalize.population = {config.normalize.population}: there are no importance weights to normalise. "
            "Set importance.mode, or normalize.population: off."
        )
    obstacle = fold_obstacle(config, is_deferred=False)
    if obstacle is not None:
        raise ConfigError(
            f"proximal = {config.proximal}: parts on the target policy run inside the training forward, but {obstacle}. "
            "Put these parts on ratio rho with proximal: recompute, or drop the term."
        )


def _refuse_counting_twice(config: CorrectionConfig) -> None:
    """An importance weight must hold no policy that the objective's ratio holds already (decision C28)."""
    if config.importance.mode is WeightMode.OFF or config.objective.ratio is None:
        return
    weight = effective_ratio(config.importance.ratio, config)
    inside = effective_ratio(config.objective.ratio, config)
    if {weight, inside} == {Ratio.RHO, Ratio.R}:
        return  # rho outside, r inside: together q, each once
    raise ConfigError(
        f"importance.ratio = {config.importance.ratio} with objective.ratio = {config.objective.ratio} and proximal = {config.proximal}: "
        f"the objective contains {inside} already, and a weight on {weight} would apply it twice. "
        "Set importance.mode: off, or proximal: recompute with a weight on rho and an objective on r, or objective {kind: score}."
    )


def _refuse_rho_in_objective(config: CorrectionConfig) -> None:
    gate = config.objective.gate if config.objective.kind == "score" else None
    if config.objective.ratio is Ratio.RHO or (gate is not None and gate.ratio is Ratio.RHO):
        raise ConfigError("objective.ratio = rho: it has no gradient, since rho does not contain the target policy. Take r or q.")


def needs_proximal_forward(config: CorrectionConfig, optimizer_steps_per_batch: int, *, has_auxiliary_loss: bool = False) -> bool:
    """True if the learner must compute proximal logprobs in a forward of their own, before the step.

    With one optimizer step per batch the detached current logprobs are the proximal ones, and the batch can be deferred; unless
    a global quantity is no single factor on the gradient (M2PO's threshold, kept counts of groups, or any factor beside another term).
    Args:
        has_auxiliary_loss: the model adds a loss of its own (MoE balancing), which a factor on the gradient would scale too.
    """
    if config.proximal is not ProximalSource.RECOMPUTE or not uses_proximal(config):
        return False
    if optimizer_steps_per_batch > 1:
        return True
    return fold_obstacle(config, is_deferred=True, has_auxiliary_loss=has_auxiliary_loss) is not None
