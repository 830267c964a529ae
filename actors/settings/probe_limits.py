"""By how much engine and learner usually differ at equal weights, by the type of their numbers and the depth of the model; and by how much
they may differ in the probe of a weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenkeel.actors.config import RunConfig

# Nats, see usual_difference. Measured on a CPU, where an engine in bfloat16 rounds after each operator: SmolLM2-135M-Instruct (30 layers)
# has medians of 0.033 to 0.063, the nano model (3 layers) 0.002 to 0.007. On GPUs, by public comparisons of SGLang or vLLM with Megatron:
# means of 0.008 (Qwen3-8B, 36 layers) to 0.03 nats (DeepSeek-V3, 61 layers). float16 has three bits more, and so an eighth.
_OF_A_LAYER = {"float32": 2e-6, "bfloat16": 0.01, "float16": 0.00125}
# Limit as a multiple of what is usual. In float32 a missing update moves logprobs by a thousand times as much as rounding.
_FACTOR = {"float32": 30.0, "bfloat16": 3.0, "float16": 3.0}
# Limit as a multiple of what this model's engines differ by, once that is known. It gets sharper by this factor at most.
_AFTER = 3.0
# The largest difference of a prompt's tokens as a multiple of the median: 4 to 14 in the same measurements.
_TAIL = 10.0
# The largest difference where engines have float8 projections.
_FLOAT8 = 2.0
UNKNOWN_LAYERS = 32
"""Depth that is taken before the model is known."""


def usual_difference(dtype: str, layers: int) -> float:
    """Median of the nats by which a prompt's logprobs may well differ between an engine and a learner that are healthy, at equal weights:
    that of the models that were seen to differ most. The layers' errors add up like a random walk.

    Args: dtype: of the weights.
    """
    return float(_OF_A_LAYER[dtype] * layers**0.5)


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Nats by which logprobs of a prompt may differ between engine and learner at equal weights."""

    largest: float
    """Difference at any token."""
    median: float
    """Limit at half of the tokens: a difference at so many tokens is no accident of rounding."""

    @classmethod
    def of(cls, dtype: str, layers: int = UNKNOWN_LAYERS) -> ProbeLimits:
        """The limits for weights of a type in a model of so many layers."""
        return cls._around(_FACTOR[dtype] * usual_difference(dtype, layers))

    @classmethod
    def derived(cls, config: RunConfig, layers: int = UNKNOWN_LAYERS) -> ProbeLimits:
        """The limits of a run whose recipe has none.

        Engines with float8 projections (rollout.engine.quantization) have wider ones. Measured on a CPU: the nano model's answers have a
        median of 0.01 and a largest of 0.06 nats, random models of two layers 0.1 and 0.4. Routers that choose other experts need none:
        trained for 200 steps on text, a model of four layers has 0.013 and 0.13, its like with 16 experts, 4 of them a token, 0.013 and
        0.24. One token in ten had another expert in some layer, with a median of 0.026; the others have 0.012. A choice flips between
        experts of nearly equal weight, the least of those that are added.
        """
        return cls._around(_FLOAT8 / _TAIL) if config.rollout.engine.has_float8 else cls.of(config.learner.resolved_dtype, layers)

    @classmethod
    def of_run(cls, config: RunConfig) -> ProbeLimits:
        """The limits of a run. What a recipe gives for any token holds alone."""
        sync = config.weight_sync
        if sync.max_probe_difference is None:
            return cls.derived(config)
        return cls(sync.max_probe_difference, sync.max_probe_median or float("inf"))

    @classmethod
    def _around(cls, median: float) -> ProbeLimits:
        return cls(_TAIL * median, median)

    def are_kept(self, largest: float, median: float) -> bool:
        """Whether a probe's differences are within the limits; what is not a number is not."""
        return largest <= self.largest and median <= self.median

    def after(self, largest: float, median: float) -> ProbeLimits:
        """The limits for later versions, once engines are seen to differ by so much at weights that are known to be equal.

        Measured with SmolLM2 in bfloat16 (median 0.05, largest 0.45): one projection of 210 whose rows are reversed has 0.6 to 2.4 and 4.2
        to 13, one that is zero or lacks updates as large as itself 0.2 to 2 and 1.9 to 7.8. Updates a tenth as large, or two rows that are
        swapped, are hidden by rounding.
        """
        if not isfinite(self.median):  # the recipe's limit
            return self
        return ProbeLimits(max(self.largest / _AFTER, _AFTER * largest), max(self.median / _AFTER, _AFTER * median))
