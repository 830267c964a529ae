"""What an alarm changes in a run that goes on: real engines, a learning rate that grows to a hundred times the recipe's.

The start has weights truncated at 1.02, which the growing gap reaches in every step. After the alarm the correction is another preset,
which has a criterion of its own, or the same with narrower bounds: 1.02 ** 0.5.

The fast suite has the alarm of a whole run (test_asynchronous_run.py), and from the alarm to the first batch of another correction each
part on its own: what to do and the controller (tests/actors/driver/test_alarms.py), the service, and the learner's Adam.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.early_warning.monitor import State
from tests.e2e.launch import RECIPE, Run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Few steps make the start and the level, and any sure growth to 3 times is an alarm: with the learning rate the gap between sampling and
# training grows all along, so the scatter of the start, which it makes, counts for little here.
THRESHOLDS = [
    "skip_steps=1",
    "baseline_steps=8",
    "level_steps=3",
    "trend_steps=8",
    "watch_growth=2",
    "alarm_growth=3",
    "watch_deviations=0.1",
    "alarm_deviations=0.1",
    "patience=1",
]
RISING_RATE = ["learner.learning_rate=0.1", "learner.warmup_steps=60"]
START = ["steps=100", *RISING_RATE, "checkpoint.every_steps=0", "correction.importance.upper=1.02"]
ACTIONS = {
    "switch_preset": (["monitor.on_alarm=switch_preset", "monitor.preset=mis-full"], "the correction becomes preset mis-full"),
    "tighten": (["monitor.on_alarm=tighten", "monitor.tighten_factor=0.5"], "the correction's bounds are tightened by 0.5"),
}
STEPS_AFTER = 5


@pytest.fixture(scope="module", params=list(ACTIONS))
def driven(request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Run, int]]:
    """The action, the run, some steps after the alarm, and the step of the alarm."""
    run_dir = tmp_path_factory.mktemp(request.param) / "run"
    thresholds = [f"monitor.thresholds.{item}" for item in THRESHOLDS]
    run = Run(run_dir, str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", *START, *ACTIONS[request.param][0], *thresholds)

    def alarmed_at() -> int | None:
        if not (run_dir / "config.yaml").exists():
            return None
        return next((event.step for event in RunFolder.view(run_dir).read_monitor_events() if event.state is State.ALARM), None)

    try:
        run.wait_until(lambda: (step := alarmed_at()) is not None and run.steps()[-1] >= step + STEPS_AFTER, "steps after an alarm")
        step = alarmed_at()
        assert step is not None
        yield request.param, run, step
    finally:
        run.close()


def test_the_correction_is_another_one_after_the_alarm(driven: tuple[str, Run, int]) -> None:
    """One batch is in training and one in preparation when the alarm comes, and its step's diagnostics may take one more: from the first
    batch that is begun afterwards on, the new correction holds."""
    action, run, alarm = driven
    lines = [line for line in run.metrics() if line["mismatch_and_staleness/k3"] > 1e-6]  # in a batch by its own weights no ratio is cut
    before, after = [line for line in lines if line["step"] <= alarm], [line for line in lines if line["step"] > alarm + 3]
    assert "Traceback" not in run.output() and after

    def is_new(line: dict[str, Any]) -> bool:
        """Judged by the weights and criteria that the batch was corrected with."""
        if action == "switch_preset":
            return "rejection/vetoed_share" in line and line["correction/importance_weight_max"] != pytest.approx(1.02)
        return bool(line["correction/importance_weight_max"] == pytest.approx(1.02**0.5))

    assert not any(map(is_new, before)) and all(map(is_new, after))
    largest = [line["correction/importance_weight_max"] for line in before]
    assert max(largest) == pytest.approx(1.02), f"the old bound never held: {largest}"
    assert f"at step {alarm}: {ACTIONS[action][1]}, from the next batch that is begun" in run.events()
