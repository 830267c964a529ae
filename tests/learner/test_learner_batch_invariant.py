"""The learner's batch-invariant layers: packing, order, micro-batches and threads change no bit; values and gradients are the usual."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import defer
from evenkeel.engines import operators
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model.attention import pack
from evenkeel.learner.model.inputs import RowLayout
from evenkeel.learner.model.layers import BatchInvariantAttention
from tests.learner.learner_cases import (
    gradients,
    grouped_batch,
    hf_model,
    hf_values,
    largest_difference,
    learner_on,
    random_batch,
    run_ranks,
    save_model,
    with_noisy_behavior,
)

FAMILIES = [("qwen3", True), ("qwen2", True), ("llama", False)]
SETTINGS = {"tokens_per_microbatch": 4096, "logprob_chunk_tokens": 1000}


@pytest.mark.parametrize(("family", "tie"), FAMILIES)
def test_packing_changes_no_bit(tmp_path: Path, family: str, tie: bool) -> None:
    batch = random_batch(groups=3, longest=150, temperature=0.7)
    folder = save_model(tmp_path / "m", family, tie=tie)
    found = []
    with learner_on(folder, batch_invariant=True, **SETTINGS) as learner:
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
    assert all(torch.equal(other, together) for other in found)
    with torch.no_grad():
        theirs, _ = hf_values(hf_model(folder), batch)
    torch.testing.assert_close(together, theirs, rtol=0, atol=1e-5)


LAYOUTS = st.lists(st.tuples(st.integers(1, 200), st.lists(st.integers(1, 150), max_size=5)), min_size=1, max_size=4)
"""Sequences, each with its continuations."""


@settings(max_examples=25, deadline=None)
@given(shape=LAYOUTS)
def test_attention_of_shared_prompts(shape: list[tuple[int, list[int]]]) -> None:
    """A text has the same bits, whether it goes on from a shared sequence or repeats it; values and gradients are the textbook's. 4 query
    heads over 2 key heads, in float32."""
    layout = RowLayout(
        tuple(length for length, _ in shape),
        tuple(rows for _, continuations in shape for rows in continuations),
        tuple(t for t, (_, continuations) in enumerate(shape) for _ in continuations),
    )
    rows = [torch.arange(a, b) for a, b in pairwise([0, *accumulate(layout.sequences + layout.continuations)])]
    befores = [torch.arange(0)] * len(shape) + [rows[t] for t in layout.continued]
    texts = [torch.cat(pair) for pair in zip(befores, rows, strict=True)]
    generator = torch.Generator().manual_seed(sum(map(len, rows)))
    inputs = [torch.randn(sum(map(len, rows)), heads, 24, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    attention = BatchInvariantAttention(SimpleNamespace(kv_channels=24))

    def attend(layout: RowLayout, *inputs: torch.Tensor) -> torch.Tensor:
        return attention(*inputs, None, pack(layout, torch.device("cpu"), batch_invariant=True)[1]).view(-1, 4, 24)

    shared = attend(layout, *inputs)
    repeated = attend(RowLayout(tuple(map(len, texts))), *(x[torch.cat(texts)] for x in inputs))
    pieces = []
    for before, text, ours in zip(befores, texts, repeated.split([len(text) for text in texts]), strict=True):
        q, k, v = (x[text] for x in inputs)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 24**-0.5
        hidden = torch.ones(len(q), len(q)).triu(1).bool()
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.repeat_interleave(2, 1))
        pieces.append(attended[len(before) :])
        assert torch.equal(ours[len(before) :], shared[text[len(before) :]])
    plain, noise = torch.cat(pieces), torch.randn(shared.shape, generator=generator)
    torch.testing.assert_close(shared, plain, rtol=1e-4, atol=1e-5)
    pairs = (torch.autograd.grad((output * noise).sum(), inputs) for output in (shared, plain))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LearnerRank]:
    """Its weights stay as they are: learning rate 0."""
    folder = save_model(tmp_path_factory.mktemp("model") / "m", max_position_embeddings=512)
    with learner_on(folder, batch_invariant=True, learning_rate=0.0, clip_grad=0.0) as learner:
        yield learner


LENGTHS = st.tuples(st.integers(1, 200), st.integers(0, 200))
GROUPS = st.lists(
    st.lists(LENGTHS, min_size=1, max_size=5).map(lambda group: tuple(map(list, zip(*group, strict=True)))), min_size=1, max_size=4
)
"""Groups of unequal prompts and answers, some with nothing to train."""


@settings(max_examples=20, deadline=None)
@given(shape=GROUPS, budget=st.sampled_from([30, 500, 10_000]), seed=st.integers(0, 5))
def test_shared_prompts_change_no_bit(learner: LearnerRank, shape: Any, budget: int, seed: int) -> None:
    """Logprobs before and in a step; its gradient is the same to 1e-5 of the largest element, a sum in another order."""
    batch, found = grouped_batch(shape, seed=seed, temperature=0.8), {}
    before, config = learner.config, CorrectionConfig()
    for shared in (True, False):
        learner.config = before.model_copy(update={"shared_prompts": shared, "tokens_per_microbatch": budget})
        logprobs = learner.logprobs(batch)
        result = learner.step(defer(with_noisy_behavior(batch, logprobs), config), config, step=0)
        found[shared] = logprobs, result.target_logprobs, gradients(learner)
    learner.config = before
    (logprobs, targets, gradient), (plain_logprobs, plain_targets, plain_gradient) = found[True], found[False]
    assert all(torch.equal(logprobs, other) for other in (targets, plain_logprobs, plain_targets))
    assert batch.loss_mask.any() == any(x.any() for x in gradient.values())
    # Of the largest element of all tensors: attention to a single key has a gradient of 0 for queries and keys, or rounding instead.
    largest = max(float(x.abs().max()) for x in plain_gradient.values())
    assert max(float((gradient[name] - x).abs().max()) for name, x in plain_gradient.items()) <= 1e-5 * largest


def test_gradients_and_target_logprobs_of_a_step(tmp_path: Path) -> None:
    """A step's gradient is that of the usual layers to rounding, and its logprobs are bit for bit those of a forward without gradient."""
    batch, config = random_batch(longest=100), CorrectionConfig()
    folder = save_model(tmp_path / "m", "qwen2")
    found = {}
    for batch_invariant in (True, False):
        with learner_on(folder, batch_invariant=batch_invariant, learning_rate=0.0, **SETTINGS) as learner:
            before = learner.logprobs(batch)
            result = learner.step(defer(batch, config), config, step=0)
            found[batch_invariant] = gradients(learner)
            if batch_invariant:
                assert torch.equal(result.target_logprobs, before)
    assert largest_difference(found[True], found[False]) < 1e-4


SPLITS: list[Any] = [
    {"data_parallel": 2},
    {"tensor_parallel": 2},
    pytest.param({"tensor_parallel": 2, "dtype": "bfloat16"}, marks=pytest.mark.slow),
    pytest.param({"tensor_parallel": 4}, marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel": 2}, marks=pytest.mark.slow),
]


def _logprobs_and_norm(learner: LearnerRank) -> tuple[torch.Tensor, float]:
    """What the model says of a batch, and the norm of a step's gradient."""
    batch, config = random_batch(longest=150), CorrectionConfig()
    return learner.logprobs(batch), learner.step(defer(batch, config), config, step=0).grad_norm


def _of_a_rank(rank: int, ranks: int, port: int, folder: Path, settings: dict[str, Any]) -> tuple[torch.Tensor, float]:
    learner = LearnerRank(LearnerConfig(**settings, batch_invariant=True), rank, ranks, "127.0.0.1", port)
    learner.load(folder)
    found = _logprobs_and_norm(learner)
    learner.close()
    return found


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_several_ranks_say_what_one_says(tmp_path: Path, split: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallelism is another packing, a pipeline the same layers elsewhere. Tensor parallelism is one rank that projects in parts, as
    the engine then does."""
    folder = save_model(tmp_path / "m", num_key_value_heads=4)
    settings = {"dtype": split.get("dtype", "float32")}
    with learner_on(folder, batch_invariant=True, **settings) as learner:
        alone, norm = _logprobs_and_norm(learner)
    parts = split.get("tensor_parallel", 1)
    if parts > 1:
        in_one_part = alone
        monkeypatch.setattr("evenkeel.learner.model.layers.product", partial(operators.product, parts=parts))
        with learner_on(folder, batch_invariant=True, **settings) as learner:
            alone, norm = _logprobs_and_norm(learner)
        assert not torch.equal(alone, in_one_part)
    ranks = split.get("data_parallel", 1) * split.get("pipeline_parallel", 1) * parts
    for found, norm_of_rank in run_ranks(_of_a_rank, folder, split, ranks=ranks):
        assert torch.equal(found, alone)
        assert norm_of_rank == pytest.approx(norm, rel=1e-4 if settings["dtype"] == "float32" else 1e-2)


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel": 2, "sequence_parallel": True},
        {"float32_head": True},
    ],
)
def test_what_is_not_batch_invariant_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="batch_invariant = true"):
        LearnerConfig(batch_invariant=True, **settings)


def test_the_mode_off_builds_the_usual_layers(tmp_path: Path) -> None:
    with learner_on(save_model(tmp_path / "m")) as learner:
        names = {type(module).__name__ for module in learner._policies[0].modules()}
    assert not {name for name in names if "FixedOrder" in name} and "PackedAttention" in names
