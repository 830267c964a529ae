"""A sample of (mu, pi_prox) pairs for the report's scatter: tokens of the recent batches, a bounded number of them.

scatter.npz holds four arrays of equal length n: behavior_logprobs and proximal_logprobs (float32, nats, of the sampled token),
staleness (int32, versions) and step (int32).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from evenkeel.actors.carriers import ScatterSample


class ScatterReservoir:
    """Keeps up to `tokens_per_step` tokens of each of the last `steps` batches."""

    def __init__(self, *, steps: int = 32, tokens_per_step: int = 256) -> None:
        self._tokens_per_step = tokens_per_step
        self._recent: deque[ScatterSample] = deque(maxlen=steps)
        self._random = np.random.default_rng(0)

    def add(self, step: int, behavior_logprobs: Tensor, proximal_logprobs: Tensor, staleness: Tensor, mask: Tensor) -> None:
        """Draw tokens from a batch.

        Args:
            step: of the batch.
            behavior_logprobs, proximal_logprobs: [N] nats.
            staleness: [N] versions.
            mask: [N] bool, tokens to draw from (trained ones).
        """
        index = torch.nonzero(mask.cpu()).flatten().numpy()
        if len(index) > self._tokens_per_step:
            index = np.sort(self._random.choice(index, self._tokens_per_step, replace=False))
        self._recent.append(
            ScatterSample(
                behavior_logprobs=_take(behavior_logprobs, index, np.float32),
                proximal_logprobs=_take(proximal_logprobs, index, np.float32),
                staleness=_take(staleness, index, np.int32),
                step=np.full(len(index), step, dtype=np.int32),
            )
        )

    def sample(self) -> ScatterSample | None:
        """Everything kept, oldest first; None before the first batch."""
        if not self._recent:
            return None
        return ScatterSample(**{name: np.concatenate([getattr(part, name) for part in self._recent]) for name in ScatterSample.__slots__})


def _take(values: Tensor, index: np.ndarray, dtype: type) -> np.ndarray:
    return np.asarray(values.detach().cpu().numpy()[index], dtype=dtype)
