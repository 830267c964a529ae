"""What it brings to compute a group's prompt once: training steps and logprob passes, plain against shared.

    python benchmarks/shared_prompts.py

One model (the size of recipes/nano_spell_backward.yaml), two shapes of a batch: prompts of 68 tokens with 8 answers of up to 32, 16 groups;
and that recipe's own, prompts of about 20 tokens with 8 answers of about 6, 64 groups. Each with equal and with ragged lengths. Plain
and shared take turns in one run, so that a busy machine hits both; printed are the medians of the pairs' ratios, with quartiles, beside
the ratio of the positions computed, which is what there would be to gain if everything were proportional to them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # otherwise the folder of this file would come first
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import yaml  # noqa: E402

from correction import CorrectionConfig, PackedBatch, defer  # noqa: E402
from learner.config import LearnerConfig  # noqa: E402
from learner.inputs import ModelInputs  # noqa: E402
from learner.learner_rank import LearnerRank  # noqa: E402

CORRECTION = CorrectionConfig(preset="tis-token")
SAMPLES, VOCABULARY = 8, 300
SHAPES = {
    "68 + 32, 16 groups": (16, (68, 68), (32, 32)),
    "68 + 32, 16 groups, ragged": (16, (48, 88), (8, 32)),
    "20 + 6, 64 groups": (64, (20, 20), (6, 6)),
    "20 + 6, 64 groups, ragged": (64, (18, 22), (4, 7)),
}
"""Groups, and shortest and longest prompt and answer."""


def make_batch(groups: int, prompts: tuple[int, int], answers: tuple[int, int]) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)

    def draw(bounds: tuple[int, int]) -> torch.Tensor:
        length = int(torch.randint(bounds[0], bounds[1] + 1, (1,), generator=generator))
        return torch.randint(0, VOCABULARY, (length,), generator=generator)

    pieces, masks = [], []
    for _ in range(groups):
        prompt = draw(prompts)
        for _ in range(SAMPLES):
            answer = draw(answers)
            pieces.append(torch.cat([prompt, answer]))
            masks.append(torch.arange(len(pieces[-1])) >= len(prompt))
    lengths = torch.tensor([len(piece) for piece in pieces])
    tokens = int(lengths.sum())
    return PackedBatch(
        token_ids=torch.cat(pieces),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        loss_mask=torch.cat(masks),
        behavior_logprobs=torch.full((tokens,), -5.7),
        advantages=torch.repeat_interleave(torch.randn(len(lengths), generator=generator), lengths),
        weight_versions=torch.zeros(tokens, dtype=torch.int32),
        group_ids=torch.arange(len(lengths)) // SAMPLES,
    ).validate()


def save_model(folder: Path) -> None:
    import transformers

    recipe = yaml.safe_load((ROOT / "recipes" / "nano_spell_backward.yaml").read_text())["init"]["architecture"]
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=recipe["hidden_size"],
        intermediate_size=recipe["intermediate_size"],
        num_hidden_layers=recipe["layers"],
        num_attention_heads=recipe["heads"],
        num_key_value_heads=recipe["key_value_heads"],
        head_dim=recipe["head_dim"],
        max_position_embeddings=recipe["max_position_embeddings"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def ratios(learner: LearnerRank, action: Callable[[], object], pairs: int) -> list[float]:
    """Seconds the plain way over seconds shared, for each pair."""
    plain = learner.config.model_copy(update={"shared_prompts": False})
    shared = learner.config.model_copy(update={"shared_prompts": True})
    found = []
    for turn in range(pairs + 1):
        seconds = {}
        for config in (plain, shared) if turn % 2 else (shared, plain):
            learner.config = config
            began = time.perf_counter()
            action()
            seconds[config.shared_prompts] = time.perf_counter() - began
        found.append(seconds[False] / seconds[True])
    return found[1:]  # the first is for caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        learner = LearnerRank(LearnerConfig(learning_rate=0.0))
        learner.load(folder)
        print(f"{'times as fast, median (quartiles)':36s}{'positions':>20s}{'training step':>22s}{'logprobs':>22s}")
        for name, shape in SHAPES.items():
            batch = make_batch(*shape)
            corrected = defer(batch, CORRECTION)
            rows = [len(ModelInputs.of(batch, share_prompts=shared).token_ids) for shared in (False, True)]
            cells = [f"{rows[0]:,} / {rows[1]:,} = {rows[0] / rows[1]:.2f}"]
            for action in (lambda: learner.step(corrected, CORRECTION, step=0), lambda: learner.logprobs(batch)):  # noqa: B023
                low, median, high = statistics.quantiles(ratios(learner, action, pairs), n=4)
                cells.append(f"{median:.2f} ({low:.2f} to {high:.2f})")
            print(f"{name:32s}{cells[0]:>24s}{cells[1]:>22s}{cells[2]:>22s}", flush=True)
        learner.close()


if __name__ == "__main__":
    main()
