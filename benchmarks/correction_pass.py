"""What the correction costs: the full pass over a million tokens, against a plain copy of its inputs and against verl's helper.

    python benchmarks/correction_pass.py --make-verl /tmp/verl      # once: verl 0.9.1 in a virtual environment of its own
    python benchmarks/correction_pass.py --verl /tmp/verl

The pass is preset mis-full (truncated weights, rejection, veto, batch normalisation) and the cheap diagnostics, on one ragged batch
(lengths log-uniform from 16 to 16384) and on one of equal lengths. verl gets the same batch padded, with token truncation at 2, batch
normalisation and token_k1 rejection from 0.5 to 2; it has no veto. All contestants take turns in one run, so that
a busy machine hits all of them; ratios are of their best times, and of their medians. Where the pass takes more copies of its inputs than
it may, the exit code is 1.

    python benchmarks/correction_pass.py --every-preset             # each preset's pass against the copy, on the ragged batch
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.sides import Peer, in_turns, options, seconds_of
from evenkeel.correction import PRESETS, CorrectionConfig, PackedBatch, correct, diagnose, needs_topk, to_padded

SHORTEST, LONGEST, EQUAL = 16, 16384, 2048
VERL_NEEDS = ("torch==2.13.0", "numpy", "omegaconf", "packaging", "ray", "tensordict==0.10.0", "transformers<5.11", "codetiming", "orjson")
"""What verl's helper imports; verl itself goes without dependencies, which would be serving engines."""
VERL = Peer("verl", "verl_worker.py", (VERL_NEEDS, ("--no-deps", "verl==0.9.1")))
CONFIG = CorrectionConfig(preset="mis-full")
LIMITS = {"ragged": 5.0, "equal": 1.0}
COPY_LIMIT, MEMORY_LIMIT = 25.0, 6.0


def lengths_of(kind: str, tokens: int) -> Tensor:
    """[S] int64, their sum is `tokens`."""
    if kind == "equal":
        return torch.full((tokens // EQUAL,), EQUAL)
    generator = torch.Generator().manual_seed(0)
    drawn = (math.log(SHORTEST) + torch.rand(tokens // 8, generator=generator) * math.log(LONGEST / SHORTEST)).exp().long()
    drawn[0] = LONGEST
    count = int((drawn.cumsum(0) <= tokens - SHORTEST).sum())
    return torch.cat([drawn[:count], torch.tensor([tokens - int(drawn[:count].sum())])])


def make_batch(lengths: Tensor, seed: int) -> PackedBatch:
    """A batch of two-thirds fresh and one-third older sequences, some of mixed versions; every eighth block of 64 tokens is a tool's.

    One token in a hundred has a log ratio of spread 1, the others of 0.05.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, sequences = int(lengths.sum()), len(lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    position = torch.arange(tokens) - torch.repeat_interleave(offsets[:-1], lengths)
    mu = -torch.rand(tokens, generator=generator).clamp(min=1e-6).log().neg().mul(0.5)
    spread = torch.where(torch.rand(tokens, generator=generator) < 0.01, 1.0, 0.05)
    prox = (mu + spread * torch.randn(tokens, generator=generator)).clamp(max=0)
    age = torch.repeat_interleave(torch.randint(0, 3, (sequences,), generator=generator).sub(1).clamp(min=0), lengths)
    age += (position < torch.repeat_interleave(lengths // 4, lengths)) & (age > 0)
    return PackedBatch(
        token_ids=torch.randint(0, 150_000, (tokens,), generator=generator),
        offsets=offsets,
        loss_mask=(position // 64) % 8 != 3,
        behavior_logprobs=mu,
        advantages=torch.repeat_interleave(torch.randn(sequences, generator=generator), lengths),
        weight_versions=(7 - age).int(),
        group_ids=torch.arange(sequences) // 8,
        learner_version=7,
        proximal_logprobs=prox,
    ).validate()


def tensors_of(batch: PackedBatch) -> dict[str, Tensor]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def full_pass(batch: PackedBatch, config: CorrectionConfig = CONFIG) -> dict[str, float]:
    """What is timed."""
    return diagnose(batch, correct(batch, config))


@contextmanager
def verl_rounds(folder: Path, batch: PackedBatch, threads: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """verl's worker with the batch, padded: one round for each call."""
    real = torch.arange(int(batch.lengths.max())) < batch.lengths[:, None]
    padded = {
        "old_log_prob": to_padded(batch.proximal_logprobs, real),
        "rollout_log_prob": to_padded(batch.behavior_logprobs, real),
        "response_mask": to_padded(batch.loss_mask.long(), real),
    }
    print(f"  verl's padded batch holds {real.numel():,} tokens")
    with VERL.start(folder, OMP_NUM_THREADS=str(threads)) as ask:
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            torch.save(padded, file.name)
            ask({"file": file.name, "threads": threads})
        yield lambda: ask(None)


def last_level_cache_bytes() -> int:
    """Of the first processor; 32 MiB where the system does not say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max([int(size[:-1]) * {"K": 1024, "M": 1024**2}[size[-1]] for size in sizes if size[-1] in "KM"], default=32 * 1024**2)


def measure(kind: str, arguments: argparse.Namespace) -> float:
    """Print the comparison for one kind of batch. Returns: the pass over a copy of its inputs."""
    lengths = lengths_of(kind, arguments.tokens)
    inputs = tensors_of(make_batch(lengths, 0))
    input_bytes = sum(value.nbytes for value in inputs.values())
    # Several batches in turn, so that neither the copy nor the pass finds its inputs in the cache.
    copies = max(2, math.ceil(2 * last_level_cache_bytes() / input_bytes))
    batches = [make_batch(lengths, seed) for seed in range(copies)]
    buffers = [{name: torch.empty_like(value) for name, value in tensors_of(batch).items()} for batch in batches]
    print(f"\n{kind}: {arguments.tokens:,} tokens, {len(lengths)} sequences of {int(lengths.min())} to {int(lengths.max())}")
    print(f"  inputs: {input_bytes / 1e6:.1f} MB, {copies} such batches taken in turn; cache: {last_level_cache_bytes() / 1e6:.1f} MB")
    if kind == "ragged":
        print("  " + ", ".join(f"{name} {value.nbytes:,}" for name, value in inputs.items()) + " bytes")

    def copy(index: int) -> None:
        for name, value in tensors_of(batches[index]).items():
            buffers[index][name].copy_(value)

    def diagnosis(turn: int) -> float:
        batch = batches[turn % copies]
        corrected = correct(batch, CONFIG)
        return seconds_of(lambda: diagnose(batch, corrected))

    sides: dict[str, Callable[[int], float]] = {
        "copy": lambda turn: seconds_of(lambda: copy(turn % copies)),
        "pass": lambda turn: seconds_of(lambda: full_pass(batches[turn % copies])),
        "correct": lambda turn: seconds_of(lambda: correct(batches[turn % copies], CONFIG)),
        "diagnose": diagnosis,
    }
    with ExitStack() as stack:
        if arguments.verl:
            verl = stack.enter_context(verl_rounds(arguments.verl, batches[0], arguments.threads))
            _check_same_answer(verl()["metrics"], full_pass(batches[0]))
            sides["verl"] = lambda _: verl()["seconds"]
        # The warm-up touches every page; in this order the copy finds none of its batch in the cache.
        seconds = in_turns(sides, arguments.rounds, warm_up=copies, rotate=False)
    for name, values in seconds.items():
        print(f"  {name:9s} best {min(values) * 1e3:8.2f} ms   median {statistics.median(values) * 1e3:8.2f} ms")
    copies_of_inputs = _printed_ratio("pass / copy", seconds["pass"], seconds["copy"], f"at most {COPY_LIMIT:g}")
    if "verl" in seconds:
        _printed_ratio("verl / pass", seconds["verl"], seconds["pass"], f"at least {LIMITS[kind]:g}")
    return copies_of_inputs


def _printed_ratio(name: str, above: list[float], below: list[float], wanted: str) -> float:
    """Of the best times."""
    best, median = min(above) / min(below), statistics.median(above) / statistics.median(below)
    print(f"  {name}: {best:.1f} (of medians {median:.1f}); wanted: {wanted}")
    return best


def _check_same_answer(verl: dict[str, float], ours: dict[str, float]) -> None:
    """Both have done the same work: the k3 KL and the rejected share agree to float32."""
    for theirs, name in (("rollout_corr/k3_kl", "k3_kl"), ("rollout_corr/rollout_rs_masked_fraction", "rejected_share")):
        if not math.isclose(verl[theirs], ours[name], rel_tol=2e-3):
            raise SystemExit(f"verl's {theirs} = {verl[theirs]}, ours = {ours[name]}: the two did not do the same work")


def every_preset(arguments: argparse.Namespace) -> None:
    """Print the ratio of each preset's pass to a copy of its inputs, the largest first. What the target policy decides isn't in a pass.

    In processor time, so that a machine that is busy with other things makes the ratios coarse, and not another's.
    """
    configs = {name: CorrectionConfig(preset=name) for name in PRESETS}
    batch = make_batch(lengths_of("ragged", arguments.tokens), 0)
    stale = batch.weight_versions < batch.learner_version
    batch = replace(batch, at_sampling_logprobs=torch.where(stale, batch.proximal_logprobs, torch.nan))
    k = max(map(needs_topk, configs.values()))
    ids = torch.arange(k).repeat(batch.num_tokens, 1)
    batches = {0: batch, k: replace(batch, topk_ids=ids, topk_logprobs=torch.full(ids.shape, -4.0))}
    buffers = {name: torch.empty_like(value) for name, value in tensors_of(batches[k]).items()}

    def processor_seconds(action: Callable[[], object]) -> float:
        began = time.process_time()
        action()
        return time.process_time() - began

    def copy(own: PackedBatch) -> None:
        for name, value in tensors_of(own).items():
            buffers[name].copy_(value)

    sides = {f"copy {count}": lambda _, own=own: processor_seconds(lambda: copy(own)) for count, own in batches.items()}
    for name, config in configs.items():
        sides[name] = lambda _, config=config: processor_seconds(lambda: full_pass(batches[needs_topk(config)], config))
    with warnings.catch_warnings(action="ignore"):  # of bands that leave out nearly all of this batch
        seconds = in_turns(sides, arguments.rounds, warm_up=1)
    ratios = {name: min(seconds[name]) / min(seconds[f"copy {needs_topk(config)}"]) for name, config in configs.items()}
    for name, ratio in sorted(ratios.items(), key=lambda one: -one[1]):
        print(f"  {name:26s} {ratio:5.1f} times a copy of the inputs")
    print(f"wanted: at most {COPY_LIMIT:g}; inputs of presets that need them hold {k} top-K logprobs a token")


def profile(arguments: argparse.Namespace) -> None:
    """Print peak memory beyond the inputs, from the profiler's record of every allocation, and the five largest costs."""
    batch = make_batch(lengths_of("ragged", arguments.tokens), 0)
    input_bytes = sum(value.nbytes for value in tensors_of(batch).values())
    full_pass(batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        full_pass(batch)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    print(f"\npeak memory beyond the inputs: {peak / 1e6:.1f} MB, {peak / input_bytes:.2f} times them; wanted: at most {MEMORY_LIMIT:g}")
    averages = profiler.key_averages()
    total = sum(item.self_cpu_time_total for item in averages)
    print("largest costs of the pass (own time of the operator):")
    for item in sorted(averages, key=lambda item: -item.self_cpu_time_total)[:5]:
        print(f"  {item.key:28s} {item.self_cpu_time_total / total:6.1%} in {item.count} calls")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--every-preset", action="store_true", help="each preset's pass against the copy, and nothing else")
    arguments = VERL.parse(parser)
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, one process, {arguments.rounds} rounds in turn")
    if arguments.every_preset:
        every_preset(arguments)
        return
    ratios = {kind: measure(kind, arguments) for kind in LIMITS}
    profile(arguments)
    if over := [f"{kind}: {ratio:.1f}" for kind, ratio in ratios.items() if ratio > COPY_LIMIT]:
        raise SystemExit(f"the pass takes over {COPY_LIMIT:g} copies of its inputs ({', '.join(over)})")


if __name__ == "__main__":
    main()
