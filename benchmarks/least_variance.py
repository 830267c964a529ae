"""What baselines of least variance, and a learning rate by effective sample size, bring on stale data, where the gradient's norm is exact.

    OMP_NUM_THREADS=1 python benchmarks/least_variance.py          # two minutes on one core

The world, its rate and its outcome are those of bounded_apart.py (k3 of mismatch 1e-3), in groups; a step is one of Adam on 64 answers with
the weights w = min(prod theta / mu, 2) of preset pg-sequence. Against the group's mean reward R as baseline:

    vcpo    b = sum w^2 g^2 R / sum w^2 g^2 over the group, g the norm of an answer's grad log pi by all parameters (VCPO, arXiv 2602.17616)
    otb     at the t-th token b = sum w^2 W R / sum w^2 W, W the sum over the tokens up to it of 1 - 2 pi + sum of pi^2 over the words (OTB,
            arXiv 2602.07078)
    ess     the group's mean, and the rate times the root of ESS / 64 (step_size.by: ess)

A group's own answers are in its baseline, as in both papers' code. Named beforehand. Null: in no cell does one of them end otherwise than
the mean. A difference is of pairs with the same seed; it counts where it is over 2.78 of its standard errors (5 %, Student's t with 4
degrees of freedom). Of 24 differences 1.2 are expected to count where nothing is there.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.bounded_apart import ANSWERS, LENGTH, PARAMETERS, RATE, SEEDS, STALENESS, STEPS, Difference, World, batch_of
from benchmarks.sides import options
from evenkeel.correction import CorrectionConfig, defer, policy_loss, step_size_factor

KL, GROUPS = 1e-3, (4, 8)

Baseline = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""[G, n, t] or what spreads to it, of rewards [G, n], weights [G, n], squared norms [G, n] and energies [G, n, t]."""


def weighted(rewards: Tensor, weights: Tensor) -> Tensor:
    """[G, 1, ...] the mean of the rewards over each group's n answers, weighted. Args: both [G, n, ...]."""
    return (weights * rewards).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1e-8)


BASELINES: dict[str, Baseline] = {
    "mean": lambda rewards, weights, norms, energies: rewards.mean(1)[:, None, None],
    "vcpo": lambda rewards, weights, norms, energies: weighted(rewards, weights.square() * norms)[..., None],
    "otb": lambda rewards, weights, norms, energies: weighted(rewards[..., None], weights.square()[..., None] * energies),
}


def squared_norms(world: World, logits: Tensor, contexts: Tensor, words: Tensor) -> Tensor:
    """[answers] of the gradient of log pi of each answer by all parameters. Args: logits [C, V]; contexts, words [N]."""
    mean = torch.einsum("cv,cvd->cd", logits.softmax(-1), world.features)
    return (world.features[contexts, words] - mean[contexts]).view(-1, LENGTH, PARAMETERS).sum(1).square().sum(-1)


def energies(logits: Tensor, contexts: Tensor, words: Tensor) -> Tensor:
    """[answers, LENGTH] OTB's W: of the gradients by the logits alone."""
    p = logits.softmax(-1)
    each = 1 - 2 * p[contexts, words] + p.square().sum(-1)[contexts]
    return each.view(-1, LENGTH).cumsum(1)


def outcome(baseline: str, staleness: int, group: int, seed: int, *, by: str = "off", steps: int = STEPS) -> float:
    """Train once. Returns: the expected reward, averaged over the steps."""
    world, draw = World.of_kl(KL, seed), torch.Generator().manual_seed(1000 + seed)
    config = CorrectionConfig(preset="pg-sequence", denominator={"kind": "sequence_sum"}, step_size={"by": by})
    parameters = torch.zeros(PARAMETERS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([parameters], lr=RATE)
    versions, rewards = [world.start], []
    for step in range(steps):
        age = min(staleness, step)
        batch, contexts = batch_of(world, versions[step - age], age=age, draw=draw)
        words, logits = batch.token_ids, versions[step]
        target = world.logits(parameters).log_softmax(-1)[contexts, words]
        weights = (target.detach() - batch.behavior_logprobs).view(-1, LENGTH).sum(1).exp().clamp(max=2)
        reached = (world.right[contexts, words].view(-1, LENGTH).sum(1) >= world.needed).double()
        in_groups = (one.view(-1, group, *one.shape[1:]) for one in (reached, weights, squared_norms(world, logits, contexts, words)))
        by_token = energies(logits, contexts, words).view(-1, group, LENGTH)
        value = BASELINES[baseline](*in_groups, by_token)
        advantages = (reached.view(-1, group, 1) - value).expand(-1, -1, LENGTH).reshape(-1)
        ids = torch.arange(ANSWERS) // group
        trained = policy_loss(defer(replace(batch, advantages=advantages, group_ids=ids), config), target, config)
        trained.loss.backward()
        optimizer.param_groups[0]["lr"] = RATE * step_size_factor(trained.partials, config)
        optimizer.step()
        optimizer.zero_grad()
        versions.append(world.logits(parameters.detach()))
        rewards.append(world.reward(versions[-1]))
    return statistics.fmean(rewards)


OTHERS = {"vcpo": ("vcpo", "off"), "otb": ("otb", "off"), "ess": ("mean", "ess")}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run")
    steps = parser.parse_args().steps
    warnings.simplefilter("ignore", UserWarning)
    print(f"| answers a group | staleness | mean | {' | '.join(f'{name} less mean' for name in OTHERS)} |")
    print("|" + " --- |" * (3 + len(OTHERS)))
    found: list[Difference] = []
    for group in GROUPS:
        for staleness in STALENESS:
            usual = [outcome("mean", staleness, group, seed, steps=steps) for seed in SEEDS]
            cells = []
            for baseline, by in OTHERS.values():
                own = [outcome(baseline, staleness, group, seed, by=by, steps=steps) for seed in SEEDS]
                found.append(Difference.of(own, usual))
                cells.append(str(found[-1]))
            print(f"| {group} | {staleness} | {statistics.fmean(usual):.3f} | {' | '.join(cells)} |", flush=True)
    for sign, word in ((1, "better"), (-1, "worse")):
        count = sum(one.counts and one.mean * sign > 0 for one in found)
        print(f"{word} than the mean in {count} of {len(found)} differences, where it counts")


if __name__ == "__main__":
    main()
