"""Which parts of a reward have a metric: a bounded number of them, whatever names a reward function makes up."""

from __future__ import annotations

from collections.abc import Mapping

from evenkeel.actors.processes.event_level import Notify

MOST = 128
"""Parts that have a metric in one run, from its start or resume. Each is a column, a curve and a value of the endpoint until the end."""
_FAMILY = "reward/component/"


class RewardParts:
    """The parts that came first. It says once that there were more."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._kept: set[str] = set()
        self._has_said = False

    def bounded(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """A step's numbers, without those of parts that came after the first MOST."""
        kept = dict[str, float]()
        for name, value in numbers.items():
            if not name.startswith(_FAMILY) or self._is_kept(name):
                kept[name] = value
        return kept

    def _is_kept(self, name: str) -> bool:
        if name in self._kept:
            return True
        if len(self._kept) < MOST:
            self._kept.add(name)
            return True
        if not self._has_said:
            self._has_said = True
            self._notify(
                "warning",
                f"the reward function has named more than {MOST} parts: {name.removeprefix(_FAMILY)!a} and other new ones train as before, "
                f"but have no metric",
            )
        return False
