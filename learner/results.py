"""The learner's results, and the worked examples that its warm-up takes. The driver and the correction service read them and don't need
Megatron, so it is not imported here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from evenkeel.correction.batch import FinalDecision
    from evenkeel.correction.config import CorrectionConfig
    from evenkeel.correction.wide import WidePlace


@dataclass(frozen=True, slots=True)
class StepValues:
    """What a step computed for its batch's N tokens."""

    target_logprobs: Tensor
    """[N] float32, CPU: log pi_theta of each trained token in the first forward pass that it was in, 0 elsewhere. With one optimizer
    step per batch these are the weights from which the update starts: the proximal policy."""
    decided: FinalDecision
    """What the batch was trained with, in those same forward passes: [N] on the CPU, batch normalisation included."""
    entropies: Tensor
    """[N] float32, CPU: that of each trained token, 0 elsewhere."""


class SkipReason(StrEnum):
    """Why an update was not made."""

    NOT_FINITE = "not_finite"
    """Loss or gradient was not finite."""
    OVERFLOW = "overflow"
    """A float16 gradient overflowed under the loss scale: part of finding the scale, no fault of the batch."""
    NO_GRADIENT = "no_gradient"
    """The gradient was 0 everywhere: no token was left to train on, or the advantages of all were 0."""


class ParameterGroup(StrEnum):
    """A group of parameters whose gradient has a norm of its own."""

    ROUTER = "router"
    NORMS = "norms"
    ATTENTION = "attention"
    MLP = "mlp"
    """Experts included."""
    EMBEDDING = "embedding"
    """The embedding, with a head that is tied to it."""
    LM_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one batch did to the weights. Equal on all ranks."""

    step: int
    """The caller's number of this batch."""
    loss: float
    """Mean over the optimizer steps of the batch's loss."""
    metrics: dict[str, float]
    """The objective's own numbers (correction.loss_metrics), from sums over all optimizer steps: of all passes over the batch."""
    values: Any
    """StepValues; where the result is another process's, a reference to them."""
    entropy: float | None
    """Mean over trained tokens in nats, in those same forward passes; None if no token is trained."""
    grad_norms: tuple[float, ...]
    """Norm of the whole gradient before clipping, for each optimizer step whose gradient did not overflow."""
    group_norms: dict[str, float]
    """Norm of the gradient of each ParameterGroup before clipping, mean over those optimizer steps; not
    finite where a skipped step's was not."""
    learning_rate: float
    """Learning rate of the last update."""
    tokens: int
    """Tokens in the batch, prompts included."""
    trained_tokens: int
    """Tokens in the loss mask."""
    kept_tokens: int
    """Trained tokens that were left in the loss at their first forward pass; 0: all were rejected."""
    broken_tokens: int
    """Trained tokens with a value that was not finite in that pass."""
    optimizer_steps: int
    """Updates made."""
    skipped: tuple[SkipReason, ...]
    """The reason of each update that was not made."""
    loss_scale: float | None
    """Loss scale of the next update; None in other types than float16."""
    microbatches: int
    """Forward and backward passes of this rank."""
    routing_agreement: float | None
    """Share of tokens and layers, in those same forward passes, in which the learner's routers chose the experts that were replayed."""

    @classmethod
    def of_nothing(
        cls, step: int, correction: CorrectionConfig, *, updates: int, learning_rate: float, loss_scale: float | None
    ) -> StepResult:
        """The result of a batch without tokens (every answer was left out): no update is made.

        Args:
            updates: number of updates that a batch has; all are skipped.
            learning_rate, loss_scale: the optimizer's.
        """
        import torch

        from evenkeel.correction.batch import FinalDecision
        from evenkeel.correction.decision import no_counts

        empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
        return cls(
            step=step,
            loss=0.0,
            metrics={},
            values=StepValues(empty, FinalDecision(none, empty, no_counts(correction, empty.device), empty, none, empty), empty),
            entropy=None,
            grad_norms=(0.0,) * updates,
            group_norms={},
            learning_rate=learning_rate,
            tokens=0,
            trained_tokens=0,
            kept_tokens=0,
            broken_tokens=0,
            optimizer_steps=0,
            skipped=(SkipReason.NO_GRADIENT,) * updates,
            loss_scale=loss_scale,
            microbatches=0,
            routing_agreement=None,
        )

    @property
    def skipped_steps(self) -> int:
        """Updates not made."""
        return len(self.skipped)

    @property
    def overflowed_steps(self) -> int:
        """Updates not made because the gradient overflowed under the loss scale."""
        return self.skipped.count(SkipReason.OVERFLOW)

    @property
    def target_logprobs(self) -> Tensor:
        return self.values.target_logprobs  # type: ignore[no-any-return]

    @property
    def decided(self) -> FinalDecision:
        return self.values.decided  # type: ignore[no-any-return]

    @property
    def grad_norm(self) -> float | None:
        """Mean over the optimizer steps; not finite if one was skipped for that reason, None if the gradients of all overflowed."""
        if not self.grad_norms:
            return None
        return math.fsum(self.grad_norms) / len(self.grad_norms) if all(map(math.isfinite, self.grad_norms)) else math.nan


@dataclass(frozen=True, slots=True)
class SplitLogprobs:
    """Logprobs of a batch's N tokens, by which the gap of stale ones is split into mismatch and staleness."""

    at_sampling: Tensor
    """[N] float32, CPU, nats: of each trained token at the weights that sampled it; NaN where no copy of them is kept."""
    now: Tensor | None
    """[N] float32, CPU, nats: at the weights from which the update starts; None: not asked for."""


@dataclass(frozen=True, slots=True)
class Proximal:
    """A forward pass over a batch at the weights from which its update starts."""

    logprobs: Tensor
    """[N] float32, CPU, as learner.learner_rank.LearnerRank.logprobs."""
    routed_experts: Tensor | None
    """[N, layers, k], CPU: where the tokens were sent, if training is to follow; None in an answer from another process."""
    routing_agreement: float | None
    """Agreement as of StepResult."""
    route_places: tuple[WidePlace, ...] | None = None
    """[S] from another process: where the routed experts of each sequence are."""


@dataclass(frozen=True, slots=True)
class EncodedDemonstration:
    """A prompt with the answer that is to be imitated."""

    prompt_ids: tuple[int, ...]
    """Ids with the generation prompt; at least one token."""
    answer_ids: tuple[int, ...]
    """Ids with the end-of-sequence token."""
