"""A run on a Ray cluster that was there before it, driven to an alarm, and ended by it: real engines, a learning rate that grows to a
hundred times the recipe's.

Behaviours locked here: every actor that joined the cluster is in the service discovery and serves metrics, and the cluster outlives the
run; the monitor follows every step but those that are counted as left out; its event is in every place where a person or a program may
look; the run ends after the step under way with a checkpoint from which it can go on, and with an exit code of its own.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from actors.driver.run_summary import ENDED_BY_ALARM
from actors.record.run_folder import RunFolder
from actors.state.resume import TrainingState
from correction.monitor import Event, Monitor, State
from tests.e2e.cluster import is_up, ray_cluster, scraped_roles
from tests.e2e.launch import RECIPE, Run

pytestmark = pytest.mark.engine

# Few steps make the start and the level, and any sure growth to 3 times is an alarm: with the learning rate the gap between sampling and
# training grows all along, so the scatter of the start, which it makes, counts for little here.
THRESHOLDS = ["skip_steps=1", "baseline_steps=8", "level_steps=3", "trend_steps=8", "watch_growth=2", "alarm_growth=3",
              "watch_deviations=0.1", "alarm_deviations=0.1", "patience=1"]
OVERRIDES = ["steps=60", "learner.learning_rate=0.1", "learner.warmup_steps=60", "checkpoint.every_steps=0", "monitor.on_alarm=stop",
             "rollout.sampling.max_tokens=24"]

ROLES = {"controller", "learner", "rollout"}


@dataclass
class Story:
    """What the tests look at afterwards."""

    run: Run
    discovered: set[str] = field(default_factory=set)
    """Roles that were in the service discovery at some time."""
    scraped: set[str] = field(default_factory=set)
    """Those of them that served metrics of ours."""
    cluster_is_up: bool = False
    """After the run."""


@pytest.fixture(scope="module")
def story(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    run_dir = tmp_path_factory.mktemp("warning") / "run"
    thresholds = [f"monitor.thresholds.{item}" for item in THRESHOLDS]
    with ray_cluster() as cluster:
        words = [str(RECIPE), f"model={small_model}", f"run_dir={run_dir}", *OVERRIDES, *thresholds]
        run = Run(run_dir, *words, address=cluster.address, **cluster.variables)
        story = Story(run)
        try:
            until = time.monotonic() + 300.0
            while run.process.poll() is None and time.monotonic() < until:
                discovered, scraped = scraped_roles(run_dir)
                story.discovered |= discovered
                story.scraped |= scraped
                with suppress(subprocess.TimeoutExpired):
                    run.process.wait(0.5 if story.scraped < ROLES else 5.0)  # each page costs the actors some time
            run.wait(1.0)
            story.cluster_is_up = is_up(cluster)
            yield story
        finally:
            run.close()


@pytest.fixture
def run(story: Story) -> Run:
    return story.run


def test_run_joins_a_cluster_and_its_actors_can_be_scraped(story: Story) -> None:
    """Every actor that joined is in the service discovery, serves evenkeel_ metrics, and the cluster outlives the run."""
    assert story.discovered == story.scraped == ROLES
    assert story.cluster_is_up
    assert "raylet" not in story.run.seen_commands, "it would be a Ray of the run's own"


def first_alarm(run: Run) -> Event:
    return next(event for event in RunFolder.view(run.run_dir).read_monitor_events() if event.state is State.ALARM)


def diagnosed(run: Run) -> list[dict[str, float]]:
    """Lines of the steps that the monitor saw: a step has none where a slow machine had two others to diagnose."""
    return [line for line in run.metrics() if "monitor/level" in line]


def test_the_run_ends_by_the_alarm_with_its_own_exit_code(run: Run) -> None:
    assert run.process.returncode == ENDED_BY_ALARM == 3, run.output()[-4000:]
    assert "Traceback" not in run.output()
    alarm, last = first_alarm(run), run.steps()[-1]
    left_out = sum("monitor/level" not in line for line in run.metrics()[alarm.step :])
    assert alarm.step <= last <= alarm.step + 2 + left_out, "after the step under way, or the one after it"
    assert f"alarm of {alarm.name} at step {alarm.step}: the run ends with a checkpoint" in run.output()
    assert f"evenkeel train --resume {run.run_dir}" in run.output()


def test_the_alarm_is_in_every_view(run: Run) -> None:
    alarm = first_alarm(run)
    assert alarm.growth >= 3 and alarm.step > 1 + 8 + 3 - 1, "there is no alarm before there is a start and a level"
    lines = {line["step"]: line for line in diagnosed(run)}
    assert lines[alarm.step]["monitor/level"] == 2 and lines[alarm.step][f"monitor/alarms_total/{alarm.name}"] == 1
    assert all(line["monitor/level"] == 0 for step, line in lines.items() if step < 12)
    assert f"alarm   step {alarm.step}: {alarm.message}" in run.events()
    assert f"alarm: step {alarm.step}: {alarm.message}" in run.output()
    report = (run.run_dir / "report.html").read_text()
    assert '<li class="alarm">' in report and "Early warning" in report


def test_a_resume_would_know_what_the_run_knew(run: Run) -> None:
    """The only checkpoint is that of the end; the monitor in it stands where the last line that it wrote says."""
    (checkpoint,) = RunFolder.view(run.run_dir).checkpoints()
    assert checkpoint.step == run.metrics()[-1]["step"]
    seen = diagnosed(run)
    state = TrainingState.load(checkpoint.state)
    monitor = Monitor()
    monitor.load_state_dict(state.monitor)
    assert monitor.state.rank == seen[-1]["monitor/level"]  # a step or two after the alarm; the quantity may have come back by then
    told = [event for event in RunFolder.view(run.run_dir).read_monitor_events() if event.name == first_alarm(run).name]
    assert monitor.states[told[-1].name] is told[-1].state and state.monitor["series"]["k3_kl"]["seen"] == len(seen)
    assert state.totals[f"monitor/alarms_total/{first_alarm(run).name}"] >= 1 and state.replacement is None
    assert state.totals.get("monitor/left_out_total", 0) == len(run.metrics()) - len(seen)


def test_diagnostics_are_timed_and_detailed(run: Run) -> None:
    seen = diagnosed(run)
    assert len(seen) >= 12 and all(line["time/diagnose_s"] > 0 and "correction/bucket_rho_std_0" in line for line in seen)
