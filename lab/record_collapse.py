"""Records the metric series for benchmarks/early_warning.py: real runs of a nano model that are disturbed, and others that are not.

    python lab/record_collapse.py --model /tmp/early-warning-model --seeds 0-11        # about half a minute a run, on one core

All runs are alike until their onset, a step from 30 to 49 that the seed decides: preset decoupled-ppo with two optimizer steps per
batch, so that importance weights have no bound, max_staleness 1, learning rate 5e-4. From then on the disturbance grows for
20 steps, and stays:

    healthy         none
    learning_rate   to ten times the rate
    staleness       max_staleness 1 to 8, and four times the rate: at the plain rate a queue of 8 batches slows the run without ending it
    noise           Gaussian noise of standard deviation 0 to 3 on the engine's logprobs, and four times the rate, for the same reason

Runs that are there already are left out, so an interrupted recording goes on where it stopped.
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

from correction import CorrectionConfig
from correction.advantages import group_advantages
from lab.kept_engines import KeptEngines, RunSettings, recipe
from lab.recorded_runs import SERIES, write_run
from learner.learner_rank import LearnerRank
from rollout.trajectory import Group

STEPS = 100
RAMP_STEPS = 20
CORRECTION = CorrectionConfig(preset="decoupled-ppo", kl={"coefficient": 1e-9, "estimator": "k1"})
"""The penalty has no weight: it is there for its number, the KL to the start, which rlwatch reads."""
OVERRIDES = ("dynamic_sampling=false", "learner.learning_rate=5e-4", "learner.warmup_steps=20")
DIGITS = 5

KEPT = (
    *("k3_kl", "mismatch_k3_kl", "stale_k3_kl", "drift_k3_kl", "target_k1_kl", "target_k3_kl", "chi2_token", "log_ratio_std", "rho_max"),
    *("ess_token", "ess_sequence", "bad_update_share", "broken_tokens", "rejected_share", "pearson", "probability_gap_mean"),
    *("perplexity_ratio", "staleness_mean", "bucket_rho_std_0", "bucket_rho_std_1", "bucket_rho_std_2", "bucket_rho_std_3"),
    *("bucket_rho_std_4", "entropy", "grad_norm", "loss", "learning_rate", "reward_mean", "reward_std", "advantage_std", "skipped_steps"),
    *("loss/clip_share", "reference_kl", "sampled_reward"),
)
"""Numbers that are recorded: all that one of the two systems reads, and some more."""


@dataclass(frozen=True)
class Disturbance:
    """What becomes of a run's settings, in the end."""

    rate_factor: float = 1.0
    max_staleness: int = 1
    mu_noise: float = 0.0


CONDITIONS = {
    "healthy": Disturbance(),
    "learning_rate": Disturbance(rate_factor=10.0),
    "staleness": Disturbance(rate_factor=4.0, max_staleness=8),
    "noise": Disturbance(rate_factor=4.0, mu_noise=3.0),
}


def onset_of(seed: int) -> int:
    """Step at which the disturbance begins; 7 and 20 have no common factor, so that 20 seeds have 20 onsets."""
    return 30 + 7 * seed % 20


def at_step(disturbance: Disturbance, step: int, onset: int) -> Disturbance:
    """As far as it has grown: linearly over the ramp."""
    share = min(max((step - onset + 1) / RAMP_STEPS, 0.0), 1.0)
    return Disturbance(
        rate_factor=1 + share * (disturbance.rate_factor - 1),
        max_staleness=1 + math.floor(share * (disturbance.max_staleness - 1)),
        mu_noise=share * disturbance.mu_noise,
    )


class Recorder(KeptEngines):
    """Kept engines whose runs change their settings on the way."""

    def record(self, disturbance: Disturbance, *, seed: int, steps: int) -> list[dict[str, float]]:
        """One run; the numbers of each step."""
        run = self._begin(CORRECTION, self.engine.version + 1, RunSettings(seed=seed, detailed=True))
        self._sync(run)
        position = seed * 1_000_003
        waiting: deque[list[Group]] = deque()
        numbers = []
        for step in range(steps):
            now = at_step(disturbance, step, onset_of(seed))
            set_learning_rate(run.learner, self.config.learner.learning_rate * now.rate_factor)
            run.settings = replace(run.settings, mu_noise=now.mu_noise)
            sampled = []
            # One batch for the one that is trained, and more of them while the queue grows.
            while len(waiting) < now.max_staleness + 1:
                groups, _ = self._loop.run(self._sample(position, run))
                position += self.config.groups_per_step
                waiting.append(groups)
                sampled.append(groups)
            groups = waiting.popleft()
            mine = run.step(step, groups) | batch_numbers(groups)
            mine["sampled_reward"] = statistics.fmean(reward for groups in sampled for reward in rewards_of(groups))
            mine["reference_kl"] = mine["loss/penalty_kl"]
            numbers.append(mine)
            self._sync(run)
        return numbers


def set_learning_rate(learner: LearnerRank, rate: float) -> None:
    """From the next step on. A run has no use for this; Megatron's schedule reads the rate of a parameter group if there is one."""
    for group in learner._require().optimizer._optimizer.param_groups:
        group["max_lr"] = rate


def rewards_of(groups: Iterable[Group]) -> list[float]:
    return [t.reward for group in groups for t in group.valid if t.reward is not None]


def batch_numbers(groups: list[Group]) -> dict[str, float]:
    """Reward and advantages of the batch that is trained, as trainers log them."""
    rewards = torch.tensor(rewards_of(groups))
    group_ids = torch.tensor([k for k, group in enumerate(groups) for t in group.valid if t.reward is not None])
    part = CORRECTION.advantage
    advantages = group_advantages(rewards, group_ids, estimator=part.estimator, ddof=part.ddof, epsilon=part.epsilon)
    return {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std()), "advantage_std": float(advantages.std())}


def as_series(numbers: list[dict[str, float]]) -> dict[str, list[float | None]]:
    """By name; None where a step has no such number."""
    return {name: [rounded(step.get(name)) for step in numbers] for name in KEPT if any(name in step for step in numbers)}


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the start model; made if it is not there")
    parser.add_argument("--seeds", default="0-11", help="first and last")
    parser.add_argument("--conditions", default=",".join(CONDITIONS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", type=Path, default=SERIES)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split("-"))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    wanted = [(seed, condition) for seed in range(first, last + 1) for condition in arguments.conditions.split(",")]
    missing = [
        (seed, condition, path) for seed, condition in wanted if not (path := arguments.folder / f"{condition}-{seed:02d}.json.gz").exists()
    ]
    if not missing:
        return
    began = time.monotonic()
    with Recorder.start(recipe(arguments.model, *OVERRIDES)) as recorder:
        for seed, condition, path in missing:
            if time.monotonic() - began > 60 * arguments.minutes:
                break
            if path.exists():  # another recorder has been here
                continue
            started = time.monotonic()
            series = as_series(recorder.record(CONDITIONS[condition], seed=seed, steps=arguments.steps))
            onset = None if condition == "healthy" else onset_of(seed)
            write_run(path, condition, seed, asdict(CONDITIONS[condition]) | {"onset": onset, "ramp_steps": RAMP_STEPS}, series)
            print(f"{path.name}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
