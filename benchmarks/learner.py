"""Tokens per second of a training step, against a plain Hugging Face model with torch's AdamW on the same batch.

    python benchmarks/learner.py [--size 3M 60M] [--batch ragged groups] [--pairs 7] [--threads 1] [--check]

The rival runs in two forms: one padded batch, and one sequence at a time, accumulating gradients (the honest one: most of what packing
gains is the padding). Both have transformers' model with sdpa, compute no logits before the first trained token's, and make the
same update: the same gradient, clipped, and AdamW. That the three gradients have the same norm is checked on the way. The learner does its
whole step, correction and entropies included.
Batches: `ragged` has sequences of their own with lengths from a fifth of the longest on (fill, real tokens over padded positions, about
0.6); `groups` has 8 answers of 8 to 32 tokens to each prompt of 68, which the learner reads once.
The three take turns in one run, so that a busy machine hits all; printed are medians of the rounds' ratios, with quartiles. `waste` is the
share of computed positions that padding makes up. `--check` fails if a ratio misses its target: for `ragged` 1/fill padded and 0.95 one by
one, for `groups` 2 of both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package learner, not this file

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.sides import TimeRatio, in_turns, options, seconds_of
from benchmarks.workloads import lengths_of_groups, random_batch, save_model
from evenkeel.correction import CorrectionConfig, PackedBatch, defer
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model.inputs import ModelInputs

CORRECTION = CorrectionConfig(preset="tis-token")
VOCABULARIES = {"3M": 512, "60M": 8192}
LONGEST, SEQUENCES, GROUPS = 128, {"3M": 24, "60M": 8}, {"3M": 8, "60M": 2}
SAMPLES, PROMPT, ANSWERS = 8, 68, (8, 32)
UPDATE: dict[str, Any] = {"learning_rate": 0.0, "betas": (0.9, 0.99), "clip_grad": 1.0}
"""At a rate of 0 the work is the same and the weights stay, so that every round has the same gradient."""


def make_batch(kind: str, size: str) -> PackedBatch:
    """Behaviour logprobs are still to be filled in."""
    if kind == "groups":
        return random_batch(lengths_of_groups(GROUPS[size], SAMPLES, (PROMPT, PROMPT), ANSWERS), SAMPLES, VOCABULARIES[size])
    lengths = torch.linspace(LONGEST / 5, LONGEST, SEQUENCES[size]).round().long().tolist()
    return random_batch([(4, length - 4) for length in lengths], 1, VOCABULARIES[size])


class Rival:
    """A plain training step: Hugging Face's model, logprobs by log_softmax, torch's AdamW."""

    def __init__(self, folder: Path, batch: PackedBatch, dtype: torch.dtype = torch.float32) -> None:
        """Args: dtype: of the weights and of Adam's averages."""
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, betas=UPDATE["betas"], weight_decay=0.0)
        of_token = batch.token_ids, batch.loss_mask, batch.advantages / batch.loss_mask.sum()
        self._ids, self._masks, self._scales = (values.split(batch.lengths.tolist()) for values in of_token)

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
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, first:, None])[..., 0]
        torch.where(mask[:, first:], -logprobs * scale[:, first:], 0.0).sum().backward()

    def _update(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), UPDATE["clip_grad"])
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


def measure(actions: dict[str, Callable[[], float]], pairs: int, *, differ: float = 1e-3) -> dict[str, list[float]]:
    """Seconds of each round. Raises: AssertionError if the gradients' norms differ by more, as a share."""
    norms: dict[str, float] = {}

    def step(name: str) -> float:
        seconds = seconds_of(lambda: norms.update({name: actions[name]()}))
        assert max(norms.values()) < min(norms.values()) * (1 + differ), f"the gradients differ: {norms}"
        return seconds

    return in_turns({name: lambda _, name=name: step(name) for name in actions}, pairs, warm_up=1)


def compare(size: str, kind: str, pairs: int, threads: int) -> list[str]:
    """Print a row; return what misses its target."""
    batch = make_batch(kind, size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = save_model(folder, size, VOCABULARIES[size])
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
    for form, target in (("padded", 1 / fill), ("one by one", 0.95)) if kind == "ragged" else (("padded", 2.0), ("one by one", 2.0)):
        ratio = TimeRatio.of(seconds[form], seconds["ours"])
        print(f"    times {form:10s}  {ratio}, target {target:.2f}", flush=True)
        if ratio.median < target:
            missed.append(f"{size} {kind}: {ratio.median:.2f} times {form}, target {target:.2f}")
    return missed


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--size", nargs="+", choices=VOCABULARIES, default=list(VOCABULARIES))
    parser.add_argument("--batch", nargs="+", choices=("ragged", "groups"), default=["ragged", "groups"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases = [(size, kind) for size in arguments.size for kind in arguments.batch]
    missed = [miss for size, kind in cases for miss in compare(size, kind, arguments.pairs, arguments.threads)]
    if arguments.check and missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
