"""Tokens per second of a training step, against a plain Hugging Face model with torch's AdamW on the same batch.

    python benchmarks/learner.py [--size 3M 60M] [--batch ragged groups] [--pairs 7] [--threads 1] [--check]

The rival runs in two forms: one padded batch, and one sequence at a time, accumulating gradients (the honest one: most of what packing
gains is the padding). Both have transformers' Qwen3ForCausalLM with sdpa, compute no logits before the first trained token's, and make the
same update: the same gradient, clipped, and AdamW. That the three gradients have the same norm is checked on the way. The learner does its
whole step, correction and entropies included.
Batches: `ragged` has sequences of their own with lengths from a fifth of the longest on (fill, real tokens over padded positions, about
0.6); `groups` has 8 answers of 8 to 32 tokens to each prompt of 68, which the learner reads once.
The three take turns in one run, so that a busy machine hits all; printed are medians of the rounds' ratios, with quartiles. `waste` is the
share of computed positions that padding makes up. `--check` fails if a ratio misses its target: for `ragged` 1/fill padded and 0.95 one by
one, for `groups` 2 of both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package learner, not this file

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from correction import CorrectionConfig, PackedBatch, defer
from learner.config import LearnerConfig
from learner.inputs import ModelInputs
from learner.learner_rank import LearnerRank

CORRECTION = CorrectionConfig(preset="tis-token")
SIZES: dict[str, dict[str, int]] = {
    "3M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512},
    "60M": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 8, "vocab_size": 8192},
}
LONGEST, SEQUENCES, GROUPS = 128, {"3M": 24, "60M": 8}, {"3M": 8, "60M": 2}
SAMPLES, PROMPT, ANSWERS = 8, 68, (8, 32)
UPDATE: dict[str, Any] = {"learning_rate": 0.0, "betas": (0.9, 0.99), "clip_grad": 1.0}
"""At a rate of 0 the work is the same and the weights stay, so that every round has the same gradient."""


def save_model(folder: Path, size: str) -> int:
    """A random model; returns its number of parameters."""
    import transformers

    config = transformers.Qwen3Config(
        **SIZES[size], num_key_value_heads=SIZES[size]["num_attention_heads"] // 2, head_dim=64, max_position_embeddings=256,
        tie_word_embeddings=True, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_batch(kind: str, size: str) -> PackedBatch:
    """Random tokens; behaviour logprobs are still to be filled in."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:
        return torch.randint(0, SIZES[size]["vocab_size"], (count,), generator=generator)

    if kind == "ragged":
        lengths = torch.linspace(LONGEST / 5, LONGEST, SEQUENCES[size]).round().long().tolist()
        pieces, prompts, groups = [tokens(length) for length in lengths], [4] * len(lengths), list(range(len(lengths)))
    else:
        pieces, prompts, groups = [], [], []
        for group in range(GROUPS[size]):
            prompt = tokens(PROMPT)
            for _ in range(SAMPLES):
                answer = int(torch.randint(ANSWERS[0], ANSWERS[1] + 1, (1,), generator=generator))
                pieces.append(torch.cat([prompt, tokens(answer)]))
                prompts.append(PROMPT)
                groups.append(group)
    sizes = torch.tensor([len(piece) for piece in pieces])
    n = int(sizes.sum())
    return PackedBatch(
        token_ids=torch.cat(pieces),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
        loss_mask=torch.cat([torch.arange(len(piece)) >= prompt for piece, prompt in zip(pieces, prompts, strict=True)]),
        behavior_logprobs=torch.zeros(n),
        advantages=torch.repeat_interleave(torch.randn(len(pieces), generator=generator), sizes),
        weight_versions=torch.zeros(n, dtype=torch.int32),
        group_ids=torch.tensor(groups),
    ).validate()


class Rival:
    """A plain training step: Hugging Face's model, logprobs by log_softmax, torch's AdamW."""

    def __init__(self, folder: Path, batch: PackedBatch) -> None:
        import transformers

        self._model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, betas=UPDATE["betas"], weight_decay=0.0)
        bounds = list(pairwise(batch.offsets.tolist()))
        self._ids = [batch.token_ids[a:b] for a, b in bounds]
        self._masks = [batch.loss_mask[a:b] for a, b in bounds]
        self._scales = [batch.advantages[a:b] / batch.loss_mask.sum() for a, b in bounds]

    def padded(self) -> float:
        """All sequences in one padded batch. Returns: the gradient's norm."""
        ids, mask, scale = (pad_sequence(x, batch_first=True) for x in (self._ids, self._masks, self._scales))
        real = pad_sequence([torch.ones_like(x) for x in self._ids], batch_first=True)
        self._backward(ids, mask, scale, attention_mask=real[:, :-1])
        return self._update()

    def one_by_one(self) -> float:
        """One sequence at a time, without padding."""
        for ids, mask, scale in zip(self._ids, self._masks, self._scales, strict=True):
            self._backward(ids[None], mask[None], scale[None])
        return self._update()

    def _backward(self, ids: Tensor, mask: Tensor, scale: Tensor, **options: Any) -> None:
        first = int(mask.any(0).nonzero()[0])  # what comes before it predicts nothing that is trained
        logits = self._model(ids[:, :-1], use_cache=False, logits_to_keep=ids.shape[1] - first, **options).logits
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, first:, None])[..., 0]
        torch.where(mask[:, first:], -logprobs * scale[:, first:], 0.0).sum().backward()

    def _update(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), UPDATE["clip_grad"])
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


def measure(actions: dict[str, Callable[[], float]], pairs: int) -> dict[str, list[float]]:
    """Seconds of each round; the order changes from round to round. Raises: AssertionError if the gradients differ."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for turn in range(pairs + 1):
        norms = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter()
            norms[name] = actions[name]()
            seconds[name].append(time.perf_counter() - began)
        assert max(norms.values()) < min(norms.values()) * 1.001, f"the gradients differ: {norms}"
    return {name: values[1:] for name, values in seconds.items()}  # the first round is for caches and the optimizer's state


def compare(size: str, kind: str, pairs: int, threads: int) -> list[str]:
    """Print a row; return what misses its target."""
    batch = make_batch(kind, size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = save_model(folder, size)
        learner = LearnerRank(LearnerConfig(threads=threads, **UPDATE))
        learner.load(folder)
        rival = Rival(folder, batch)
        corrected = defer(replace(batch, behavior_logprobs=learner.logprobs(batch)), CORRECTION)
        ours: dict[str, Callable[[], float]] = {"ours": lambda: learner.step(corrected, CORRECTION, step=0).grad_norm}
        seconds = measure(ours | {"padded": rival.padded, "one by one": rival.one_by_one}, pairs)
        learner.close()
    padded = batch.num_sequences * int(batch.lengths.max())
    fill = batch.num_tokens / padded
    rates = ", ".join(f"{name} {batch.num_tokens / statistics.median(values):,.0f}" for name, values in seconds.items())
    print(
        f"{parameters / 1e6:.1f}M parameters, {kind}: fill {fill:.2f}; positions computed: ours {len(ModelInputs.of(batch).token_ids):,}, "
        f"one by one {batch.num_tokens:,}, padded {padded:,} (waste {1 - fill:.0%}); tokens/s: {rates}",
        flush=True,
    )
    missed = []
    for form, target in (
        {"padded": 1 / fill, "one by one": 0.95}.items() if kind == "ragged" else {"padded": 2.0, "one by one": 2.0}.items()
    ):
        ratios = [theirs / mine for theirs, mine in zip(seconds[form], seconds["ours"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"    times {form:10s}  {median:5.2f} ({low:.2f} to {high:.2f}), target {target:.2f}", flush=True)
        if median < target:
            missed.append(f"{size} {kind}: {median:.2f} times {form}, target {target:.2f}")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batch", nargs="+", choices=("ragged", "groups"), default=["ragged", "groups"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    missed = [miss for size in options.size for kind in options.batch for miss in compare(size, kind, options.pairs, options.threads)]
    if options.check and missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
