"""What bounding mismatch and staleness apart brings against bounding their product, in asynchronous runs that are small enough to be exact.

    OMP_NUM_THREADS=1 python benchmarks/bounded_apart.py                          # two minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/bounded_apart.py --seeds 5 6 7 8 9        # once more, with other ones

The world is like that of remedies.py, and is trained: a token is drawn from the softmax of one of 64 contexts, 32 words each; 48
parameters, shared by all contexts, move the logits. An answer of 16 tokens has reward 1 if enough of them are right; at the start about
every second one has. The engine samples with the weights of `staleness` updates ago. Its logits are the learner's plus noise that is fixed
for a context and a word: Student's t with 3 degrees of freedom, so that a few words differ much, as strong as makes KL(mu || pi_v) the
wanted one at the start. A step is one of Adam on a batch of 64 answers, deferred, as a run defers it. The outcome of a run is the expected
reward of pi_theta, a closed form, averaged over its 60 steps: how fast it learns, and whether it keeps it.

Three ways to bound, each with the same constants on q = theta / mu (together) and on m = pi_v / mu and theta / pi_v (apart):

    clip        PPO(q; 0.8, 1.2)                      min(m, 2) PPO(theta / pi_v; 0.8, 1.2)       presets bypass and split-tis
    truncate    -sg[min(q, 2)] A log theta            -sg[min(m, 2) min(theta / pi_v, 2)] A log theta
    mask        -sg[q 1(0.5 <= q <= 2)] A log theta   -sg[q 1(0.5 <= m <= 2) 1(0.5 <= theta / pi_v <= 2)] A log theta

Named beforehand. Null: in no cell does bounding apart end otherwise than bounding together. A difference is of pairs with the same seed
(start, noise, parameters and draws); it counts where it is over 2.78 of its standard errors (5 %, Student's t with 4 degrees of freedom).
Of 36 differences 1.8 are expected to count where nothing is there. Rate, steps and constants were chosen on a seed that isn't among the
five.
"""

from __future__ import annotations

import math
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.remedies import at_least
from benchmarks.sides import options
from evenkeel.correction import CorrectionConfig, PackedBatch, defer, policy_loss

CONTEXTS, WORDS, PARAMETERS, LENGTH = 64, 32, 48, 16
ANSWERS, STEPS, RATE = 64, 60, 0.2
KLS, STALENESS, SEEDS = (1e-4, 1e-3, 1e-2), (1, 2, 4, 8), range(5)
CRITICAL = 2.776
"""Of Student's t: two-sided, 5 %, 4 degrees of freedom."""
BAND: dict[str, Any] = {"lower": 0.5, "upper": 2.0}


def _score(ratio: str, **more: Any) -> dict[str, Any]:
    return {"kind": "score", "ratio": ratio, **more}


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clip": ({"preset": "bypass"}, {"preset": "split-tis"}),
    "truncate": (
        {"objective": _score("q", upper=2.0)},
        {
            "objective": _score("since_sampling", upper=2.0),
            "importance": {"mode": "truncate", "ratio": "mismatch", "upper": 2.0},
        },
    ),
    "mask": (
        {"objective": _score("q"), "rejection": [{"ratio": "q", **BAND}]},
        {
            "objective": _score("since_sampling"),
            "importance": {"mode": "raw", "ratio": "mismatch"},
            "rejection": [{"ratio": "mismatch", **BAND}, {"ratio": "since_sampling", **BAND}],
        },
    ),
}
"""Settings that bound together, and apart."""


@dataclass(frozen=True)
class World:
    """Where a run starts, what moves it, what its engine adds, and what is right."""

    start: Tensor
    """[C, V] float64 logits."""
    features: Tensor
    """[C, V, D] float64: gradient of the logits by the parameters."""
    noise: Tensor
    """[C, V] float64, added to the engine's logits."""
    right: Tensor
    """[C, V] float64, 1 for the words that count."""

    @classmethod
    def of_kl(cls, kl: float, seed: int) -> World:
        """With noise by which the mean of KL(mu || pi) over the contexts is `kl` nats at the start."""
        draw = torch.Generator().manual_seed(seed)
        normal = torch.randn(6, CONTEXTS, WORDS, generator=draw, dtype=torch.float64)
        features = torch.randn(CONTEXTS, WORDS, PARAMETERS, generator=draw, dtype=torch.float64) / math.sqrt(PARAMETERS)
        start, heavy = 2 * normal[0], normal[2] / (normal[3:].square().sum(0) / 3).sqrt()
        low, high = 0.0, 10.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if kl_between(start + middle * heavy, start) < kl else (low, middle)
        return cls(start, features, high * heavy, (normal[1] > 0).double())

    def logits(self, parameters: Tensor) -> Tensor:
        """[C, V]. Args: parameters: [D]."""
        return self.start + self.features @ parameters

    def right_share(self, logits: Tensor) -> float:
        """Probability that a token is right."""
        return float((logits.softmax(-1) * self.right).sum(-1).mean())

    @property
    def needed(self) -> int:
        """Right tokens by which an answer has its reward."""
        return max(round(LENGTH * self.right_share(self.start)), 1)

    def reward(self, logits: Tensor) -> float:
        """Expected reward of an answer."""
        return at_least(self.needed, LENGTH, self.right_share(logits))


def kl_between(engine: Tensor, learner: Tensor) -> float:
    """Mean over contexts of KL(engine || learner), nats. Args: logits."""
    mu = engine.log_softmax(-1)
    return float((mu.exp() * (mu - learner.log_softmax(-1))).sum(-1).mean())


def batch_of(world: World, sampling: Tensor, *, age: int, draw: torch.Generator) -> tuple[PackedBatch, Tensor]:
    """Answers that the engine samples with weights `age` versions old, whose logits [C, V] are given; and their contexts [N]."""
    contexts = torch.randint(CONTEXTS, (ANSWERS * LENGTH,), generator=draw)
    mu, then = (sampling + world.noise).log_softmax(-1)[contexts], sampling.log_softmax(-1)[contexts]
    words = torch.multinomial(mu.exp(), 1, generator=draw)
    reached = (world.right[contexts, words[:, 0]].view(ANSWERS, LENGTH).sum(1) >= world.needed).double()
    batch = PackedBatch(
        token_ids=words[:, 0],
        offsets=torch.arange(ANSWERS + 1) * LENGTH,
        loss_mask=torch.ones(contexts.numel(), dtype=torch.bool),
        behavior_logprobs=mu.gather(1, words)[:, 0],
        at_sampling_logprobs=torch.where(torch.tensor(age > 0), then.gather(1, words)[:, 0], torch.nan),
        advantages=(reached - reached.mean()).repeat_interleave(LENGTH),
        weight_versions=torch.zeros(contexts.numel(), dtype=torch.int32),
        learner_version=age,
        group_ids=torch.zeros(ANSWERS, dtype=torch.int64),
        advantages_by="own",
    )
    return batch, contexts


@dataclass(frozen=True)
class Outcome:
    """Of one run."""

    reward: float
    """Expected reward, averaged over its steps."""
    staleness_kl: float
    """KL(pi_v || pi_prox) of a step's batch, nats, the mean over its steps."""


def outcome(settings: dict[str, Any], kl: float, staleness: int, seed: int, *, steps: int = STEPS) -> Outcome:
    """Train once."""
    world, config, draw = World.of_kl(kl, seed), CorrectionConfig(**settings), torch.Generator().manual_seed(1000 + seed)
    parameters = torch.zeros(PARAMETERS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([parameters], lr=RATE)
    versions, rewards, gaps = [world.start], [], []
    for step in range(steps):
        age = min(staleness, step)
        batch, contexts = batch_of(world, versions[step - age], age=age, draw=draw)
        gaps.append(kl_between(versions[step - age], versions[step]))
        target = world.logits(parameters).log_softmax(-1)[contexts, batch.token_ids]
        policy_loss(defer(batch, config), target, config).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        versions.append(world.logits(parameters.detach()))
        rewards.append(world.reward(versions[-1]))
    return Outcome(statistics.fmean(rewards), statistics.fmean(gaps))


@dataclass(frozen=True)
class Difference:
    """Of the paired outcomes of two settings in one cell."""

    mean: float
    error: float
    """Standard error."""

    @classmethod
    def of(cls, apart: Sequence[float], together: Sequence[float]) -> Difference:
        each = [one - other for one, other in zip(apart, together, strict=True)]
        return cls(statistics.fmean(each), statistics.stdev(each) / math.sqrt(len(each)))

    @property
    def counts(self) -> bool:
        return abs(self.mean) > CRITICAL * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.error:.3f}{' *' if self.counts else ''}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run")
    parser.add_argument("--seeds", type=int, nargs=len(SEEDS), default=SEEDS, help="of a cell's runs, as many as the critical value is for")
    arguments = parser.parse_args()
    steps, seeds = arguments.steps, arguments.seeds
    warnings.simplefilter("ignore", UserWarning)
    print(f"| k3 of mismatch | staleness | its k3 | {' | '.join(f'{form}, together | {form}, apart less together' for form in FORMS)} |")
    print("|" + " --- |" * (3 + 2 * len(FORMS)))
    found: list[Difference] = []
    for kl in KLS:
        for staleness in STALENESS:
            cells, gaps = [], []
            for settings in FORMS.values():
                together, apart = ([outcome(own, kl, staleness, seed, steps=steps) for seed in seeds] for own in settings)
                found.append(Difference.of([one.reward for one in apart], [one.reward for one in together]))
                cells += [f"{statistics.fmean(one.reward for one in together):.3f}", str(found[-1])]
                gaps += [one.staleness_kl for one in together]
            print(f"| {kl:g} | {staleness} | {statistics.fmean(gaps):.2g} | {' | '.join(cells)} |", flush=True)
    for sign, word in ((1, "better"), (-1, "worse")):
        print(f"apart is {word} in {sum(one.counts and one.mean * sign > 0 for one in found)} of {len(found)} differences, where it counts")


if __name__ == "__main__":
    main()
