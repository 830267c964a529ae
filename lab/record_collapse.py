"""Records the metric series for benchmarks/early_warning.py: real runs of a nano model that are disturbed, and others that are not.

    python lab/record_collapse.py --model /tmp/early-warning-model --seeds 0-11        # about half a minute a run, on one core
    python lab/record_collapse.py --model /tmp/early-warning --engines bfloat16,float16,float8 --conditions healthy,steep_rate \\
        --seeds 0-9 --folder benchmarks/series/mismatch                                # mismatch of the engines, at staleness 0

All runs are alike until their onset, a step from 30 to 49 that the seed decides: preset decoupled-ppo with two optimizer steps per
batch, so that importance weights have no bound, and learning rate 5e-4. From then on the disturbance grows for 20 steps, and stays:

    healthy         none
    learning_rate   to ten times the rate
    staleness       max_staleness 1 to 8, and four times the rate: at the plain rate a queue of 8 batches slows the run without ending it
    steep_rate      to thirty times the rate: fresh batches stand ten times it better, and some of those runs are hurt without being lost
    noise           Gaussian noise of standard deviation 0 to 3 on the engine's logprobs, and four times the rate, for the same reason

The engine decides what the gap between mu and pi_prox is made of. The learner computes in float32, always:

    float32         the learner's arithmetic; max_staleness 1: all that is seen is staleness
    bfloat16, float16   weights, cache and arithmetic of the engine in that format; every batch is fresh: all that is seen is mismatch
    float8          the same in bfloat16, and the projections' weights rounded to float8 e4m3 with one scale a tensor before they are sent
    float8_blocks   with one scale for each block of 32 x 32, as block-wise formats have (128 x 128 on models of usual width)
    moe_bfloat16    bfloat16, and 8 experts of which each token goes to 2

Runs that are there already are left out, and a run is written when it is done: an interrupted recording goes on where it stopped.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from evenkeel.correction import CorrectionConfig
from evenkeel.correction.terms.advantages import group_advantages
from evenkeel.engines.float8_format import is_projection
from evenkeel.engines.weights import WeightBucket
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.rollout.trajectory import Group
from lab.float8 import rounded_weight
from lab.kept_engines import KeptEngines, KeptRun, RunSettings, recipe
from lab.recorded_runs import SERIES, RecordedBatch, write_run
from lab.weight_buckets import weight_buckets

STEPS = 100
RAMP_STEPS = 20
CORRECTION = CorrectionConfig(preset="decoupled-ppo", kl={"coefficient": 1e-9, "estimator": "k1"})
"""The penalty has no weight: it is there for its number, the KL to the start, which rlwatch reads."""
OVERRIDES = ("dynamic_sampling=false", "learner.learning_rate=5e-4", "learner.warmup_steps=20")
DIGITS = 5
BATCH_STEPS = (0, 29, STEPS - 1)
"""Of seed 0: steps of which the batch's logprobs are recorded too; the second is the last that no onset has touched."""

KEPT = (
    *("k3_kl", "mismatch_k3_kl", "stale_k3_kl", "drift_k3_kl", "target_k1_kl", "target_k3_kl", "chi2_token", "log_ratio_std", "rho_max"),
    *("mismatch_log_ratio_mean", "mismatch_log_ratio_std", "mismatch_rho_std", "mismatch_rho_max", "mismatch_pearson"),
    *("ess_token", "ess_sequence", "bad_update_share", "broken_tokens", "rejected_share", "pearson", "probability_gap_mean"),
    *("perplexity_ratio", "staleness_mean", "bucket_rho_std_0", "bucket_rho_std_1", "bucket_rho_std_2", "bucket_rho_std_3"),
    *("bucket_rho_std_4", "entropy", "grad_norm", "loss", "learning_rate", "reward_mean", "reward_std", "advantage_std", "skipped_steps"),
    *("learner/clip_share", "reference_kl", "sampled_reward"),
)
"""Numbers that are recorded: all that one of the two systems reads, and some more."""


@dataclass(frozen=True)
class Disturbance:
    """How a run's settings are disturbed, once the disturbance has fully grown."""

    rate_factor: float = 1.0
    max_staleness: int = 1
    mu_noise: float = 0.0


CONDITIONS = {
    "healthy": Disturbance(),
    "learning_rate": Disturbance(rate_factor=10.0),
    "staleness": Disturbance(rate_factor=4.0, max_staleness=8),
    "noise": Disturbance(rate_factor=4.0, mu_noise=3.0),
    "steep_rate": Disturbance(rate_factor=30.0),
}


@dataclass(frozen=True)
class SamplingEngine:
    """What samples."""

    overrides: tuple[str, ...] = ()
    """Of the recipe."""
    max_staleness: int = 0
    """Values of an undisturbed run."""
    float8_block: int | None = None
    """Rows and columns that share a scale when the projections' weights are rounded to float8; 0: the whole tensor; None: not rounded."""

    def model(self, folder: Path, name: str) -> Path:
        """Folder of the start model: one of its own if its architecture is."""
        return folder.with_name(f"{folder.name}-{name}") if any(one.startswith("init.") for one in self.overrides) else folder

    @property
    def conditions(self) -> tuple[str, ...]:
        """Those that leave its gap what it is: none but float32 is made stale or given noise."""
        return ("healthy", "learning_rate", "staleness", "noise") if self.max_staleness else ("healthy", "learning_rate", "steep_rate")


BFLOAT16 = ("rollout.engine.dtype=bfloat16",)
EXPERTS = ("experts=8", "experts_per_token=2", "intermediate_size=96", "tie_word_embeddings=false")
ENGINES = {
    "float32": SamplingEngine(max_staleness=1),
    "bfloat16": SamplingEngine(BFLOAT16),
    "float16": SamplingEngine(("rollout.engine.dtype=float16",)),
    "float8": SamplingEngine(BFLOAT16, float8_block=0),
    "float8_blocks": SamplingEngine(BFLOAT16, float8_block=32),
    "moe_bfloat16": SamplingEngine((*BFLOAT16, *(f"init.architecture.{one}" for one in EXPERTS))),
}


def onset_of(seed: int) -> int:
    """Step at which the disturbance begins; 7 and 20 have no common factor, so that 20 seeds have 20 onsets."""
    return 30 + 7 * seed % 20


def at_step(disturbance: Disturbance, step: int, onset: int) -> Disturbance:
    """The disturbance at a step: it grows linearly over the ramp, from an undisturbed float32 run."""
    share = min(max((step - onset + 1) / RAMP_STEPS, 0.0), 1.0)
    return Disturbance(
        rate_factor=1 + share * (disturbance.rate_factor - 1),
        max_staleness=1 + math.floor(share * (disturbance.max_staleness - 1)),
        mu_noise=share * disturbance.mu_noise,
    )


class Recorder(KeptEngines):
    """Kept engines whose runs change their settings on the way."""

    kind = SamplingEngine(max_staleness=1)
    """Of the engine that was started."""
    batches: dict[int, RecordedBatch]
    """Of the last run, by step."""

    def _sync(self, run: KeptRun) -> float:
        """Send the weights in the engine's format, to which the learner's are rounded."""
        began = time.monotonic()
        dtype = getattr(torch, self.config.rollout.engine.resolved_dtype)
        buckets = [rounded_bucket(bucket, dtype, self.kind.float8_block) for bucket in weight_buckets(run.learner)]
        self._loop.run(self.engine.update_weights(run.version, buckets))
        return time.monotonic() - began

    def record(self, disturbance: Disturbance, *, seed: int, steps: int) -> list[dict[str, float]]:
        """One run; the numbers of each step."""
        run = self._begin(CORRECTION, self.engine.version + 1, RunSettings(seed=seed, detailed=True))
        self._sync(run)
        position = seed * 1_000_003
        waiting: deque[list[Group]] = deque()
        numbers, self.batches = [], {}
        for step in range(steps):
            now = at_step(disturbance, step, onset_of(seed))
            set_learning_rate(run.learner, self.config.learner.learning_rate * now.rate_factor)
            run.settings = replace(run.settings, mu_noise=now.mu_noise)
            sampled = []
            # One batch for the one that is trained, and more of them while the queue grows.
            while len(waiting) <= (now.max_staleness if self.kind.max_staleness else 0):
                groups, _ = self._loop.run(self._sample(position, run))
                position += self.config.groups_per_step
                waiting.append(groups)
                sampled.append(groups)
            groups = waiting.popleft()
            if seed == 0 and step in BATCH_STEPS:
                self.batches[step] = logprobs_of(run, groups)
            mine = run.step(step, groups) | batch_numbers(groups)
            mine["sampled_reward"] = statistics.fmean(reward for groups in sampled for reward in rewards_of(groups))
            mine["reference_kl"] = mine["learner/reference_kl"]
            numbers.append(mine)
            self._sync(run)
        return numbers


def rounded_bucket(bucket: WeightBucket, dtype: torch.dtype, block: int | None) -> WeightBucket:
    """The bucket in the engine's dtype; its projections in float8 before that, unless block is None."""
    tensors = bucket.tensors()
    if block is not None:
        tensors = {name: rounded_weight(one, block) if is_projection(name) else one for name, one in tensors.items()}
    return WeightBucket.of({name: one.to(dtype) for name, one in tensors.items()})


def set_learning_rate(learner: LearnerRank, rate: float) -> None:
    """From the next step on. A run has no use for this; Megatron's schedule reads the rate of a parameter group if there is one."""
    for group in learner.optimizer.param_groups:
        group["max_lr"] = rate


def logprobs_of(run: KeptRun, groups: list[Group]) -> RecordedBatch:
    """mu and pi_prox of the tokens that are about to be trained."""
    batch = run.packed(groups)
    proximal, mask = run.learner.logprobs(batch), batch.loss_mask
    lengths = [int(part.sum()) for part in mask.split(batch.lengths.tolist())]
    behavior, own, advantages = (
        [rounded(value, 9) for value in values[mask].tolist()] for values in (batch.behavior_logprobs, proximal, batch.advantages)
    )
    return {"lengths": lengths, "behavior": behavior, "proximal": own, "advantages": advantages}


def rewards_of(groups: Iterable[Group]) -> list[float]:
    return [t.reward for group in groups for t in group.valid if t.reward is not None]


def batch_numbers(groups: list[Group]) -> dict[str, float]:
    """Reward and advantages of the batch that is trained, as trainers log them."""
    rewards = torch.tensor(rewards_of(groups))
    group_ids = torch.tensor([k for k, group in enumerate(groups) for t in group.valid if t.reward is not None])
    part = CORRECTION.advantage
    advantages = group_advantages(rewards, group_ids, **part.of_group)
    return {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std()), "advantage_std": float(advantages.std())}


def as_series(numbers: list[dict[str, float]]) -> dict[str, list[float | None]]:
    """By name; None where a step has no such number."""
    return {name: [rounded(step.get(name)) for step in numbers] for name in KEPT if any(name in step for step in numbers)}


def rounded(value: float | None, digits: int = DIGITS) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


@dataclass(frozen=True)
class WantedRun:
    """A run to record."""

    engine: str
    condition: str
    seed: int

    @property
    def name(self) -> str:
        """Of its condition in the record; a float32 engine isn't named."""
        return self.condition if self.engine == "float32" else f"{self.engine}-{self.condition}"

    @property
    def settings(self) -> dict[str, object]:
        """What the settings became in the end."""
        disturbance, onset = asdict(CONDITIONS[self.condition]), None if self.condition == "healthy" else onset_of(self.seed)
        if ENGINES[self.engine].max_staleness == 0:
            disturbance["max_staleness"] = 0
        return disturbance | {"onset": onset, "ramp_steps": RAMP_STEPS, "engine": self.engine}

    def path(self, folder: Path) -> Path:
        return folder / f"{self.name}-{self.seed:02d}.json.gz"


def wanted_runs(engine: str, conditions: Iterable[str], seeds: Iterable[int]) -> list[WantedRun]:
    """Seed by seed, so that an interrupted recording has runs of every condition."""
    return [WantedRun(engine, one, seed) for seed in seeds for one in conditions if one in ENGINES[engine].conditions]


def record_missing(engine: str, wanted: Iterable[WantedRun], arguments: argparse.Namespace, deadline: float) -> None:
    """Record those that are not there, by one engine; none is begun after the deadline."""
    missing = [one for one in wanted if not one.path(arguments.folder).exists()]
    if not missing or time.monotonic() > deadline:
        return
    kind = ENGINES[engine]
    with Recorder.start(recipe(kind.model(arguments.model, engine), *OVERRIDES, *kind.overrides)) as recorder:
        assert isinstance(recorder, Recorder)
        recorder.kind = kind
        for one in missing:
            if time.monotonic() > deadline:
                break
            if one.path(arguments.folder).exists():  # another recorder has been here
                continue
            started = time.monotonic()
            series = as_series(recorder.record(CONDITIONS[one.condition], seed=one.seed, steps=arguments.steps))
            write_run(one.path(arguments.folder), one.name, one.seed, one.settings, series, recorder.batches)
            print(f"{one.path(arguments.folder).name}: {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the start model; made if it is not there")
    parser.add_argument("--engines", default="float32", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--seeds", default="0-11", help="first and last")
    parser.add_argument("--conditions", default=",".join(CONDITIONS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", type=Path, default=SERIES)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split("-"))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    for engine in arguments.engines.split(","):
        if engine not in ENGINES:
            parser.error(f"--engines: {engine} is none of {', '.join(ENGINES)}")
        record_missing(engine, wanted_runs(engine, arguments.conditions.split(","), range(first, last + 1)), arguments, deadline)


if __name__ == "__main__":
    main()
