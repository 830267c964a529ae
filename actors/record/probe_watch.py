"""The probe of each weight sync against what its type of numbers allows; it reports a version once, however many engines it is wrong on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from actors.metrics.catalogue import CATALOGUE
from actors.settings.probe_limits import ProbeLimits
from correction.errors import counted

_DIFFERENCE = CATALOGUE["sync/probe_max_abs_difference"]


class ProbeWatch:
    """What the probes since the last step have shown."""

    def __init__(self, limits: ProbeLimits) -> None:
        self._limits = limits
        self._differences: list[float] = []
        self._reported = -1
        """Newest version that was warned of."""
        self._more: dict[int, list[tuple[float, str]]] = {}
        """By version: further engines that it is wrong on, with their largest difference."""

    def forget(self) -> None:
        """Versions begin anew: those of now are withdrawn."""
        self._differences, self._reported, self._more = [], -1, {}

    def add(self, worker: str, version: int, differences: Sequence[float]) -> str | None:
        """What to say at once: of a version's first engine that is beyond the limits.

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
        """The largest difference of each probe, and of each version with further such engines a line; both begin anew."""
        lines = []
        for version, found in self._more.items():
            largest, worker = max(found)
            engines = counted(len(found), "further rollout worker")
            lines.append(f"weights v{version} are beyond the probe's limits on {engines}, most on {worker}, by {_DIFFERENCE.text(largest)}")
        differences, self._differences, self._more = self._differences, [], {}
        return differences, lines
