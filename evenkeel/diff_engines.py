"""`evenkeel diff-engines`: one model in SGLang and in Megatron, the same tokens, and the operator at which the two part."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.table import Table

from evenkeel.actors.settings.resolve import contract_of
from evenkeel.correction.batch import PackedBatch
from evenkeel.engines.agreement import Agreement, compare
from evenkeel.engines.capture import FUSED, ORDER, Capture, OperatorGap, compare_captures
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.families import (
    ATTENTION_NORM_AFTER,
    FEED_FORWARD_NORM,
    FEED_FORWARD_NORM_AFTER,
    INPUT_NORM,
    MEGATRON_LAYER,
    trained_family,
)
from evenkeel.learner.hf.folder import check_trainable, read_json
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.plan.shape import check_is_model
from evenkeel.rollout.engine import engine_capture
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine.temporary_files import passing_folder
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.sampler import sample_seed
from evenkeel.rollout.trajectory import Trajectory

LONGEST_PROMPT = 200
"""Tokens: more than three blocks of the batch-invariant attention."""
# Megatron's norm in a layer -> operator.
_NORMS = {
    INPUT_NORM: "norm",
    ATTENTION_NORM_AFTER: "attention_norm",
    FEED_FORWARD_NORM: "mlp_norm",
    FEED_FORWARD_NORM_AFTER: "feed_forward_norm",
}


@dataclass(frozen=True)
class EngineDiff:
    """What a comparison found."""

    gaps: list[OperatorGap]
    """Gaps in the order of computation."""
    agreement: Agreement
    """Agreement of sampled and trained logprobs: of what comes after the logits."""
    offsets: tuple[int, ...]
    """Offsets of the sequences in the packed batch."""

    @property
    def parting(self) -> str | None:
        """The first place where the two differ; None if all bits are equal."""
        first = next((gap.place for gap in self.gaps if gap.differing), None)
        return str(first) if first else "logprobs" if self.agreement.first else None

    def __str__(self) -> str:
        if self.parting is None:
            return f"equal: {len(self.gaps)} operators, {self.agreement.tokens} sampled tokens, all the same bits"
        gap = next((gap for gap in self.gaps if gap.differing), None)
        if gap is None or gap.first_token is None:
            return f"the engines part after the logits, at the logprobs: {self.agreement.first}"
        sequence = max(i for i, start in enumerate(self.offsets[:-1]) if start <= gap.first_token)
        return (
            f"the engines part at {gap.place}: {gap.differing} of {gap.rows} rows differ there, by up to {gap.largest:.3g}; the first is "
            f"position {gap.first_token - self.offsets[sequence]} of sequence {sequence}. What comes after it differs because of it"
        )

    def table(self) -> Table:
        """A row for each operator, over all layers."""
        table = Table("operator", "places that differ", "rows that differ", "largest difference", "in layer", box=None)
        for operator in sorted({gap.place.operator for gap in self.gaps}, key=ORDER.index):
            of_layers = [gap for gap in self.gaps if gap.place.operator == operator]
            worst = max(of_layers, key=lambda gap: gap.largest)
            differing, rows = sum(gap.differing for gap in of_layers), sum(gap.rows for gap in of_layers)
            places = f"{sum(gap.differing > 0 for gap in of_layers)} of {len(of_layers)}"
            where = str(worst.place.layer) if differing and worst.place.layer is not None else ""
            table.add_row(operator, places, f"{differing} of {rows}", f"{worst.largest:.3g}", where)
        tokens, differing = self.agreement.tokens, self.agreement.differing
        table.add_row("logprobs", "", f"{differing} of {tokens}", f"{self.agreement.largest_difference:.3g}", "")
        return table


def diff_engines(
    model: Path,
    *,
    true_on_policy: bool,
    dtype: Literal["auto", "float32", "bfloat16"],
    prompts: int,
    tokens: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> EngineDiff:
    """Sample with SGLang, compute the same tokens with Megatron, and compare what each operator made of them.

    Args:
        dtype: of both engines; auto is bfloat16 on a GPU, where SGLang has no float32, and float32 on a CPU.
        prompts: of random tokens and random lengths, in flight together.
        tokens: sampled for each.
        say: called with what is done next.
    Raises: ConfigError for what the mode can't honour; DataError, EngineError.
    """
    check_is_model(model)
    check_trainable(model)
    engine = EngineConfig(batch_invariant=true_on_policy, dtype=dtype).on_this_machine()
    learner = LearnerConfig(batch_invariant=true_on_policy, dtype=dtype).on_this_machine()
    if true_on_policy:
        contract_of(read_json(model / "config.json"), engine, learner)
    batch, of_engine = asyncio.run(capture_engine(model, engine, prompts=prompts, tokens=tokens, seed=seed, say=say))
    say("loading the model into Megatron")
    rank = LearnerRank(learner)
    try:
        rank.load(model)
        say(f"Megatron computes the same {batch.token_ids.numel()} tokens")
        logprobs, of_learner = rank.capture(batch)
    finally:
        rank.close()
    say("comparing every operator, bit by bit")
    gaps = compare_captures(of_engine, of_learner, FUSED)
    return EngineDiff(gaps, compare(batch, logprobs), tuple(batch.offsets.tolist()))


def norms_of(kind: str) -> dict[str, str]:
    """Norms of a layer but those of queries and keys, of a model_type: module, by Hugging Face's and SGLang's name -> operator."""
    of_rule = {rule.megatron.removeprefix(MEGATRON_LAYER): rule.hf[0] for rule in trained_family(kind).rules}
    return {of_rule[norm].partition("{layer}.")[2].removesuffix(".weight"): name for norm, name in _NORMS.items() if norm in of_rule}


async def capture_engine(
    model: Path, config: EngineConfig, *, prompts: int, tokens: int, seed: int, say: Callable[[str], None] = lambda _: None
) -> tuple[PackedBatch, Capture]:
    """Prompts of random tokens, answered together: the batch, and what the engine computed for it."""
    shape, draw = json.loads((model / "config.json").read_text()), random.Random(seed)
    longest = max(1, min(LONGEST_PROMPT, shape["max_position_embeddings"] - tokens - 8))
    asked = [[draw.randrange(shape["vocab_size"]) for _ in range(draw.randint(1, longest))] for _ in range(prompts)]
    with passing_folder() as folder:
        of_hooks = engine_capture.engine_arguments(folder, shape["num_hidden_layers"], norms_of(shape["model_type"]))
        say("starting SGLang with a hook on every operator (the longest part)")
        engine = await RolloutEngine.start(model, config.model_copy(update={"engine_args": config.engine_args | of_hooks}))
        try:
            say(f"SGLang answers {prompts} random prompts, {tokens} tokens each")
            answers = await asyncio.gather(
                *(
                    engine.generate(one, max_tokens=tokens, ignore_stop=True, seeds=[sample_seed(seed, str(i), 0)])
                    for i, one in enumerate(asked)
                )
            )
        finally:
            await engine.shutdown()
        say("reading what SGLang's operators computed")
        batch = _batch(asked, [answer[0] for answer in answers])
        sequences = [ids.tolist() for ids in batch.token_ids.split_with_sizes(batch.lengths.tolist())]
        return batch, engine_capture.read(folder, sequences)


def _batch(prompts: Sequence[Sequence[int]], answers: Sequence[Trajectory]) -> PackedBatch:
    lengths = torch.tensor([len(prompt) + len(answer.response_ids) for prompt, answer in zip(prompts, answers, strict=True)])
    sampled = [[0.0] * len(prompt) + list(answer.behavior_logprobs) for prompt, answer in zip(prompts, answers, strict=True)]
    is_sampled = [[False] * len(prompt) + [True] * len(answer.response_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    count = int(lengths.sum())
    return PackedBatch(
        token_ids=torch.tensor([token for p, a in zip(prompts, answers, strict=True) for token in (*p, *a.response_ids)]),
        offsets=torch.tensor([0, *lengths.cumsum(0).tolist()]),
        loss_mask=torch.tensor([one for row in is_sampled for one in row]),
        behavior_logprobs=torch.tensor([one for row in sampled for one in row], dtype=torch.float32),
        advantages=torch.zeros(count),
        weight_versions=torch.zeros(count, dtype=torch.int32),
        group_ids=torch.arange(len(prompts)),
    ).validate()
