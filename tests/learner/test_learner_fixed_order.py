"""The learner's layers of fixed order: packing, order, micro-batches and threads change no bit; values and gradients are the usual."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from correction.config import CorrectionConfig
from correction.correct import defer
from correction.invariance import operators
from learner.attention import PackedSequences, Run
from learner.config import LearnerConfig
from learner.fixed_order import FixedOrderAttention, FixedOrderRowLinear
from learner.learner_rank import LearnerRank
from tests.learner.learner_cases import gradients, hf_model, hf_values, largest_difference, learner_on, random_batch, run_ranks, save_model

FAMILIES = [("qwen3", True), ("qwen2", True), ("llama", False)]
SETTINGS = {"tokens_per_microbatch": 4096, "logprob_chunk_tokens": 1000}


@pytest.mark.parametrize(("family", "tie"), FAMILIES)
@pytest.mark.parametrize("fixed_order", [True, False])
def test_packing_changes_no_bit(tmp_path: Path, family: str, tie: bool, fixed_order: bool) -> None:
    """Without fixed order the same comparison finds differences: the negative control."""
    batch = random_batch(longest=150, temperature=0.7)
    folder = save_model(tmp_path / "m", family, tie=tie)
    found = []
    with learner_on(folder, fixed_order=fixed_order, **SETTINGS) as learner:
        together = learner.logprobs(batch)
        found.append(torch.cat([learner.logprobs(batch.select([i])) for i in range(batch.num_sequences)]))
        learner.config = learner.config.model_copy(update={"tokens_per_microbatch": 64, "logprob_chunk_tokens": 7})
        found.append(learner.logprobs(batch))
        order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(0)).tolist()
        shuffled = torch.empty_like(together)
        shuffled[batch.token_index(order)] = learner.logprobs(batch.select(order))
        found.append(shuffled)
        torch.set_num_threads(2)
        found.append(learner.logprobs(batch))
        torch.set_num_threads(1)
    assert all(torch.equal(other, together) for other in found) == fixed_order
    with torch.no_grad():
        theirs, _ = hf_values(hf_model(folder), batch)
    torch.testing.assert_close(together, theirs, rtol=0, atol=1e-5)


def test_attention_and_its_gradient_against_the_textbook() -> None:
    """Packed sequences of 1 to 150 tokens, 4 query heads over 2 key heads, in float32."""
    torch.manual_seed(0)
    lengths = [1, 64, 65, 3, 3, 150]
    packed = PackedSequences(qkv_format="thd", runs=tuple(Run(1, length) for length in lengths))
    query, key, value = (torch.randn(sum(lengths), heads, 24, requires_grad=True) for heads in (4, 2, 2))
    attention = FixedOrderAttention(SimpleNamespace(kv_channels=24))
    ours = attention(query, key, value, None, packed).view(-1, 4, 24)
    pieces = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 24**-0.5
        hidden = torch.ones(len(q), len(q)).triu(1).bool()
        pieces.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.repeat_interleave(2, 1)))
    plain, noise = torch.cat(pieces), torch.randn(sum(lengths), 4, 24)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    pairs = (torch.autograd.grad((output * noise).sum(), (query, key, value)) for output in (ours, plain))
    for mine, theirs in zip(*pairs, strict=True):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_and_target_logprobs_of_a_step(tmp_path: Path) -> None:
    """A step's gradient is that of the usual layers to rounding, and its logprobs are bit for bit those of a forward without gradient."""
    batch, config = random_batch(longest=100), CorrectionConfig()
    folder = save_model(tmp_path / "m", "qwen2")
    found = {}
    for fixed_order in (True, False):
        with learner_on(folder, fixed_order=fixed_order, learning_rate=0.0, **SETTINGS) as learner:
            before = learner.logprobs(batch)
            result = learner.step(defer(batch, config), config, step=0)
            found[fixed_order] = gradients(learner)
            if fixed_order:
                assert torch.equal(result.target_logprobs, before)
    assert largest_difference(found[True], found[False]) < 1e-4


def _logprobs_of_a_rank(rank: int, ranks: int, port: int, folder: Path, split: str) -> torch.Tensor:
    learner = LearnerRank(LearnerConfig(**{split: ranks}, fixed_order=True), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    found = learner.logprobs(random_batch(longest=150))
    learner.close()
    return found


@pytest.mark.parametrize("split", ["data_parallel", "tensor_parallel", pytest.param("pipeline_parallel", marks=pytest.mark.slow)])
def test_two_ranks_say_what_one_says(tmp_path: Path, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallelism is another packing, a pipeline the same layers elsewhere. Tensor parallelism is one rank that projects in two
    parts, as the engine then does."""
    folder = save_model(tmp_path / "m")
    with learner_on(folder, fixed_order=True) as learner:
        alone = learner.logprobs(random_batch(longest=150))
    if split == "tensor_parallel":
        in_one_part = alone

        def in_two_parts(_layer: Any, input: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
            return operators.linear(input, weight, parts=2)

        monkeypatch.setattr(FixedOrderRowLinear, "_forward_impl", in_two_parts, raising=False)
        with learner_on(folder, fixed_order=True) as learner:
            alone = learner.logprobs(random_batch(longest=150))
        assert not torch.equal(alone, in_one_part)
    for found in run_ranks(_logprobs_of_a_rank, folder, split):
        assert torch.equal(found, alone)


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel": 3},
        {"tensor_parallel": 2, "dtype": "bfloat16"},
        {"tensor_parallel": 2, "sequence_parallel": True},
        {"float32_head": True},
    ],
)
def test_what_has_no_fixed_order_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fixed_order = true"):
        LearnerConfig(fixed_order=True, **settings)


def test_the_mode_off_builds_the_usual_layers(tmp_path: Path) -> None:
    with learner_on(save_model(tmp_path / "m")) as learner:
        names = {type(module).__name__ for module in learner._policies[0].modules()}
    assert not {name for name in names if "FixedOrder" in name} and "PackedAttention" in names
