"""The other side of benchmarks/early_warning.py: rlwatch's own detectors, run by the Python of an environment that has rlwatch.

A question has runs, each a list of steps, each the arguments of `log_step`; and changes to rlwatch's configuration. The answer is, for each
run, the alerts that rlwatch would have sent, as [step, detector, severity].
"""

from __future__ import annotations

from rlwatch.alerts import AlertManager
from rlwatch.config import load_config
from rlwatch.detectors import DetectorSuite
from sides import serve


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


if __name__ == "__main__":
    serve(lambda question: [alerts_of(run, question["changes"]) for run in question["runs"]])
