"""Whether a model is a mixture of experts: one answer for plan, learner and engine."""

from __future__ import annotations

DENSE_FAMILIES = ("glm4", "llama", "mistral", "olmo2", "qwen2", "qwen3")
"""By model_type: families that are trained and have no experts, whatever sizes of experts a config.json has left over."""


def expert_count(model_type: str, stated: int | None) -> int:
    """Experts of each layer; 0: the model is dense.

    Args: stated: their number in config.json; None: it has none.
    """
    return 0 if model_type in DENSE_FAMILIES else stated or 0
