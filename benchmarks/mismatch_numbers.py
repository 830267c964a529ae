"""Numbers of benchmarks/real_mismatch.py: of one batch, and over three."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.remedies import LEAST, coefficients
from evenkeel.correction import CorrectionConfig, PackedBatch, correct, diagnose

BUCKETS = (0.0, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Bounds of the engine's probability of a token."""
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Sampled:
    """Tokens of a batch, one below the other."""

    mu: Tensor
    """[N] float64, nats."""
    pi: Tensor
    """[N] float64, nats."""
    position: Tensor
    """[N] int64: place in the answer."""

    @classmethod
    def of(cls, mu: Sequence[Sequence[float]], pi: Sequence[Sequence[float]]) -> Sampled:
        """Args: of each answer, the logprobs of engine and learner."""

        def flat(rows: Sequence[Sequence[float]]) -> Tensor:
            return torch.tensor([value for row in rows for value in row], dtype=torch.float64)

        return cls(flat(mu), flat(pi), torch.tensor([place for row in mu for place in range(len(row))]))

    @classmethod
    def joined(cls, batches: Sequence[Sampled]) -> Sampled:
        return cls(*(torch.cat([getattr(one, name) for one in batches]) for name in ("mu", "pi", "position")))

    def where(self, chosen: Tensor) -> Sampled:
        """Args: chosen: [N] bool."""
        return Sampled(self.mu[chosen], self.pi[chosen], self.position[chosen])

    @property
    def log_ratio(self) -> Tensor:
        return self.pi - self.mu

    @property
    def k3(self) -> float:
        """Mean of rho - 1 - log rho, nats."""
        return float((torch.expm1(self.log_ratio) - self.log_ratio).mean())

    @property
    def std(self) -> float:
        """Of log rho."""
        return float(self.log_ratio.std(correction=0))

    @property
    def ratio(self) -> float:
        """Mean of rho."""
        return float(self.log_ratio.exp().mean())

    @property
    def distance(self) -> float:
        """Mean |pi - mu| of the sampled token."""
        return float((self.pi.exp() - self.mu.exp()).abs().mean())

    def quantile(self, share: float) -> float:
        """Of |log rho|."""
        return float(self.log_ratio.abs().quantile(share))

    @property
    def largest(self) -> float:
        """|log rho|."""
        return float(self.log_ratio.abs().max())

    @property
    def outside_band(self) -> float:
        """Share of the tokens that icepop leaves out."""
        ratio = self.log_ratio.exp()
        return float(((ratio < 0.5) | (ratio > 5)).double().mean())

    @property
    def outside_kl(self) -> float:
        """Share of the tokens that kpop leaves out: binary KL above 0.1 in one of both directions."""
        p, q = (one.exp().clamp(1e-12, 1 - 1e-12) for one in (self.mu, self.pi))
        both = [a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log() for a, b in ((p, q), (q, p))]
        return float((torch.maximum(*both) > 0.1).double().mean())

    def buckets(self, *, by_learner: bool = False) -> list[Tensor]:
        """[N] bool for each interval between BUCKETS; the last has both ends. Args: by_learner: by its probability, not the engine's."""
        probability = (self.pi if by_learner else self.mu).exp()
        pairs = list(itertools.pairwise(BUCKETS))
        return [(probability >= low) & ((probability < high) | (high == 1.0)) for low, high in pairs]


@dataclass(frozen=True, slots=True)
class Interval:
    """A number of all batches together, and its smallest and largest value of one batch alone."""

    low: float
    whole: float
    high: float

    @classmethod
    def over(cls, batches: Sequence[Sampled], number: Callable[[Sampled], float]) -> Interval:
        found = [number(one) for one in batches if len(one.mu)]
        return cls(min(found), number(Sampled.joined(batches)), max(found))

    @classmethod
    def of_pairs(cls, above: Sequence[Sampled], below: Sequence[Sampled], number: Callable[[Sampled], float]) -> Interval:
        """Of the ratio of a number on the same tokens."""
        found = [number(a) / number(b) for a, b in zip(above, below, strict=True)]
        return cls(min(found), number(Sampled.joined(above)) / number(Sampled.joined(below)), max(found))

    def text(self, form: str) -> str:
        return f"{self.whole:{form}} [{self.low:{form}}, {self.high:{form}}]"


@dataclass(frozen=True, slots=True)
class Treatment:
    """What a preset makes of a batch, at the first optimizer step."""

    dropped: float
    """Share of the tokens without a gradient."""
    cut: float
    """Share of the importance weights that are cut to a bound."""
    weight: float
    """Mean factor on the gradients of all tokens: what the batch's step is multiplied with."""
    spread: float
    """Standard deviation of the factor."""

    @classmethod
    def of(cls, batch: PackedBatch, preset: str) -> Treatment:
        """Args: batch: of answers alone, with proximal logprobs and no advantage of 0."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that little or nothing is left
            corrected = correct(batch, CorrectionConfig(preset=preset))
            numbers: Mapping[str, float] = diagnose(batch, corrected)
            found = coefficients(batch, preset)
        large = torch.where(found > LEAST, found, 0.0)
        cut = numbers.get("truncated_share", 0.0)
        return cls(float((large == 0).double().mean()), cut, float(large.mean()), float(large.std(correction=0)))


def without_normalisation(batch: PackedBatch, preset: str) -> tuple[float, float]:
    """Mean importance weight of the batch's tokens as it is, and with batch normalisation. Args: as Treatment.of."""
    found = []
    for population in ("off", "all"):
        config = CorrectionConfig.model_validate({"preset": preset, "normalize": {"population": population}})
        found.append(float(correct(batch, config).importance_weights.double().mean()))
    return found[0], found[1]


def answers_alone(batch: PackedBatch) -> PackedBatch:
    """Without prompts, and with advantages of +1 and -1 in turn: what a preset drops by sign is then half of each."""
    kept = batch.loss_mask
    lengths = torch.tensor([int(one.sum()) for one in torch.split(kept, batch.lengths.tolist())])
    signs = torch.tensor([(-1.0) ** number for number in range(len(lengths))])
    assert batch.proximal_logprobs is not None
    return replace(
        batch,
        token_ids=batch.token_ids[kept],
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        loss_mask=kept[kept],
        behavior_logprobs=batch.behavior_logprobs[kept].double(),
        proximal_logprobs=batch.proximal_logprobs[kept].double(),
        advantages=signs.double().repeat_interleave(lengths),
        weight_versions=batch.weight_versions[kept],
        group_ids=torch.arange(len(lengths)),
    ).validate()
