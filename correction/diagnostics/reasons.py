"""Why each token was trained as it was: what dropped it, and whether a bound cut its importance weight. For people who look at single
tokens; numbers of a batch are made in diagnose.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import CorrectedBatch, FinalDecision
from ..decision import BatchView, apply_criterion, apply_veto, no_counts, unit_advantages, unit_weights
from ..settings.choices import TOPK_STATISTICS, Statistic
from ..settings.schedule import Schedule

NOT_FINITE, OTHER = "not_finite", "other"
"""Labels beside those of the criteria: a number of the token, or of its turn or sequence, is not finite; none of those that can be told."""


@dataclass(frozen=True, slots=True)
class TokenReasons:
    """What a correction did to each token."""

    labels: tuple[str, ...]
    """Labels of the criteria, in the config's order, "veto" if there is one, NOT_FINITE and OTHER."""
    dropped_by: Tensor
    """[N] uint8: 0 if the token is kept or not trained, otherwise 1 + the place in `labels` of the first that drops it."""
    is_cut: Tensor
    """[N] bool: a bound took part of its importance weight, or all of it."""


def token_reasons(corrected: CorrectedBatch, target: Tensor, decided: FinalDecision) -> TokenReasons:
    """Say of whole sequences, all of a batch or some, why their tokens are kept or dropped, once they are trained.

    Criteria that look at all tokens of a batch together, and those that compare most likely tokens, aren't run again: what is dropped and
    no other explains is theirs, if there is one.
    Args:
        corrected: those sequences; it has the settings that corrected it.
        target: [N] log pi_theta of each token's first forward pass, nats.
        decided: what they were trained with.
    Raises: ValueError if `corrected` has no settings.
    """
    batch, config = corrected.batch, corrected.config
    if config is None:
        raise ValueError("token_reasons: the corrected batch doesn't say by which settings")
    schedule = Schedule.of(config, is_deferred=corrected.is_deferred)
    view = BatchView.of(batch, config, schedule, target=target)
    labels = (*no_counts(config).labels, NOT_FINITE, OTHER)
    dropped_by = torch.zeros(batch.num_tokens, dtype=torch.uint8)
    rest = batch.loss_mask & ~decided.keep_mask

    def explain(label: str, found: Tensor) -> None:
        nonlocal rest
        dropped_by[rest & found] = 1 + labels.index(label)
        rest = rest & ~found

    explain(NOT_FINITE, view.broken)
    untold = []
    for label, criterion in zip(labels, config.rejection, strict=False):
        if criterion.statistic is Statistic.SECOND_MOMENT or criterion.statistic in TOPK_STATISTICS:
            untold.append(label)
        else:
            explain(label, ~apply_criterion(view, criterion, config).keep)
    if config.veto is not None:
        explain("veto", ~apply_veto(view, config.veto, config).keep)
    if bool(view.broken.any()):  # a turn or a sequence goes with its token
        explain(NOT_FINITE, view.levels.sequences.spread(view.levels.sequences.any(view.broken)))
    explain(untold[0] if untold else OTHER, torch.ones_like(rest))
    is_cut = torch.zeros_like(batch.loss_mask)
    if schedule.importance is not None:
        units = unit_weights(view, config)
        is_cut = units.segments.spread(units.weights != units.ratios) & view.mask
        if config.importance.only_negative:
            is_cut &= units.segments.spread(unit_advantages(view, units.segments)) < 0
    return TokenReasons(labels, dropped_by, is_cut)
