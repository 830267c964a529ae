"""The probe of each weight sync against what its type of numbers allows at the model's depth.

A cause is reported once, not at each version. Engines that compute otherwise show at their first version, whose weights were compared by
checksums; weights that haven't arrived differ by more than these engines do then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from evenkeel.actors.metrics.catalogue import CATALOGUE
from evenkeel.actors.settings.probe_limits import ProbeLimits
from evenkeel.correction.errors import counted

_DIFFERENCE = CATALOGUE["sync/probe_max_abs_difference"]


class ProbeWatch:
    """Collects the results of the probes since the last step."""

    def __init__(self, limits: ProbeLimits) -> None:
        self._limits = limits
        self._differences: list[float] = []
        self._verified: set[str] = set()
        """Engines that were probed: their first weights had been compared by checksums."""
        self._equal: tuple[float, float] | None = None
        """Largest difference and median at such weights, of the engines that differ most; None: none was probed yet."""
        self._beyond: set[str] = set()
        """Engines that were beyond the limits when they were last probed."""
        self._reported = -1
        """Newest version with a warning."""
        self._more: dict[int, list[tuple[float, str]]] = {}
        """Version -> further engines beyond the limits, with their largest difference."""

    def forget(self) -> None:
        """Start anew, after a return to a checkpoint: the present versions are withdrawn."""
        self._differences, self._reported, self._more = [], -1, {}
        self._beyond.clear()

    def add(self, worker: str, version: int, differences: Sequence[float]) -> str | None:
        """Add a probe's result. Returns: a warning, if this engine is the first of its version that has come to be beyond the limits.

        Args:
            differences: of each token's logprob, nats.
        """
        is_verified, was_beyond = worker not in self._verified, worker in self._beyond
        largest = max(differences) if not any(map(math.isnan, differences)) else math.inf
        median = statistics.median(differences) if math.isfinite(largest) else math.inf
        self._differences.append(largest)
        after = self._limits.after(*self._equal) if self._equal else self._limits
        limits = self._limits if is_verified else after
        if is_verified:
            self._verified.add(worker)
            if math.isfinite(largest):
                self._equal = (max(largest, self._equal[0]), max(median, self._equal[1])) if self._equal else (largest, median)
        if limits.are_kept(largest, median) or after.are_kept(largest, median):
            self._beyond.discard(worker)
            return None
        self._beyond.add(worker)
        if was_beyond:
            return None
        if version <= self._reported:
            self._more.setdefault(version, []).append((largest, worker))
            return None
        self._reported = version
        allowed = f"{limits.largest:.2g}" + (f", median {limits.median:.2g}" if math.isfinite(limits.median) else "")
        why = (
            "checksums agree, so the engines compute otherwise at equal weights: evenkeel diff-engines MODEL names the operator"
            if is_verified
            else "the engine doesn't have the learner's weights"
        )
        return (
            f"weights v{version} on rollout worker {worker}: the probe prompt's logprobs differ from the learner's by up to "
            f"{_DIFFERENCE.text(largest)}, median {_DIFFERENCE.number(median)} (allowed: {allowed}; "
            f"weight_sync.max_probe_difference): {why}"
        )

    def take(self) -> tuple[list[float], list[str]]:
        """The largest difference of each probe, and a line for each version with further engines beyond the limits. Both start anew."""
        lines = []
        for version, found in self._more.items():
            largest, worker = max(found)
            engines = counted(len(found), "further rollout worker")
            lines.append(f"weights v{version} are beyond the probe's limits on {engines}, most on {worker}, by {_DIFFERENCE.text(largest)}")
        differences, self._differences, self._more = self._differences, [], {}
        return differences, lines
