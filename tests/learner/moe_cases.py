"""A tiny mixture of experts, and what Hugging Face says of its router and experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from tests.learner.learner_cases import VOCAB, hf_values
from tests.tiny_models import save_tiny_model

EXPERTS, TOPK, LAYERS = 8, 2, 2


def save_moe(folder: Path, *, seed: int = 0, **shape: Any) -> Path:
    """As learner_cases.save_model, with 8 experts of which a token takes 2."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256, "pad_token_id": None}
    return save_tiny_model(folder, "qwen3_moe", tie=False, seed=seed, **{**sizes, **shape})


def expert_gradients(model: Any) -> dict[str, Tensor]:
    """Gradients by the names in files: transformers holds a layer's experts in one tensor, files hold them one by one."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        base, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj"):
            found[name] = parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            parts = zip(("gate_proj", "up_proj"), gradient.chunk(2), strict=True) if leaf == "gate_up_proj" else [(leaf, gradient)]
            found |= {f"{base}.{expert}.{part}.weight": piece for part, piece in parts}
    return found


def router_logits(model: Any, batch: PackedBatch, read: Sequence[int]) -> list[Tensor]:
    """For each layer [R, E] with gradient: of the first `read[i]` tokens of each sequence."""
    rows: list[list[Tensor]] = [[] for _ in model.model.layers]
    for (start, _), count in zip(itertools.pairwise(batch.offsets.tolist()), read, strict=True):
        logits = model(batch.token_ids[None, start : start + count], output_router_logits=True).router_logits
        for layer, found in zip(rows, logits, strict=True):
            layer.append(found)
    return [torch.cat(layer) for layer in rows]


def random_routes(batch: PackedBatch, seed: int = 0) -> Tensor:
    """[N, layers, k] uint8: anything but what a router would choose; alike at the tokens of prompts, as an engine's are."""
    generator = torch.Generator().manual_seed(seed)
    of_token = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(VOCAB * LAYERS)]).view(VOCAB, LAYERS, TOPK)
    return of_token[batch.token_ids].to(torch.uint8)


@contextmanager
def replayed(model: Any, routes: Tensor) -> Iterator[None]:
    """Hugging Face's model sending each token of a sequence to the given experts, [L, layers, k], one sequence at a time."""
    own = [layer.mlp.gate.forward for layer in model.model.layers]

    def forward_of(gate: Any, chosen: Tensor) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.t()
            scores = logits.softmax(-1).gather(1, chosen[: len(logits)])
            if gate.norm_topk_prob:
                scores = scores / scores.sum(-1, keepdim=True)
            return logits, scores, chosen[: len(logits)]

        return forward

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.forward = forward_of(layer.mlp.gate, routes[:, number].long())
    try:
        yield
    finally:
        for layer, forward in zip(model.model.layers, own, strict=True):
            layer.mlp.gate.forward = forward


def replayed_logprobs(model: Any, batch: PackedBatch) -> Tensor:
    """[N] with gradient, 0 outside the loss mask: hf_values under the batch's routed experts."""
    assert batch.routed_experts is not None
    bounds = list(itertools.pairwise(batch.offsets.tolist()))
    pieces = []
    for i, (start, end) in enumerate(bounds):
        with replayed(model, batch.routed_experts[start:end]):
            pieces.append(hf_values(model, batch.select([i]))[0])
    return torch.cat(pieces)
