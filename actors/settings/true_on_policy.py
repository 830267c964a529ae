"""True on-policy: the comparison of each batch, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from evenkeel.actors.config import OnDifference
from evenkeel.correction.errors import ActorLost, EngineError

if TYPE_CHECKING:  # read by commands that answer at once: without torch
    from evenkeel.correction.batch import PackedBatch
    from evenkeel.engines.agreement import Agreement
    from evenkeel.learner.results import StepValues


def check_batch(found: Agreement | None, on_difference: OnDifference, *, step: int) -> str:
    """Check a step's batch before the new weights go anywhere. Args: found: in the batch of the step; None: it is gone with who had it.

    Returns: what there is to say of it; empty: all is equal.
    Raises: EngineError at the first difference, if that ends the run; ActorLost then, too, if the batch is gone.
    """
    if found is None:
        lacking = f"step {step}: its batch is gone with the correction service, and can't be compared bit by bit"
        if on_difference == "stop":
            raise ActorLost(lacking)
        return lacking
    raise_on_difference(found, on_difference, step=step)
    return "" if found.first is None else f"step {step}: {describe_difference(found)}"


def compare_batch(batch: PackedBatch, values: StepValues) -> Agreement:
    """Compare the sampled logprobs of a batch with the trained ones, at the weights from which its update started.

    Args: values: of the step, which say which tokens were in a forward pass at those weights: with one optimizer step all.
    """
    from evenkeel.correction.diagnostics.diagnose import proximal_of
    from evenkeel.engines.agreement import compare

    before_update = values.decided.before_update
    if before_update is None:
        return compare(batch, values.target_logprobs)
    trained, known = proximal_of(batch, values.target_logprobs, before_update)
    return compare(batch if known is None else replace(batch, loss_mask=batch.loss_mask & known), trained)


def raise_on_difference(agreement: Agreement, on_difference: OnDifference, *, step: int) -> None:
    """Raises: EngineError naming the first token that differs, if that ends the run."""
    if agreement.first is not None and on_difference == "stop":
        raise EngineError(f"step {step}: {describe_difference(agreement)}. To go on with correction: true_on_policy_on_difference: correct")


def describe_difference(agreement: Agreement) -> str:
    """What differs, in one sentence without the full stop."""
    return (
        f"true_on_policy: {agreement.differing} of {agreement.tokens} tokens of staleness 0 have other bits in training than in sampling, "
        f"by up to {agreement.largest_difference:.3g} nats; the first is {agreement.first}"
    )


def metrics_of(agreement: Agreement) -> dict[str, float]:
    """Numbers by their names in the catalogue; without a token to compare there is no share."""
    if not agreement.tokens:
        return {"true_on_policy/tokens": 0.0}
    return {
        "true_on_policy/tokens": float(agreement.tokens),
        "true_on_policy/equal_share": agreement.equal_share,
        "true_on_policy/max_abs_difference": agreement.largest_difference,
    }
