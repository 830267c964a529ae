"""What each correction leaves of a batch, and how wrong the gradient is that it gives: kept share, sample size, bias and noise.

    OMP_NUM_THREADS=1 python benchmarks/remedies.py [--picture docs/images/remedies.png]        # two minutes on one core

The policy is small enough to be exact. A token is drawn from the softmax of one of 256 contexts, 64 words each; the engine's logits are the
learner's plus Gaussian noise, fixed for a context, of the strength at which KL(mu || pi_prox) is the wanted one. So E_mu[rho] = 1 holds
exactly, and a part of the mismatch is systematic, as that of number formats is. An answer has reward 1 if enough of its tokens are "right"
(about every second answer is that good), else 0: a verifier, which couples the tokens. Four parameters are shared by all
contexts. The gradient of the expected reward under pi_prox, which a correction is to give, is a closed form. So is what the plain gradient
on the engine's samples is on average, and the one with each token's ratio as weight; the other expectations are means over samples, with
one of these two as control variate.

For each preset, KL and length, at the first optimizer step of a batch (theta = prox):

    kept        share of the tokens with a gradient; under a thousandth of a gradient is none
    ESS         effective sample size of the sequences' mean coefficients, as a share of all
    bias        length of (mean gradient - exact gradient) over that of the exact one; 1 where nothing is left
    noise       standard deviation of a batch's gradient against that of a batch sampled by pi_prox itself
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.remedy_outcome import RemedyOutcome
from benchmarks.sides import options
from evenkeel.correction import CorrectionConfig, PackedBatch, correct, policy_loss, settle
from evenkeel.correction.settings.choices import DenominatorKind
from lab.recorded_runs import SERIES, RecordedBatch, RecordedRun, load_runs

CONTEXTS, WORDS, PARAMETERS = 256, 64, 4
KLS = (1e-4, 1e-3, 1e-2, 1e-1)
LENGTHS = (8, 32, 128, 512, 2048, 8192)
TOKENS, SEQUENCES = 2**20, 2**14
"""Most of a cell's sample."""
LEAST = 1e-3
"""A token with a smaller coefficient counts as left out."""
PRESETS = (
    *("ppo", "tis-token", "mis-token", "mis-full", "icepop", "kpop", "m2po", "m2po-areal", "decoupled-ppo"),
    *("tis-sequence", "mis-sequence", "mis-sequence-upper", "mis-geometric", "mis-geometric-miles", "seq-mask-tis"),
    *("dppo-binary-tv", "dppo-binary-kl", "pg-tis", "rollout-is"),
)
"""Answers to a gap between engine and learner: what the monitor names or could name. ppo: no answer."""


@dataclass(frozen=True)
class ExactPolicy:
    """The learner's policy pi_prox, the engine's mu, and the task."""

    learner: Tensor
    """[C, V] float64 logits."""
    engine: Tensor
    """[C, V] float64 logits."""
    right: Tensor
    """[C, V] float64, 1 for the words that count."""
    features: Tensor
    """[C, V, D] float64: gradient of the logits by the parameters."""

    @classmethod
    def of_kl(cls, kl: float, seed: int = 0) -> ExactPolicy:
        """With noise on the engine's logits by which the mean of KL(mu || pi_prox) over the contexts is `kl` nats."""
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        sharpness = torch.linspace(0.0, math.log(6), CONTEXTS, dtype=torch.float64).exp()  # from 3.7 nats of entropy to nearly none
        learner, noise = sharpness[:, None] * normal(CONTEXTS, WORDS), normal(CONTEXTS, WORDS)
        right = (normal(CONTEXTS, WORDS) > 0).double()
        features = right[..., None] + normal(CONTEXTS, WORDS, PARAMETERS)
        low, high = 0.0, 10.0
        for _ in range(60):
            middle = (low + high) / 2
            found = cls(learner, learner + middle * noise, right, features)
            low, high = (middle, high) if found.kl < kl else (low, middle)
        return cls(learner, learner + (high if kl > 0 else 0.0) * noise, right, features)

    @cached_property
    def prox(self) -> Tensor:
        """[C, V] log pi_prox."""
        return self.learner.log_softmax(-1)

    @cached_property
    def mu(self) -> Tensor:
        """[C, V] log mu."""
        return self.engine.log_softmax(-1)

    @property
    def kl(self) -> float:
        """KL(mu || pi_prox) of a token, nats."""
        return float((self.mu.exp() * (self.mu - self.prox)).sum(-1).mean())

    @cached_property
    def expected_features(self) -> Tensor:
        """[C, D] under pi_prox: what the score subtracts."""
        return torch.einsum("cv,cvd->cd", self.prox.exp(), self.features)

    def right_share(self, log_policy: Tensor) -> float:
        """Probability that a token is right."""
        return float((log_policy.exp() * self.right).sum(-1).mean())

    def needed(self, length: int) -> int:
        """Right tokens by which an answer has its reward: about every second answer of pi_prox has so many."""
        return max(round(length * self.right_share(self.prox)), 1)

    def reward_mean(self, log_policy: Tensor, length: int) -> float:
        """Expected reward of an answer."""
        return at_least(self.needed(length), length, self.right_share(log_policy))

    def exact_gradient(self, length: int) -> Tensor:
        """[D] of the expected reward under pi_prox: n P(others hold just one too few) x covariance of right and features."""
        share, probability = self.right_share(self.prox), self.prox.exp()
        centred = self.features - self.expected_features[:, None]
        covariance = torch.einsum("cv,cv,cvd->d", probability, self.right, centred) / CONTEXTS
        return length * exactly(self.needed(length) - 1, length - 1, share) * covariance

    def gradient_on_engine(self, length: int, baseline: float, *, is_weighted: bool = False) -> Tensor:
        """[D] expectation, over answers of the engine, of (reward - baseline) x the sum of the tokens' scores; weighted: of rho x score."""
        share, needed = self.right_share(self.mu), self.needed(length)
        reached = torch.tensor([at_least(needed - one, length - 1, share) for one in (0, 1)], dtype=torch.float64)
        centred = self.features - self.expected_features[:, None]
        advantage = reached[self.right.long()] - baseline
        own = (self.prox if is_weighted else self.mu).exp()
        return length * torch.einsum("cv,cv,cvd->d", own, advantage, centred) / CONTEXTS

    def sample(self, sequences: int, length: int, seed: int) -> Sample:
        """Answers of the engine."""
        draw = torch.Generator().manual_seed(seed)
        contexts = torch.randint(CONTEXTS, (sequences * length,), generator=draw)
        cumulative = self.mu.exp().cumsum(-1)
        cumulative[:, -1] = 1.0
        rows = (cumulative + torch.arange(CONTEXTS)[:, None]).flatten()
        at = torch.rand(sequences * length, generator=draw, dtype=torch.float64) + contexts
        words = torch.searchsorted(rows, at).clamp(max=rows.numel() - 1) % WORDS
        return Sample(self, contexts, words, length)


@dataclass(frozen=True)
class Sample:
    """Answers of one length."""

    policy: ExactPolicy
    contexts: Tensor
    """[N]."""
    words: Tensor
    """[N]."""
    length: int

    @property
    def baseline(self) -> float:
        """Expected reward of what is sampled."""
        return self.policy.reward_mean(self.policy.mu, self.length)

    @cached_property
    def advantages(self) -> Tensor:
        """[S] float64."""
        right = self.policy.right[self.contexts, self.words].view(-1, self.length).sum(1)
        return (right >= self.policy.needed(self.length)).double() - self.baseline

    @cached_property
    def scores(self) -> Tensor:
        """[N, D]: gradient of log pi_prox of each token."""
        return self.policy.features[self.contexts, self.words] - self.policy.expected_features[self.contexts]

    @cached_property
    def batch(self) -> PackedBatch:
        """As the correction takes it."""
        count, sequences = self.contexts.numel(), self.advantages.numel()
        return PackedBatch(
            token_ids=self.words,
            offsets=torch.arange(sequences + 1) * self.length,
            loss_mask=torch.ones(count, dtype=torch.bool),
            behavior_logprobs=self.policy.mu[self.contexts, self.words],
            proximal_logprobs=self.policy.prox[self.contexts, self.words],
            advantages=self.advantages.repeat_interleave(self.length),
            weight_versions=torch.zeros(count, dtype=torch.int32),
            group_ids=torch.arange(sequences),
        ).validate()

    @cached_property
    def known(self) -> list[tuple[Tensor, Tensor]]:
        """Gradients of each answer [S, D] whose expectation [D] is a closed form."""
        batch = self.batch
        rho = (batch.proximal_logprobs - batch.behavior_logprobs).exp()  # type: ignore[operator]  # of this batch
        return [
            (self.gradients(weights), self.policy.gradient_on_engine(self.length, self.baseline, is_weighted=is_weighted))
            for weights, is_weighted in ((torch.ones_like(rho), False), (rho, True))
        ]

    def gradients(self, coefficients: Tensor) -> Tensor:
        """[S, D]: of each answer."""
        return self.advantages[:, None] * (self.scores * coefficients[:, None]).view(-1, self.length, PARAMETERS).sum(1)


def coefficients(batch: PackedBatch, preset: str) -> Tensor:
    """[N] float64: what multiplies advantage x score of each token, 1 in a plain gradient; not a number where the advantage is 0.

    By the product's own correction, at the first optimizer step, where the target policy is the proximal one.
    """
    assert batch.proximal_logprobs is not None
    config = CorrectionConfig(preset=preset)
    leaf = batch.proximal_logprobs.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that little or nothing is left, which is what this is about
        corrected = settle(correct(batch, config), batch.proximal_logprobs, config)
        loss = policy_loss(corrected, leaf, config).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    count: Tensor | int = batch.num_sequences
    if config.denominator.kind is DenominatorKind.TOKEN_MEAN:
        count = batch.num_tokens
    elif config.denominator.kind is DenominatorKind.SEQUENCE_MEAN:
        count = batch.num_sequences * batch.lengths.repeat_interleave(batch.lengths)
    return -gradient * count / batch.advantages


def outcome(preset: str, kl: float, sample: Sample, on_policy_noise: float) -> RemedyOutcome:
    """One cell.

    Args:
        on_policy_noise: standard deviation of an answer's gradient where the engine is the learner.
    """
    weights = coefficients(sample.batch, preset)
    large = torch.where(weights > LEAST, weights, 0).view(-1, sample.length)
    own, exact = sample.gradients(weights), sample.policy.exact_gradient(sample.length)
    estimates = [(own, torch.zeros_like(exact)), *((own - values, expected) for values, expected in sample.known)]
    values, offset = min(estimates, key=lambda estimate: spread(estimate[0]))
    return RemedyOutcome(
        preset=preset,
        kl=kl,
        length=sample.length,
        kept_tokens=float((large > 0).double().mean()),
        ess_sequences=sample_size(large.mean(1)),
        bias=float((values.mean(0) + offset - exact).norm() / exact.norm()),
        bias_error=spread(values) / math.sqrt(len(values)) / float(exact.norm()),
        noise=spread(own) / on_policy_noise,
    )


def outcomes(
    presets: Sequence[str], kls: Iterable[float], lengths: Iterable[int], *, tokens: int = TOKENS, seed: int = 1
) -> list[RemedyOutcome]:
    """All cells, of samples of `tokens` tokens at most."""
    found = []
    lengths = tuple(lengths)
    sizes = {length: min(max(tokens // length, 2), SEQUENCES) for length in lengths}
    on_policy = ExactPolicy.of_kl(0.0)
    own = {length: on_policy.sample(size, length, seed) for length, size in sizes.items()}
    noise = {length: spread(sample.known[0][0]) for length, sample in own.items()}
    for kl in kls:
        policy = ExactPolicy.of_kl(kl)
        for length, size in sizes.items():
            sample = policy.sample(size, length, seed)
            found += [outcome(preset, kl, sample, noise[length]) for preset in presets]
    return found


def spread(values: Tensor) -> float:
    """Standard deviation of vectors [S, D]: the root of the trace of their covariance."""
    return math.sqrt(float(values.var(0).sum()))


def sample_size(weights: Tensor) -> float:
    """Effective sample size, as a share; 0 if all are 0."""
    square = float(weights.square().mean())
    return float(weights.mean()) ** 2 / square if square > 0 else 0.0


def exactly(k: int, n: int, p: float) -> float:
    """P(Binomial(n, p) = k)."""
    if not 0 <= k <= n:
        return 0.0
    return math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p))


def at_least(k: int, n: int, p: float) -> float:
    """P(Binomial(n, p) >= k)."""
    return math.fsum(exactly(j, n, p) for j in range(max(k, 0), n + 1))


# -- table and picture ---------------------------------------------------------------------------------------------------


SHOWN = (8, 512, 8192)
"""Lengths of the table."""


def table(found: Sequence[RemedyOutcome]) -> str:
    """Markdown: a row for each preset. In a cell the three SHOWN lengths."""
    cells = {(one.preset, one.kl, one.length): one for one in found}
    kls = sorted({one.kl for one in found})
    middle = min(kls, key=lambda kl: abs(kl - 1e-2))
    head = ["preset", *(f"kept, k3 {kl:g}" for kl in kls), f"ESS, k3 {middle:g}", f"bias, k3 {middle:g}", f"noise, k3 {middle:g}"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    for preset in dict.fromkeys(one.preset for one in found):
        row = [f"`{preset}`"] + [" / ".join(percent(cells[preset, kl, length].kept_tokens) for length in SHOWN) for kl in kls]
        at = [cells[preset, middle, length] for length in SHOWN]
        row += [" / ".join(percent(one.ess_sequences) for one in at), " / ".join(f"{one.bias:.2f}" for one in at)]
        lines.append("| " + " | ".join([*row, " / ".join(f"{one.noise:.2f}" for one in at)]) + " |")
    return "\n".join(lines)


def recorded_table(runs: Iterable[RecordedRun], presets: Sequence[str]) -> str:
    """Markdown: tokens kept of recorded batches, per cent, by engine and step; empty if no run has any."""
    lines = [
        "| run | step | k3 | " + " | ".join(f"`{name}`" for name in presets) + " |",
        "| " + " | ".join(["---"] * (len(presets) + 3)) + " |",
    ]
    for run in runs:
        for step, record in run.batches.items():
            batch = packed(record)
            assert batch.proximal_logprobs is not None
            log_rho = batch.proximal_logprobs - batch.behavior_logprobs
            is_used = batch.advantages != 0
            kept = [percent(float((coefficients(batch, name)[is_used] > LEAST).double().mean())) for name in presets]
            lines.append(f"| {run.condition} | {step} | {float((torch.expm1(log_rho) - log_rho).mean()):.1e} | " + " | ".join(kept) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def packed(record: RecordedBatch) -> PackedBatch:
    """A recorded batch, without prompts."""
    behavior, proximal, advantages = (torch.tensor(record[name], dtype=torch.float64) for name in ("behavior", "proximal", "advantages"))
    count = behavior.numel()
    return PackedBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        offsets=torch.tensor([0, *record["lengths"]]).cumsum(0),
        loss_mask=torch.ones(count, dtype=torch.bool),
        behavior_logprobs=behavior,
        proximal_logprobs=proximal,
        advantages=advantages,
        weight_versions=torch.zeros(count, dtype=torch.int32),
        group_ids=torch.arange(len(record["lengths"])),
    ).validate()


def percent(share: float) -> str:
    """Of a share, as a whole number; never 0 or 100 where it is neither."""
    if 0 < share < 0.005:
        return "<1"
    if 0.995 <= share < 1:
        return ">99"
    return f"{100 * share:.0f}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--picture", type=Path, help="file to draw it into; none: tables alone")
    parser.add_argument("--series", type=Path, default=SERIES / "mismatch", help="folder of recorded runs, some of which have batches")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a cell's sample, at most")
    arguments = parser.parse_args()
    found = outcomes(PRESETS, KLS, LENGTHS, tokens=arguments.tokens)
    print(table(found))
    print(f"largest standard error of a bias: {max(one.bias_error for one in found):.2f}")
    if recorded := recorded_table(load_runs(arguments.series), PRESETS):
        print(f"\ntokens kept of recorded batches\n\n{recorded}")
    if arguments.picture:
        from benchmarks.remedies_picture import draw

        draw(found, arguments.picture)


if __name__ == "__main__":
    main()
