"""Operators of true on-policy, and a learner with a part of them: for real_mismatch.py; switched_engines.py has the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from evenkeel.engines.operators import silu
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model import layers
from evenkeel.learner.model.attention import PackedAttention
from evenkeel.learner.training import logprobs, step

OPERATORS = ("norms", "projections", "silu", "attention", "head", "logprobs")
"""What the mode exchanges on one side or on both: the norms are Hugging Face's in a learner on a CPU anyway, and an engine's sampler takes
log_softmax anyway. The rotary embedding is the same on both sides as it ships."""
_LINEAR = {
    layers.ColumnParallelLinear: layers.BatchInvariantColumnLinear,
    layers.RowParallelLinear: layers.BatchInvariantRowLinear,
}


class PartlyAlignedRank(LearnerRank):
    """A rank with the usual operators, some of which can be exchanged for a while. Parameters stay the same objects."""

    @contextmanager
    def aligned(self, operators: Collection[str]) -> Iterator[None]:
        """Args: operators: of OPERATORS."""
        exchanged = [(step, "pack", _with(step.pack, batch_invariant="attention" in operators))]
        is_exact = bool({"head", "logprobs"} & set(operators))
        exchanged.append((step, "head_logprobs", _with(step.head_logprobs, batch_invariant=is_exact)))
        if is_exact and "head" not in operators:
            exchanged.append((logprobs, "head_logits", _usual_head))
        if is_exact and "logprobs" not in operators:
            exchanged.append((logprobs, "log_softmax", _usual_log_softmax))
        usual = [(module, name, getattr(module, name)) for module, name, _ in exchanged]
        self._exchange(operators)
        for module, name, function in exchanged:
            setattr(module, name, function)
        try:
            yield
        finally:
            self._exchange(())
            for module, name, function in usual:
                setattr(module, name, function)

    def _exchange(self, operators: Collection[str]) -> None:
        linears = _LINEAR if "projections" in operators else {to: usual for usual, to in _LINEAR.items()}
        attention: Any = layers.BatchInvariantAttention if "attention" in operators else PackedAttention
        for policy in self._policies:
            policy.config.activation_func = silu if "silu" in operators else F.silu
            for module in policy.modules():
                if type(module) in linears:
                    module.__class__ = linears[type(module)]
                if hasattr(module, "activation_func"):
                    module.activation_func = policy.config.activation_func
            for number, layer in enumerate(policy.decoder.layers):
                layer.self_attention.core_attention = attention(policy.config, number, None, None)


def _with(function: Any, **settings: Any) -> Any:
    return lambda *arguments, **options: function(*arguments, **options | settings)


def _usual_head(hidden: Tensor, weight: Tensor) -> Tensor:
    return logprobs.scaled_logits(hidden, weight, 1.0)


def _usual_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """As the learner's usual pass computes it."""
    scaled = logits / temperature
    scaled = scaled - scaled.amax(-1, keepdim=True)
    return scaled - scaled.exp().sum(-1, keepdim=True).log()
