"""The reward of benchmarks/peers.py, for both sides: the share of an answer's words that are right, each in its place."""

from __future__ import annotations


def share_of_words(completion: str, answer: str) -> float:
    """In [0, 1]; words too many count like wrong ones."""
    given, right = completion.split(), answer.split()
    return sum(a == b for a, b in zip(given, right, strict=False)) / max(len(given), len(right))
