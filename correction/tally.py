"""What rejection, veto and bounds did, as sums that add up over the parts of a batch."""

from __future__ import annotations

import itertools

from torch import Tensor

from correction.batch import CorrectedBatch
from correction.config import CorrectionConfig
from correction.decision import PASSED, Scene, decide, decision_sums, make_scene
from correction.errors import DataError
from correction.loss import training_scene
from correction.ratios import Logprobs, ProximalSource
from correction.segments import Level, masked

Sums = dict[str, float]
LARGEST_WEIGHT = "largest_weight"
"""The one entry that is no sum: parts are joined by their maximum."""


def tally(
    known: Scene,
    corrected: CorrectedBatch,
    target: Tensor | None,
    config: CorrectionConfig | None,
    entropy: Tensor | None,
    settled: Sums | None = None,
) -> Sums:
    """Sums over whole sequences. An entry is missing where nothing was decided or counted.

    Args:
        known: the scene of these sequences with all that is known now; corrected: of these sequences.
        target, entropy: [N].
        settled: sums of the early decisions, if they are known; else they are made once more.
    """
    loss_mask, advantages = known.batch.loss_mask, known.batch.advantages
    keep, weights, sums = _final_decision(known, corrected, target, config, settled)
    kept_weights = masked(weights, keep)
    heaviest, kept_weights = kept_weights.max() if keep.numel() else 0.0, kept_weights.double()
    sequences = known.levels.at(Level.SEQUENCE)
    sums |= {
        "tokens": int(loss_mask.count_nonzero()),
        "finite": int(known.mask.count_nonzero()),
        "kept": int(keep.count_nonzero()),
        "sequences": int(sequences.any(loss_mask).count_nonzero()),
        "kept_sequences": int(sequences.any(keep).count_nonzero()),
        "weight": float(kept_weights.sum()),
        "weight_square": float(kept_weights.dot(kept_weights)),
        LARGEST_WEIGHT: float(heaviest),
    }
    for name, side in (("positive", advantages > 0), ("negative", advantages < 0)):
        sums |= {name: int((side & loss_mask).count_nonzero()), f"kept_{name}": int((side & keep).count_nonzero())}
    return sums | _dropped(known, loss_mask & ~keep & known.mask, entropy)


def joined(parts: list[Sums]) -> Sums:
    """The sums of all parts together."""
    total: Sums = {}
    for part in parts:
        for name, value in part.items():
            old = total.get(name, 0)
            total[name] = max(old, value) if name == LARGEST_WEIGHT else old + value
    return total


def rejection_numbers(sums: Sums) -> dict[str, float]:
    """The numbers about weights and rejection of diagnostics.DIAGNOSTICS, from the sums of the whole batch."""
    tokens, kept = sums["tokens"], sums["kept"]
    if tokens == 0:
        return {}
    numbers = {
        "kept_fraction": kept / tokens,
        "rejected_fraction": (tokens - kept) / tokens,
        "rejected_sequence_fraction": 1 - sums["kept_sequences"] / sums["sequences"],
    }
    for side in ("positive", "negative"):
        if sums[side] > 0:
            numbers[f"rejected_fraction_{side}"] = (sums[side] - sums[f"kept_{side}"]) / sums[side]
    for name, passed in sums.items():
        if name.startswith(PASSED):
            numbers[f"rejected_by_{name.split(':')[2]}"] = (sums["finite"] - passed) / max(sums["finite"], 1)
    if sums.get("units", 0) > 0:
        for name, side in itertools.product(("truncated", "masked"), ("", "_positive", "_negative")):
            numbers[f"{name}_fraction{side}"] = sums[f"{name}{side}"] / sums["units"]
    for name in ("probability", "entropy"):
        if f"dropped_{name}" in sums and sums["dropped"] > 0:
            numbers[f"rejected_{name}_mean"] = sums[f"dropped_{name}"] / sums["dropped"]
    if kept > 0:
        mean, square = sums["weight"] / kept, sums["weight_square"] / kept
        numbers |= {"importance_weight_mean": mean, "importance_weight_max": sums[LARGEST_WEIGHT]}
        if square > 0:
            numbers["importance_weight_ess"] = mean**2 / square
    return numbers


def _dropped(known: Scene, dropped: Tensor, entropy: Tensor | None) -> Sums:
    """Sums over the dropped tokens [N bool], which are few."""
    index = dropped.nonzero().squeeze(1)
    sums: Sums = {"dropped": index.numel()}
    if known.logprobs.proximal is not None:
        sums["dropped_probability"] = float(known.logprobs.proximal[index].double().exp().sum())
    if entropy is not None:
        sums["dropped_entropy"] = float(entropy.detach()[index].double().sum())
    return sums


def _final_decision(
    known: Scene, corrected: CorrectedBatch, target: Tensor | None, config: CorrectionConfig | None, settled: Sums | None
) -> tuple[Tensor, Tensor, Sums]:
    """(keep [N], weights [N], sums of the decisions), late parts included if the target is known and they need no top-K table."""
    weights, keep = corrected.importance_weights, corrected.keep_mask
    passes = ([False] if settled is None else []) + ([] if target is None else [True])
    sums: Sums = dict(settled or {})
    if config is None or not passes:
        return keep, weights, sums
    scene = _decided_scene(known, corrected, target, config)
    for late in passes:
        try:
            decision = decide(scene, config, late=late, is_deferred=corrected.is_deferred)
        except DataError:
            continue  # a top-K criterion without the target's table
        keep = keep & decision.keep
        weights = weights * decision.weights if late else weights
        sums |= decision_sums(scene, decision, config, late=late)
    return keep, weights, sums


def _decided_scene(known: Scene, corrected: CorrectedBatch, target: Tensor | None, config: CorrectionConfig) -> Scene:
    """The scene in which the batch was, or will be, decided; mostly the one that is known."""
    batch = corrected.batch
    if target is not None:
        is_known = config.proximal is ProximalSource.RECOMPUTE and not (corrected.is_deferred and batch.proximal_logprobs is not None)
        return known if is_known else training_scene(corrected, target, config, known.target_topk_logprobs)
    if config.proximal is ProximalSource.BEHAVIOR:
        return make_scene(batch, Logprobs(batch.behavior_logprobs, batch.behavior_logprobs, None))
    return known
