"""Copies of a learner's weights, for engines that take them without Ray's object store."""

from __future__ import annotations

from collections.abc import Iterator

from evenkeel.engines.weights import WeightBucket
from evenkeel.learner.learner_rank import LearnerRank


def weight_buckets(learner: LearnerRank, bucket_bytes: int = 2**28) -> Iterator[WeightBucket]:
    """Copies of its pieces, as LearnerRank.weights gives them; every rank must go through all of them."""
    return (WeightBucket.of(piece) for piece in learner.weights(bucket_bytes))
