"""What routing replay (R3) does to the mismatch between engines and a learner of other precision, on a nano mixture of experts.

    python benchmarks/routing_replay.py

One model of random weights that are far from uniform, 4 layers of 16 experts, 4 a token. For each precision of the engine: SGLang samples
answers, and a float32 learner computes their logprobs with the same weights (those of the folder, rounded in the engine alone), once by
its own routing and once by the engine's. Printed are the k3 KL from the engine's policy to the learner's, the largest difference of a
logprob, and the share of (token, layer) pairs in which the learner's routers choose the same experts as the engine's did: by themselves
from the embedding on, and given the engine's choice in all layers before.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package learner, not its neighbour here of the same name
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.sides import options
from benchmarks.workloads import sampled_batch
from evenkeel.correction import PackedBatch
from evenkeel.correction.errors import EngineError
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.nano import NanoModelConfig, build_nano_model
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.results import Proximal
from evenkeel.rollout.engine_settings.engine_config import EngineConfig

SHAPE = NanoModelConfig(
    layers=4, hidden_size=128, heads=4, head_dim=32, intermediate_size=64, experts=16, experts_per_token=4, init_std=0.08,
    tie_word_embeddings=False,
)  # fmt: skip


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

    def __str__(self) -> str:
        routing = "replayed" if self.is_replayed else "own"
        return f"{self.dtype:<10} float32  {routing:<8}  {self.k3:.2e}   {self.largest:.1e}   {self.equal_topk:.4f}"


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
    """From 2 answers to each of some random prompts. Raises: EngineError if SGLang doesn't serve the model in that precision here."""
    config = EngineConfig(device="cpu", dtype=dtype, return_routed_experts=True, max_total_tokens=32_768)  # type: ignore[arg-type]
    draw = random.Random(0)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    texts = [tuple(draw.randrange(vocabulary) for _ in range(draw.randint(4, 40))) for _ in range(prompts)]
    return compare(folder, sampled_batch(folder, config, texts, samples=2, max_tokens=max_tokens), dtype)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"], help="precisions of the engine")
    parser.add_argument("--prompts", type=int, default=64, help="of 2 answers each")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        parameters = build_nano_model(folder, ["What is 1 + 2?", "What is 3 + 4?"], SHAPE)
        print(f"{parameters / 1e6:.2f}M parameters, {SHAPE.layers} layers of {SHAPE.experts} experts, {SHAPE.experts_per_token} a token")
        print("engine     learner  routing   k3 KL      largest   equal top k")
        for dtype in arguments.dtypes:
            try:
                own, replayed = measure(folder, dtype, prompts=arguments.prompts, max_tokens=arguments.max_tokens)
            except EngineError as error:
                print(f"{dtype}: the engine doesn't run: {error}")
                continue
            print(own, replayed, sep="\n")
            print(f"{dtype}: replay divides the k3 KL by {own.k3 / replayed.k3:.3g}, over {own.tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
