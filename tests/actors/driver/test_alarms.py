"""What alarms set off: at most one replacement, remembered over a resume; a stop each time; and the controller that does it. And what the
learning rate does when answers grow long."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from evenkeel.actors.carriers import PreparedBatch
from evenkeel.actors.checkpoints.state import AnswerLengths, Replacement
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.alarms import AlarmResponse, after_batch
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


DECAY = (
    "monitor.thresholds.skip_steps=1",
    "monitor.thresholds.baseline_steps=8",
    "monitor.length_decay.above=2",
    "monitor.length_decay.steps=3",
    "monitor.length_decay.factor=0.5",
    "monitor.length_decay.least=0.2",
)


def test_the_rate_falls_each_time_that_answers_have_been_long_for_so_many_batches() -> None:
    """The level is 10: the first batch is left out, and of the next eight it is the median, however long one is. 20 is not above twice
    that. What has been two long batches in a row is none after a usual one."""
    first = [500.0, *[10.0] * 7, 900.0]
    then = [20.1, 20.1, 20.0, 20.1, 20.1, 20.1, *[30.0] * 3, *[30.0] * 3, *[30.0] * 6]
    monitor, lengths, scales, told = config(*DECAY).monitor, AnswerLengths(), [], []
    for length in first + then:
        lengths, said = after_batch(lengths, length, monitor)
        scales.append(lengths.rate_scale)
        told += [said] * bool(said)
    assert scales == [1.0] * (9 + 5) + [0.5] * 3 + [0.25] * 3 + [0.2] * 7
    assert told[0] == (
        "answers grow long: 20 tokens on average, and in 3 batches in a row more than 2 times the level of the start, 10; the learning "
        "rate is 0.5 of its schedule's from the next step on"
    )
    assert len(told) == 3, "what has reached its least says no more"
    assert lengths.first == tuple(first), "a checkpoint holds no more than the level takes"


def test_without_the_setting_nothing_is_followed() -> None:
    assert after_batch(AnswerLengths(), 1e9, config().monitor) == (AnswerLengths(), "")


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

    def did(self, *_: Any) -> None: ...

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


def of_lengths(*tokens: int) -> PreparedBatch:
    """A batch of answers so long, that is trained on in the next step."""
    answers = [SimpleNamespace(response_tokens=count) for count in tokens]
    return SimpleNamespace(groups=[SimpleNamespace(valid=answers)], corrected=None, correction=None, version=10)  # type: ignore[return-value]


def test_the_controller_trains_with_the_rate_to_which_long_answers_have_brought_it_before_and_after_a_resume() -> None:
    """The batch that is the third long one is trained as the two before; the next one, and the first one of a resume, with half."""
    scales, noted = [], []

    async def step(*_: Any, step: int, rate_scale: float) -> None:
        scales.append(rate_scale)

    def trained(one: Any, *batches: PreparedBatch) -> AnswerLengths:
        one._learner = SimpleNamespace(step=step)
        one._recorder.note, one._recorder.doing = noted.append, lambda _: None
        for batch in batches:
            asyncio.run(one._learn(batch))
            one._follow_lengths(batch)
        return one._lengths  # type: ignore[no-any-return]

    one, _, recorder = controller(*DECAY)
    one._lengths = AnswerLengths(first=(10.0,) * 9)
    saved = trained(one, *[of_lengths(10, 40)] * 4)
    assert scales == [1.0, 1.0, 1.0, 0.5] and [line for line in recorder.told if "the learning rate is 0.5" in line]
    assert noted == [{"monitor/rate_scale": scale} for scale in scales]
    one._source.saved, one._pool = mock.AsyncMock(return_value=(None, None)), None
    one._by_disk, one._task = mock.AsyncMock(), SimpleNamespace(fingerprint="", state={})
    one._recorder.disk, one._recorder.totals = SimpleNamespace(result=lambda _: None), dict
    assert asyncio.run(one._training_state()).lengths == saved
    empty: dict[str, Any] = {"step": 41, "weight_version": 41, "elapsed_s": 0.0, "totals": {}, "book": None, "monitor": None}
    state: Any = (None, SimpleNamespace(**empty, replacement=None, lengths=saved))
    resumed: Any = Controller(config(*DECAY), None, None, ToldRecorder(), resume_from=state)  # type: ignore[arg-type]
    trained(resumed, *[of_lengths(10, 40)] * 3)
    assert scales[4:] == [0.5, 0.5, 0.25]
    off: Any = Controller(config(), None, None, ToldRecorder(), resume_from=state)  # type: ignore[arg-type]
    trained(off, of_lengths(10, 40))
    assert scales[7:] == [1.0], "monitor.length_decay is null now: the schedule's own rate"


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
            book=None,
            monitor=None,
            replacement=Replacement(settings.correction, replaced),
            lengths=AnswerLengths(),
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
    monkeypatch.setattr("evenkeel.actors.driver.controller.start_learner", mock.AsyncMock(return_value=(mock.Mock(), [])))
    monkeypatch.setattr("evenkeel.actors.driver.controller.make_sync", mock.Mock(side_effect=InterruptedError("that was the notes' time")))
    with pytest.raises(InterruptedError):
        asyncio.run(one._start_parts())
    (plan, warning) = recorder.told
    assert plan.startswith("info: at the first alarm") and warning.startswith("warning: what monitor.on_alarm = switch_preset puts")
