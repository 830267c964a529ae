"""By how much engine and learner may differ at equal weights, by the type of their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.config import RunConfig


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Nats by which logprobs of a prompt may differ between engine and learner at equal weights."""

    largest: float
    """At any token."""
    median: float
    """Limit at half of the tokens: a difference at so many tokens is no accident of rounding."""

    @classmethod
    def of(cls, dtype: str, largest: float | None = None) -> ProbeLimits:
        """The limits for weights of a type; `largest`: the configured one, which then holds alone.

        bfloat16: public comparisons of SGLang or vLLM with Megatron have means of 0.008 (Qwen3-8B, largest 0.24) to 0.03 nats (DeepSeek-V3,
        largest 0.1). float16 has three bits more, and so an eighth.
        """
        if largest is not None:
            return cls(largest, float("inf"))
        return {"float32": cls(1e-3, float("inf")), "bfloat16": cls(0.5, 0.02), "float16": cls(0.0625, 0.0025)}[dtype]

    @classmethod
    def of_run(cls, config: RunConfig) -> ProbeLimits:
        """The limits of a run. Engines with float8 projections (rollout.engine.quantization) have wider ones than the learner's type alone.

        Measured on a CPU: the nano model's answers have a median of 0.01 and a largest of 0.06 nats, random models of two layers 0.1
        and 0.4. Routers that choose other experts need no wider limits: trained for 200 steps on text, a model of four layers has 0.013
        and 0.13, its like with 16 experts, 4 of them a token, 0.013 and 0.24. One token in ten had another expert in some layer, with a
        median of 0.026; the others have 0.012. A choice flips between experts of nearly equal weight, the least of those that are added.
        """
        limit = given_limit(config)
        if config.rollout.engine.has_float8 and limit is None:
            return cls(2.0, 0.2)
        return cls.of(config.learner.resolved_dtype, limit)


def given_limit(config: RunConfig) -> float | None:
    """weight_sync.max_probe_difference, nats, if the recipe has it; a derived one is only the first of the limits above."""
    sync = config.weight_sync
    return sync.max_probe_difference if sync.is_given("max_probe_difference") else None
