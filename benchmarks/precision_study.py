"""What the precision of engine and learner does to the mismatch between them, at equal weights.

    OMP_NUM_THREADS=1 python benchmarks/precision_study.py [--engines float32 bfloat16 ...] [--prompts 32] [--samples 4] [--tokens 48]

One random Qwen3 of 3M parameters, whose distributions are not uniform (mean -log mu is printed; ln 512 is 6.24). An engine of each
precision samples from it; a learner of each precision then gives the logprobs of every engine's tokens. A row is a pairing: the k3 KL, the
standard deviation and the largest size of the log-ratio (nats), and the correlation of the probabilities. `+ head` computes the logits in
float32. Equal half precisions aren't exact either: weights are rounded alike, but sums and their order are not. An engine that doesn't
start is named with its error.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package learner, not its neighbour here of the same name

import torch

from correction import CorrectionConfig, PackedBatch, correct, diagnose
from correction.errors import EvenkeelError
from learner.config import LearnerConfig
from learner.learner_rank import LearnerRank
from rollout.engine import RolloutEngine
from rollout.engine_config import EngineConfig

VOCABULARY = 512
HEAD: dict[str, Any] = {"engine_args": {"enable_fp32_lm_head": True}}
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 + head": {"dtype": "bfloat16", **HEAD},
    "float16": {"dtype": "float16"},
    "float16 + head": {"dtype": "float16", **HEAD},
}
LEARNERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 + head": {"dtype": "bfloat16", "float32_head": True},
}
COLUMNS = {"k3_kl": "k3 KL", "log_ratio_std": "std", "log_ratio_abs_max": "max |log ratio|", "pearson": "pearson"}


def save_model(folder: Path) -> None:
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.1, bos_token_id=0, eos_token_id=1,
        pad_token_id=2, dtype="float32",
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


async def sample(folder: Path, settings: dict[str, Any], prompts: int, samples: int, tokens: int) -> PackedBatch:
    """The answers of a fresh engine to random prompts of 16 tokens."""
    draw = random.Random(0)
    texts = [[draw.randrange(3, VOCABULARY) for _ in range(16)] for _ in range(prompts)]
    engine = await RolloutEngine.start(folder, EngineConfig(device="cpu", max_running_requests=64, **settings))
    try:
        answers = await asyncio.gather(*(engine.generate(text, max_tokens=tokens, samples=samples, ignore_stop=True) for text in texts))
    finally:
        await engine.shutdown()
    pairs = [(text, answer) for text, group in zip(texts, answers, strict=True) for answer in group]
    lengths = torch.tensor([0] + [len(text) + len(answer.response_ids) for text, answer in pairs])
    n = int(lengths.sum())
    return PackedBatch(
        token_ids=torch.tensor([token for text, answer in pairs for token in (*text, *answer.response_ids)]),
        offsets=lengths.cumsum(0),
        loss_mask=torch.tensor([kind for text, answer in pairs for kind in [False] * len(text) + [True] * len(answer.response_ids)]),
        behavior_logprobs=torch.tensor([value for text, answer in pairs for value in [0.0] * len(text) + list(answer.behavior_logprobs)]),
        advantages=torch.ones(n),
        weight_versions=torch.zeros(n, dtype=torch.int32),
        group_ids=torch.arange(len(pairs)) // samples,
    ).validate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        batches, failed = {}, {}
        for engine in options.engines:
            try:
                batches[engine] = asyncio.run(sample(folder, ENGINES[engine], options.prompts, options.samples, options.tokens))
            except EvenkeelError as error:
                failed[engine] = error
        logprobs: dict[tuple[str, str], torch.Tensor] = {}
        for learner, settings in LEARNERS.items():
            rank = LearnerRank(LearnerConfig(**settings))
            rank.load(folder)
            logprobs |= {(engine, learner): rank.logprobs(batch) for engine, batch in batches.items()}
            rank.close()
    for engine, batch in batches.items():
        surprise = -float(batch.behavior_logprobs[batch.loss_mask].mean())
        print(f"engine {engine}: {int(batch.loss_mask.sum()):,} tokens, mean -log mu {surprise:.2f} nats")
    print(f"{'engine':17s}{'learner':17s}" + "".join(f"{title:>17s}" for title in COLUMNS.values()))
    config = CorrectionConfig(preset="tis-token")
    for (engine, learner), values in sorted(logprobs.items()):
        batch = replace(batches[engine], proximal_logprobs=values)
        numbers = diagnose(batch, correct(batch, config))
        print(f"{engine:17s}{learner:17s}" + "".join(f"{numbers[column]:17.8f}" if column == "pearson" else f"{numbers[column]:17.2e}"
                                                      for column in COLUMNS))  # fmt: skip
    for engine, error in failed.items():
        print(f"{engine}: does not run here: {error}")


if __name__ == "__main__":
    main()
