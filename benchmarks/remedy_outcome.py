"""One cell of the table of benchmarks/remedies.py, for the table and for the picture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RemedyOutcome:
    """What a preset makes of a KL and a length; see the head of benchmarks/remedies.py."""

    preset: str
    kl: float
    length: int
    kept_tokens: float
    ess_sequences: float
    bias: float
    bias_error: float
    """Standard error of the bias."""
    noise: float
