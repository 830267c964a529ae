"""A supervised start: cross-entropy on demonstrations through the learner itself, so that RL begins with a policy that can be right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from evenkeel.correction.errors import DataError
from evenkeel.correction.settings.base import Settings
from evenkeel.learner.results import EncodedDemonstration

if TYPE_CHECKING:  # settings are read where neither torch nor Megatron is wanted
    from torch import Tensor

    from evenkeel.learner.learner_rank import LearnerRank


class WarmupConfig(Settings):
    """How long the supervised start is."""

    steps: int = Field(default=90, ge=0, le=10**9)
    """Optimizer steps."""
    sequences_per_step: int = Field(default=64, ge=1, le=10**6)
    """Demonstrations in each step, over all ranks."""
    seed: int = 0
    """Seed of the order of the demonstrations."""


def pack_demonstrations(demonstrations: Sequence[EncodedDemonstration]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [N], offsets [S + 1] and loss mask [N], True on the answers.

    Raises: DataError if a demonstration has no prompt or no answer.
    """
    import torch

    for i, one in enumerate(demonstrations):
        if not one.prompt_ids or not one.answer_ids:
            raise DataError(
                f"demonstration {i}: {len(one.prompt_ids)} prompt and {len(one.answer_ids)} answer tokens; both need at least one"
            )
    ids = [token for one in demonstrations for token in (*one.prompt_ids, *one.answer_ids)]
    mask = [is_answer for one in demonstrations for is_answer in [False] * len(one.prompt_ids) + [True] * len(one.answer_ids)]
    lengths = torch.tensor([0] + [len(one.prompt_ids) + len(one.answer_ids) for one in demonstrations])
    return torch.tensor(ids), lengths.cumsum(0), torch.tensor(mask)


def warm_up(
    learner: LearnerRank,
    demonstrations: Sequence[EncodedDemonstration],
    config: WarmupConfig,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train on demonstrations in a random order, repeated as often as the steps need. Every rank calls with the same ones.

    Args:
        on_step: called after each step with its number, from 0, and its loss.
    Returns: the loss of each step, nats per answer token.
    Raises: DataError without demonstrations.
    """
    if not demonstrations:
        raise DataError("warm_up: no demonstrations")
    order = _endless_order(len(demonstrations), config.seed)
    losses = []
    for step in range(config.steps):
        chosen = [demonstrations[next(order)] for _ in range(config.sequences_per_step)]
        losses.append(learner.supervised_step(*pack_demonstrations(chosen)))
        if on_step:
            on_step(step, losses[-1])
    return losses


def _endless_order(count: int, seed: int) -> Iterator[int]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
