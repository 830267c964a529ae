"""How long a training step has to take, by its three parts: the longest answers, the engines' throughput, the learner.

A group of version v is trained by step v + max_staleness at the latest, so that the learner waits for its longest answer while
max_staleness + 1 steps pass, whatever engines and learner could do otherwise (`actors/groups/book.py`). Speeds are assumptions,
for a first look; ten steps of a run measure them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.config import RunConfig
from actors.plan.engine_memory import engine_memory
from actors.plan.shape import ModelShape
from actors.plan.traffic import active_parameters

TOKENS_PER_S = 60.0
"""Tokens/s of one request in a full engine on a GPU: an assumption."""
MEAN_SHARE = 0.25
"""Mean length of an answer over that of the longest: an assumption (half of them below a fifth of max_tokens, one in a hundred at it)."""
MOST_ADVISED = 8
"""Versions: about as far as AReaL (arXiv 2505.24298, second-hand) trained with decoupled PPO and lost little. Nothing was measured here
beyond it, and the older a token, the more often its ratio is bounded or rejected, so that its answer teaches less."""
OPERATIONS = 4e14
"""Operations a second of a learner's GPU, 40 % of an H100's in bfloat16: an assumption. Qwen3-0.6B, which is small for it, had 0.7e14 on an
H200 with its recipe (19,300 tokens a second, layers recomputed), and 1.7e14 at best (47,500; docs/gpu.md)."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a step."""

    longest_answer_s: float
    """Of the longest answer, from its first token to its last."""
    steps: int
    """Training steps that may pass meanwhile."""
    engines_s: float
    """Seconds that the engines take for the answers of a step, if they never wait."""
    learner_s: float

    @property
    def tail_s(self) -> float:
        """Least seconds of a step because of the longest answers."""
        return self.longest_answer_s / self.steps

    @property
    def others_s(self) -> float:
        """Least seconds of a step because of the engines' throughput and the learner."""
        return max(self.engines_s, self.learner_s)

    @property
    def enough(self) -> int:
        """Smallest max_staleness at which no step waits for the longest answers; at most MOST_ADVISED."""
        return min(MOST_ADVISED, math.ceil(self.longest_answer_s / self.others_s) - 1)


def pace(shape: ModelShape, config: RunConfig, gpu_bytes: int) -> Pace:
    """Args: gpu_bytes: of an engine's GPU, whose cache bounds the requests at one time."""
    rollout, learner = config.rollout, config.learner
    longest = rollout.sampling.max_tokens
    mean = MEAN_SHARE * longest
    answers = config.groups_per_step * rollout.sampling.samples_per_group
    fit = max(1, int(engine_memory(shape, rollout, gpu_bytes).tokens / mean))
    at_once = rollout.workers * min(rollout.engine.max_running_requests, fit)
    work = 6 * active_parameters(shape) * answers * mean * learner.epochs_per_batch
    return Pace(
        longest_answer_s=longest / TOKENS_PER_S,
        steps=config.max_staleness + 1,
        engines_s=answers * mean / (at_once * TOKENS_PER_S),
        learner_s=work / (learner.world_size * learner.gpus_per_rank * OPERATIONS),
    )
