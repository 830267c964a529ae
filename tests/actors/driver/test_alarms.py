"""What alarms set off: at most one replacement, remembered over a resume; a stop each time; and the controller that does it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from evenkeel.actors.checkpoints.state import Replacement
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.alarms import AlarmResponse
from evenkeel.actors.driver.controller import Controller
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.early_warning.monitor import Event, State
from evenkeel.recipe import load_config
from tests.actors.cases import FakeActor
from tests.actors.driver.controller_cases import source

RECIPE = Path(__file__).parents[2] / "e2e" / "small.yaml"
SWITCH = ("monitor.on_alarm=switch_preset", "monitor.preset=mis-geometric")


def config(*overrides: str) -> RunConfig:
    return load_config(RunConfig, RECIPE, overrides)


def alarms(*overrides: str, earlier: Replacement | None = None) -> AlarmResponse:
    run = config(*overrides)
    return AlarmResponse(run.monitor, run.correction, earlier)


def event(name: str = "k3_kl", state: State = State.ALARM, step: int = 41) -> Event:
    return Event(step, name, state, 0.008, 8.0, f"{name} = 0.008")


def test_nothing_is_done_unless_it_is_asked_for() -> None:
    response = alarms()
    response.take([event()])
    assert response.decide() is None and response.notes() == []


def test_a_replacement_that_would_leave_out_most_at_an_alarm_is_told_at_the_start() -> None:
    """mis-geometric has a band of 0.001 nats: at an alarm the KL is beyond it. Presets on tokens hold."""
    (plan, _), (level, text) = alarms(*SWITCH).notes()
    assert plan == "info" and level == "warning", "a plan is no trouble; one that won't help is"
    assert text.startswith("what monitor.on_alarm = switch_preset puts in place would not hold at an alarm: ")
    assert "once the KL exceeds 0.001 nats" in text and "dppo-binary-tv" in text
    assert [level for level, _ in alarms("monitor.on_alarm=switch_preset", "monitor.preset=mis-full").notes()] == ["info"]


def test_only_alarms_count() -> None:
    response = alarms("monitor.on_alarm=stop")
    response.take([event(state=State.WATCH), event(state=State.OK)])
    assert response.decide() is None


def test_each_alarm_stops_once() -> None:
    response = alarms("monitor.on_alarm=stop")
    response.take([event(), event("ess_token")])
    action = response.decide()
    assert action is not None and action.replacement is None
    assert action.text == "alarm of k3_kl at step 41: the run ends with a checkpoint, as monitor.on_alarm = stop asks for"
    assert response.decide() is None
    response.take([event("ess_token")])
    assert response.decide() is not None


def test_the_correction_is_replaced_once() -> None:
    settings = config(*SWITCH)
    response = alarms(*SWITCH)
    assert response.correction == settings.correction
    response.take([event()])
    action = response.decide()
    assert action is not None and action.replacement is not None
    assert action.text == "alarm of k3_kl at step 41: the correction becomes preset mis-geometric, from the next batch that is begun"
    assert response.correction == action.replacement.correction == settings.monitor.after_alarm(settings.correction)
    response.take([event("ess_token")])
    assert response.decide() is None


def test_a_resume_goes_on_with_the_replacement_unless_another_correction_is_configured() -> None:
    before = alarms(*SWITCH)
    before.take([event()])
    before.decide()
    resumed = alarms(*SWITCH, earlier=before.replacement)
    assert resumed.correction.preset == "mis-geometric" and resumed.replacement == before.replacement
    assert resumed.notes()[0][0] == "info" and "an earlier alarm has put in place" in resumed.notes()[0][1]
    resumed.take([event()])
    assert resumed.decide() is None
    without_action = alarms(earlier=before.replacement)
    assert without_action.correction.preset == "mis-geometric"
    changed = alarms("correction.preset=icepop", earlier=before.replacement)
    assert changed.correction.preset == "icepop" and "has changed since" in changed.notes()[0][1]


def test_narrower_bounds_are_no_answer_to_rejection() -> None:
    """They would reject still more; and tokens that were drawn from another policy stay what they are."""
    response = alarms("monitor.on_alarm=tighten")
    response.take([event("rejected_share"), event("broken_tokens"), event("rho_mean_deviation")])
    assert response.decide() is None
    response.take([event("rejected_share"), event("drift_k3_kl")])
    action = response.decide()
    assert action is not None and "alarm of drift_k3_kl" in action.text and "tightened by 0.5" in action.text
    assert response.correction.importance.upper == pytest.approx(2**0.5)  # tis-token: at most 2


MONITOR: dict[str, Any] = {"series": {}, "states": {}}


class Service:
    def __init__(self) -> None:
        self.switched: list[CorrectionConfig] = []

    async def switch(self, before: CorrectionConfig, correction: CorrectionConfig) -> dict[str, Any]:
        self.switched.append(correction)
        return MONITOR


class ToldRecorder:
    disk = None

    def __init__(self) -> None:
        self.told: list[str] = []

    async def flush(self) -> None:
        self.told.append("(the step's own events)")

    def event(self, level: str, text: str, kind: str = "") -> None:
        self.told.append(f"{level}: {text}" + (f" ({kind})" if kind else ""))

    def stop_waiting(self) -> None: ...

    def waiting(self, notice: Any) -> None: ...


def controller(*overrides: str, step: int = 41) -> tuple[Any, Service, ToldRecorder]:
    """One that stands between two steps, without its actors."""
    service, recorder = Service(), ToldRecorder()
    one: Any = Controller(config(*overrides), None, None, recorder)  # type: ignore[arg-type]
    one._source, one._step = source(one, FakeActor(service)), step
    return one, service, recorder


def test_the_controller_switches_and_says_so_after_the_alarm() -> None:
    one, service, recorder = controller(*SWITCH)
    one._alarms.take([event()])
    asyncio.run(one._answer_alarms())
    assert [correction.preset for correction in service.switched] == ["mis-geometric"] and not one._ends_early
    assert one._source.monitor == MONITOR, "with which a service begins that has to replace this one"
    assert recorder.told[0] == "(the step's own events)" and "the correction becomes preset mis-geometric" in recorder.told[1]


def test_the_controller_ends_the_run_unless_it_is_over_anyway() -> None:
    one, service, told = controller("monitor.on_alarm=stop")
    one._alarms.take([event()])
    asyncio.run(one._answer_alarms())
    assert one._ends_early and "alarm of k3_kl" in one._alarm and service.switched == []
    assert told.told[-1] == f"warning: {one._alarm} (ending)", "by its kind `evenkeel doctor RUN_DIR` knows that this is an end"
    last, _, recorder = controller("monitor.on_alarm=stop", "steps=41")
    last._alarms.take([event()])
    asyncio.run(last._answer_alarms())
    assert not last._ends_early and not any("ends with a checkpoint" in line for line in recorder.told)


def test_a_resumed_controller_goes_on_with_the_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(*SWITCH)
    replaced = settings.monitor.after_alarm(settings.correction)
    assert replaced is not None
    saved: Any = (
        None,
        SimpleNamespace(
            step=41,
            weight_version=41,
            elapsed_s=0.0,
            totals={},
            queue=None,
            monitor=None,
            replacement=Replacement(settings.correction, replaced),
        ),
    )
    one: Any = Controller(settings, None, None, ToldRecorder(), resume_from=saved)  # type: ignore[arg-type]
    one._source = source(one, None)
    monkeypatch.setattr("evenkeel.actors.driver.batches.start_service", lambda *_: SimpleNamespace())
    nothing_else = mock.AsyncMock(side_effect=InterruptedError("no other part starts here"))
    monkeypatch.setattr("evenkeel.actors.driver.controller.still_there", nothing_else)
    one._places = None
    with pytest.raises(InterruptedError):
        asyncio.run(one._start_parts())
    assert one._source.correction == replaced != settings.correction


def test_the_controller_says_the_notes_of_the_start_at_their_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """At "info" nobody who looks for warnings would find that the replacement won't help."""
    one, _, recorder = controller(*SWITCH)
    one._held_out, one._pool, one._places = [mock.Mock()], mock.Mock(), None
    one._source = mock.Mock(parts={}, fill=mock.AsyncMock())
    monkeypatch.setattr("evenkeel.actors.driver.controller.still_there", mock.AsyncMock())
    monkeypatch.setattr("evenkeel.actors.driver.controller.start_learner", mock.AsyncMock(return_value=(None, [])))
    monkeypatch.setattr("evenkeel.actors.driver.controller.make_sync", mock.Mock(side_effect=InterruptedError("that was the notes' time")))
    with pytest.raises(InterruptedError):
        asyncio.run(one._start_parts())
    (plan, warning) = recorder.told
    assert plan.startswith("info: at the first alarm") and warning.startswith("warning: what monitor.on_alarm = switch_preset puts")
