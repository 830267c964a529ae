"""What Megatron computes, operator by operator, for the places of engines/capture.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from evenkeel.engines.capture import Capture, CapturedRows, OperatorPlace, sequence_start
from evenkeel.learner.hf.families import HeadShape
from evenkeel.learner.model.megatron import IdentityOp
from evenkeel.learner.model.model import PolicyModel
from evenkeel.learner.weights.convert import split_qkv

Head = Callable[[Tensor], Tensor]

# Megatron's module in a layer -> operator whose output is its own; of a product with a norm after it (learner/model/layers.py) the
# product's is what enters the norm.
_OUTPUTS = {
    "input_layernorm": "norm",
    "self_attention.linear_qkv": "qkv",
    "self_attention.q_layernorm": "q_norm",
    "self_attention.k_layernorm": "k_norm",
    "self_attention.core_attention": "attention",
    "self_attention.linear_proj": "projection",
    "self_attention.linear_proj.norm": "attention_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "gate_up",
    "mlp.linear_fc2": "down",
    "mlp.linear_fc2.norm": "feed_forward_norm",
}
# Megatron's module in a layer -> operators that make its first inputs, which no module of their own computes.
_INPUTS = {
    "input_layernorm": ("residual",),
    "self_attention.core_attention": ("rotary_q", "rotary_k"),
    "pre_mlp_layernorm": ("mlp_residual",),
    "mlp.linear_fc2": ("silu",),
}


def capture(policy: PolicyModel, heads: HeadShape, batch: PackedBatch, forward: Callable[[], Tensor], head: Head) -> tuple[Tensor, Capture]:
    """[N] logprobs that `forward` gives for a batch, and what was computed on the way; on one rank, without shared prompts.

    Args:
        head: [M, vocabulary] logits of [M, hidden]. They are taken once more from the hidden states of the same rows: the head itself
            only hands out logprobs.
    """
    pieces: dict[OperatorPlace, list[Tensor]] = {}
    token: list[Tensor] = []
    sequences = [ids.tolist() for ids in batch.token_ids.split_with_sizes(batch.lengths.tolist())]

    def keep(place: OperatorPlace, values: Tensor) -> None:
        rows = values.detach().reshape(len(token[-1]), -1)
        if place.operator == "qkv":
            rows = torch.cat(split_qkv(rows.t(), heads)).t()
        pieces.setdefault(place, []).append(rows.to("cpu", copy=True))

    def note_rows(input_ids: Tensor, positions: Tensor) -> None:
        token.append(_tokens(sequences, input_ids.flatten().tolist(), positions.flatten().tolist()))

    with _hooked(policy, keep, note_rows):
        logprobs = forward()
    found = {place: CapturedRows(torch.cat(token), torch.cat(values)) for place, values in pieces.items()}
    final = found[OperatorPlace("final_norm")]
    predicts = torch.isin(final.token, batch.loss_mask.nonzero()[:, 0] - 1)
    logits = head(final.values[predicts].to(policy.head_weight))
    return logprobs, found | {OperatorPlace("logits"): CapturedRows(final.token[predicts], logits.cpu())}


@contextmanager
def _hooked(
    policy: PolicyModel, keep: Callable[[OperatorPlace, Tensor], None], note_rows: Callable[[Tensor, Tensor], None]
) -> Iterator[None]:
    handles = [policy.register_forward_pre_hook(lambda _, inputs: note_rows(inputs[0], inputs[1]))]

    def outputs(module: torch.nn.Module, operator: str, layer: int | None = None) -> None:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            keep(OperatorPlace(operator, layer), output[0] if isinstance(output, tuple) else output)

        handles.append(module.register_forward_hook(hook))

    def inputs(module: torch.nn.Module, operators: tuple[str, ...], layer: int | None = None) -> None:
        def hook(_module: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
            for operator, values in zip(operators, (*given, *options.values()), strict=False):
                keep(OperatorPlace(operator, layer), values)

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    outputs(policy.embedding.word_embeddings, "embedding")
    for i, layer in enumerate(policy.decoder.layers):
        # Where a family has no norm, Megatron's layer has an IdentityOp.
        modules = {name: module for name, module in layer.named_modules() if not isinstance(module, IdentityOp)}
        for name, operators in _INPUTS.items():
            if name in modules and (i, name) != (0, "input_layernorm"):  # nothing was added before the first layer
                inputs(modules[name], operators, i)
        for name, operator in _OUTPUTS.items():
            if (norm := modules.get(f"{name}.norm")) is not None:
                inputs(norm, (operator,), i)
            elif name in modules:
                outputs(modules[name], operator, i)
    inputs(policy.decoder.final_layernorm, ("final_residual",))
    outputs(policy.decoder.final_layernorm, "final_norm")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tokens(sequences: list[list[int]], token_ids: list[int], positions: list[int]) -> Tensor:
    """[R] index in the packed batch of each row of a micro-batch, in which a sequence begins at each position 0."""
    found: list[Tensor] = []
    starts = [row for row, position in enumerate(positions) if position == 0]
    for begin, end in pairwise([*starts, len(positions)]):
        start = sequence_start(sequences, positions[begin:end], token_ids[begin:end])
        assert start is not None, "the model reads nothing but sequences of its batch"
        found.append(torch.arange(start, start + end - begin))
    return torch.cat(found)
