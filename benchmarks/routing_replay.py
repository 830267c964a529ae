"""What routing replay (R3) does to the mismatch between engines and a learner of other precision, on a nano mixture of experts.

    python benchmarks/routing_replay.py

One model of random weights that are far from uniform, 4 layers of 16 experts, 4 a token. For each precision of the engine: SGLang samples
answers, and a float32 learner computes their logprobs with the same weights (those of the folder, rounded in the engine alone), once by
its own routing and once by the engine's. Printed are the k3 KL from the engine's policy to the learner's, the largest difference of a
logprob, and the share of (token, layer) pairs in which the learner's routers choose the same experts as the engine's did: by themselves
from the embedding on, and given the engine's choice in all layers before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # otherwise the folder of this file would come first
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from correction import PackedBatch  # noqa: E402
from correction.errors import EngineError  # noqa: E402
from learner.config import LearnerConfig  # noqa: E402
from learner.learner_rank import LearnerRank, Proximal  # noqa: E402
from learner.nano import NanoModelConfig, build_nano_model  # noqa: E402
from rollout.config import TrainOverlong  # noqa: E402
from rollout.engine import RolloutEngine  # noqa: E402
from rollout.engine_config import EngineConfig  # noqa: E402
from rollout.packing import pack_groups  # noqa: E402
from rollout.sampler import sample_seed  # noqa: E402
from rollout.trajectory import Group, Prompt  # noqa: E402

SHAPE = NanoModelConfig(
    layers=4, hidden_size=128, heads=4, head_dim=32, intermediate_size=64, experts=16, experts_per_token=4, init_std=0.08,
    tie_word_embeddings=False,
)  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Mismatch:
    """Engine against learner, at equal weights."""

    dtype: str
    """Of the engine."""
    is_replayed: bool
    k3: float
    """Nats: mean over sampled tokens of exp(r) - 1 - r, r = log pi - log mu."""
    largest: float
    """Nats: of |r|."""
    equal_topk: float
    """Share of (token read, layer) in which the learner's router chooses the engine's experts."""
    tokens: int
    """Sampled."""


async def sample(folder: Path, dtype: str, prompts: int, max_tokens: int) -> PackedBatch:
    """2 answers to each prompt of random tokens."""
    config = EngineConfig(device="cpu", dtype=dtype, return_routed_experts=True, max_total_tokens=32_768)  # type: ignore[arg-type]
    engine = await RolloutEngine.start(folder, config, name=f"{dtype} engine")
    try:
        draw = random.Random(0)
        texts = [tuple(draw.randrange(engine.vocab_size) for _ in range(draw.randint(4, 40))) for _ in range(prompts)]
        asked = [Prompt(f"train/0/{i}", "", text, "") for i, text in enumerate(texts)]
        answers = await asyncio.gather(
            *(
                engine.generate(
                    one.token_ids, max_tokens=max_tokens, samples=2, seeds=[sample_seed(0, one.prompt_id, index) for index in range(2)]
                )
                for one in asked
            )
        )
    finally:
        await engine.shutdown()
    groups = [
        Group(i, prompt, tuple(replace(one, reward=0.0) for one in pair), 0)
        for i, (prompt, pair) in enumerate(zip(asked, answers, strict=True))
    ]
    return pack_groups(groups, learner_version=0, advantage=lambda rewards, _: rewards, overlong=TrainOverlong(), max_tokens=max_tokens)


def compare(folder: Path, batch: PackedBatch, dtype: str) -> list[Mismatch]:
    """Without replay and with it."""
    found = []
    for source in ("recompute", "rollout"):
        learner = LearnerRank(LearnerConfig(routing_replay=source))  # type: ignore[arg-type]
        learner.load(folder)
        given = batch if source == "rollout" else replace(batch, routed_experts=None)
        result = learner.proximal(given)
        learner.close()
        ratio = (result.logprobs - batch.behavior_logprobs)[batch.loss_mask].double()
        k3 = float((ratio.expm1() - ratio).mean())
        equal = _equal_share(result, batch)
        found.append(Mismatch(dtype, source == "rollout", k3, float(ratio.abs().max()), equal, len(ratio)))
    return found


def _equal_share(result: Proximal, batch: PackedBatch) -> float:
    """Of the tokens that were read: all but each sequence's last."""
    if result.routed_experts is None:
        assert result.routing_agreement is not None
        return result.routing_agreement
    assert batch.routed_experts is not None
    is_read = torch.ones(batch.num_tokens, dtype=torch.bool)
    is_read[batch.offsets[1:] - 1] = False
    own, engine = (routes[is_read].sort(-1).values for routes in (result.routed_experts, batch.routed_experts))
    return float((own == engine).all(-1).float().mean())


def measure(folder: Path, dtype: str, *, prompts: int, max_tokens: int) -> list[Mismatch]:
    """Raises: EngineError if SGLang doesn't serve the model in that precision here."""
    return compare(folder, asyncio.run(sample(folder, dtype, prompts, max_tokens)), dtype)


def table(rows: Sequence[Mismatch]) -> str:
    lines = ["engine     learner  routing   k3 KL      largest   equal top k"]
    lines += [
        f"{row.dtype:<10} float32  {'replayed' if row.is_replayed else 'own':<8}  {row.k3:.2e}   {row.largest:.1e}   {row.equal_topk:.4f}"
        for row in rows
    ]
    for own, replayed in zip(rows[::2], rows[1::2], strict=True):
        lines.append(f"{own.dtype}: replay divides the k3 KL by {own.k3 / replayed.k3:.3g}, over {own.tokens} tokens")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), help="precisions of the engine")
    parser.add_argument("--prompts", type=int, default=64, help="of 2 answers each")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    options = parser.parse_args()
    rows: list[Mismatch] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        parameters = build_nano_model(folder, ["What is 1 + 2?", "What is 3 + 4?"], SHAPE)
        print(f"{parameters / 1e6:.2f}M parameters, {SHAPE.layers} layers of {SHAPE.experts} experts, {SHAPE.experts_per_token} a token")
        for dtype in options.dtypes:
            try:
                rows += measure(folder, dtype, prompts=options.prompts, max_tokens=options.max_tokens)
            except EngineError as error:
                print(f"{dtype}: the engine doesn't run: {error}")
    print(table(rows))


if __name__ == "__main__":
    main()
