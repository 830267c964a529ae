"""An independent forward: transformers in float32, one sequence at a time, no cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM


def tiny_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def perturbed(weights: Mapping[str, Tensor], seed: int, scale: float = 0.05) -> dict[str, Tensor]:
    """Other weights of the same shapes: far enough that logprobs differ by more than 0.1 somewhere, near enough to be sampled from."""
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + scale * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}


def hf_model(folder: Path, weights: Mapping[str, Tensor] | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if weights is not None:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        model.tie_weights()
    return model


def response_logprobs(model: Any, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """log_softmax(logits / temperature) of each response token, float64 from float32 logits."""
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits.double() / temperature, -1)
    return logprobs.gather(1, torch.tensor(response_ids)[:, None])[:, 0].tolist()


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def k3(behavior: Sequence[float], proximal: Sequence[float]) -> float:
    """Mean of exp(r) - 1 - r with r = proximal - behavior (Schulman's k3), by expm1 in float64."""
    ratios = [p - b for b, p in zip(behavior, proximal, strict=True)]
    return sum(math.expm1(r) - r for r in ratios) / len(ratios)
