"""The other side of benchmarks/early_warning.py: rlwatch's own detectors, run by the Python of an environment that has rlwatch.

The first line on stdin is a JSON list of runs, each a list of steps, each the arguments of `log_step`. Every further line is a set of
changes to rlwatch's configuration; the answer is one line: for each run, the alerts that rlwatch would have sent, as
[step, detector, severity].
"""

from __future__ import annotations

import json
import sys

from rlwatch.alerts import AlertManager
from rlwatch.config import load_config
from rlwatch.detectors import DetectorSuite


def alerts_of(steps: list[dict[str, float]], changes: dict[str, dict[str, float]]) -> list[tuple[int, str, str]]:
    """As RLWatch.log_step does, without its database: all detectors, then the cool-down of the alert manager."""
    config = load_config(**changes)
    detectors, manager = DetectorSuite(config), AlertManager(config.alerts)
    return [
        (alert.step, alert.detector, alert.severity)
        for step, numbers in enumerate(steps)
        for alert in detectors.check_step(step, **numbers)
        if manager.send(alert)
    ]


def main() -> None:
    runs = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        print(json.dumps([alerts_of(run, json.loads(line)) for run in runs]), flush=True)


if __name__ == "__main__":
    main()
