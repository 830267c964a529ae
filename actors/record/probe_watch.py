"""The probe of each weight sync against what its type of numbers allows; it reports a version once, however many engines it is wrong on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from actors.metrics.catalogue import CATALOGUE
from actors.settings.probe_limits import ProbeLimits
from correction.errors import counted

_DIFFERENCE = CATALOGUE["sync/probe_max_abs_difference"]


class ProbeWatch:
    """Collects the results of the probes since the last step."""

    def __init__(self, limits: ProbeLimits) -> None:
        self._limits = limits
        self._differences: list[float] = []
        self._reported = -1
        """Newest version with a warning."""
        self._more: dict[int, list[tuple[float, str]]] = {}
        """Version -> further engines beyond the limits, with their largest difference."""

    def forget(self) -> None:
        """Start anew, after a return to a checkpoint: the present versions are withdrawn."""
        self._differences, self._reported, self._more = [], -1, {}

    def add(self, worker: str, version: int, differences: Sequence[float]) -> str | None:
        """Add a probe's result. Returns: a warning for the first engine of a version that is beyond the limits; else None.

        Args:
            differences: of each token's logprob, nats.
        """
        largest, median = max(differences), statistics.median(differences)
        self._differences.append(largest)
        if largest <= self._limits.largest and median <= self._limits.median:
            return None
        if version <= self._reported:
            self._more.setdefault(version, []).append((largest, worker))
            return None
        self._reported = version
        allowed = f"{self._limits.largest:g}" + (f", median {self._limits.median:g}" if self._limits.median < float("inf") else "")
        return (
            f"weights v{version} on rollout worker {worker}: the probe prompt's logprobs differ from the learner's by up to "
            f"{_DIFFERENCE.text(largest)}, median {_DIFFERENCE.number(median)} (allowed: {allowed}; weight_sync.max_probe_difference): "
            "the engines don't agree at equal weights"
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
