"""What rests on the target policy of a whole optimizer step: M2PO's threshold, and tokens chosen by covariance; decided before the step's
first micro-batch.

A part on the target policy runs inside the training forward, micro-batch by micro-batch (loss.py). A threshold that depends on all tokens
of the step can't: it takes a forward pass with the weights from which the step starts, and `settle`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from .batch import CorrectedBatch
from .checks import check_same_settings, check_training_values
from .config import CorrectionConfig
from .decision import BatchView, apply_criterion
from .loss import at_least_float32, token_losses
from .settings.parts import CovarianceConfig
from .settings.schedule import Schedule, Stage, second_moments
from .shards import Reduce, moment_limits, whole_step_only
from .terms.covariance import chosen_count, drawn, largest, token_covariances, token_lots
from .terms.segments import masked


def settle(corrected: CorrectedBatch, target_logprobs: Tensor, config: CorrectionConfig, *, reduce: Reduce | None = None) -> CorrectedBatch:
    """The share of an optimizer step with what its own weights decide about all its tokens together; for other configs the share itself.

    `needs_step_forward` says for which configs it does something. With one optimizer step per batch the share is the whole batch; with
    several it is that of `for_step`, settled anew for each step.
    Args:
        target_logprobs: [N] log pi_theta under the weights from which the step starts, for a batch's first step the proximal ones. No
            gradient goes through.
        reduce: as for `correct`, if the share is one of several shards.
    Raises: DataError if target_logprobs has another shape than the tokens; ConfigError if the batch was corrected by other settings.
    """
    check_same_settings("settle", corrected.config, config)
    schedule = Schedule.of(config, is_deferred=corrected.is_deferred)
    moments = second_moments(config, schedule, Stage.LATE)
    if not moments and config.covariance is None:
        return corrected
    check_training_values("settle", corrected, target_logprobs=target_logprobs)
    view = BatchView.of(corrected.batch, config, schedule, at_least_float32(target_logprobs.detach()))
    if config.covariance is not None:
        if reduce is not None:
            raise whole_step_only()
        return replace(corrected, settled=~chosen_by_covariance(view, config, config.covariance))
    if reduce is not None:
        view = replace(view, moment_limits=moment_limits(view, moments, config, reduce))
    (criterion,) = moments  # CorrectionConfig refuses several
    return replace(corrected, settled=apply_criterion(view, criterion, config).keep)


def chosen_by_covariance(view: BatchView, config: CorrectionConfig, part: CovarianceConfig) -> Tensor:
    """[N] bool: the tokens of an optimizer step that the part acts on. Args: view: of all the step's tokens, with their target."""
    target, advantages = view.logprobs.target, view.batch.advantages
    assert target is not None  # `settle` gives it
    covariances = token_covariances(advantages, target, view.mask)
    count = chosen_count(int(view.mask.sum()), part.share)
    if part.action == "penalty":
        return largest(covariances, view.mask, count)
    is_free = view.mask & ~token_losses(view, masked(target, view.mask), config).is_clipped
    seed = hash((part.seed, view.batch.learner_version))  # of integers: the same in every process
    return drawn(token_lots(target, seed), is_free & (covariances > part.lower) & (covariances < part.upper), count)
