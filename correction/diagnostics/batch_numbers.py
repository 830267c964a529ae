"""Numbers of a batch that `diagnose` makes of its tensors, and a run of its own counts at steps that aren't diagnosed."""

from __future__ import annotations

from collections.abc import Mapping


def kept_numbers(*, tokens: float, kept: float, broken: float) -> dict[str, float]:
    """What became of the tokens of a batch; no share without tokens.

    Args:
        tokens: in the loss mask.
        kept: of those, left in the loss at the first forward pass that they were in.
        broken: of those, with a value that is not finite in that pass.
    """
    return {"broken_tokens": broken} | ({"kept_share": kept / tokens} if tokens > 0 else {})


def staleness_numbers(by_age: Mapping[int, float] | Mapping[float, float], *, sequences: float, mixed: float) -> dict[str, float]:
    """How old a batch was when it was trained; empty without sampled tokens.

    Args:
        by_age: number of sampled tokens by staleness, versions.
        sequences: with a sampled token.
        mixed: of those, with tokens of more than one version.
    """
    tokens = sum(by_age.values())
    if tokens == 0:
        return {}
    return {
        "staleness_mean": sum(age * (n / tokens) for age, n in by_age.items()),
        "staleness_max": max(age for age, n in by_age.items() if n > 0),
        "mixed_version_share": mixed / sequences,
    }
