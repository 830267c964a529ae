"""The monitor on synthetic series: silence on noise at the stated rates, warning on growth in a known number of steps, what it says."""

import math
import pickle
import random

import pytest

from evenkeel.correction.early_warning.monitor import SYMPTOMS, Monitor, MonitorConfig, State, Symptom, theil_sen, usual_level

START = 2 + 20  # steps skipped and of the baseline
K3 = 1e-3


def noisy(seed, *, sigma=0.2, rate=0.0, begins=40, memory=0.0):
    """Endless k3 KL: noise on the log scale, growing by `rate` nats a step once it begins."""
    rng, noise, step = random.Random(seed), 0.0, 0
    while True:
        noise = memory * noise + math.sqrt(1 - memory**2) * rng.gauss(0, sigma)
        yield K3 * math.exp(noise + rate * max(0, step - begins))
        step += 1


def first_events(series, steps, name="k3_kl", monitor=None):
    """{state: first step at which the symptom entered it}."""
    monitor = monitor or Monitor()
    found = {}
    for step in range(steps):
        for event in monitor.update(step, {name: next(series)}):
            found.setdefault(event.state, step)
    return found


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5])
def test_false_alarms_on_independent_noise(sigma):
    """As the module states: of 100 runs of 300 steps, one watch at most and no alarm (seeds 0 to 99)."""
    found = [first_events(noisy(seed, sigma=sigma), 300) for seed in range(100)]
    assert sum(bool(events) for events in found) <= 1
    assert not any(State.ALARM in events for events in found)


def test_false_alarms_on_noise_with_a_memory():
    found = [first_events(noisy(seed, sigma=0.3, memory=0.8), 300) for seed in range(60)]
    assert sum(bool(events) for events in found) <= 60 / 5
    assert not any(State.ALARM in events for events in found)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3])
def test_growth_is_seen_in_time(rate):
    """A series reaches 2x after log 2 / rate steps and 4x after log 4 / rate; the median of 8 lags by 4, patience by 1.

    Noise may double the first, and fast growth goes straight to the alarm.
    """
    for seed in range(20):
        found = first_events(noisy(seed, rate=rate), 200)
        alarm = found[State.ALARM] - 40
        watch = found.get(State.WATCH, found[State.ALARM]) - 40
        assert 0 < watch <= 2 * (math.log(2) / rate + 5)
        assert math.log(4) / rate * 0.8 <= alarm <= math.log(4) / rate * 1.3 + 6
        assert watch <= alarm and (watch < alarm or rate > 0.1)


def test_a_jump_without_noise_to_the_step():
    """5x from step 50 on: the median of 2 is their mean, at step 50 at sqrt(5) = 2.2x, from step 51 on at 5x, for three steps at 53."""
    assert first_growth(MonitorConfig(patience=3)) == {State.ALARM: (53, pytest.approx(5))}


def test_the_level_of_many_steps_is_slower():
    """The median of 8 moves with the 5th new value. At step 53 four of eight are new, the mean of the middle two is at sqrt(5) = 2.2x;

    from step 54 on the median is at 5x, and has been for three steps at 56.
    """
    assert first_growth(MonitorConfig(patience=3, jump_steps=8)) == {State.ALARM: (56, pytest.approx(5))}


def first_growth(config):
    """{state: (step, growth)} of a series that jumps to 5x at step 50."""
    monitor, found = Monitor(config), {}
    for step in range(80):
        for event in monitor.update(step, {"k3_kl": K3 * (5 if step >= 50 else 1)}):
            found[event.state] = step, event.growth
    return found


def test_small_changes_are_no_news_however_sure():
    """1.5x without any noise is far beyond every scatter, and below what is worth a word."""
    assert first_events((K3 * (1.5 if step >= 50 else 1) for step in range(200)), 200) == {}


def test_nothing_is_said_before_there_is_a_start():
    assert first_events((K3 * 3**step for step in range(40)), START + 7) == {}


def test_recovery_is_an_event_too():
    series = (K3 * (10 if 50 <= step < 70 else 1) for step in range(120))
    monitor = Monitor()
    events = [event for step in range(120) for event in monitor.update(step, {"k3_kl": next(series)})]
    assert [event.state for event in events][-1] is State.OK and "is back at its usual level" in events[-1].message
    assert events[0].state is State.ALARM or events[0].state is State.WATCH
    assert monitor.state is State.OK


def run(values, steps=100, monitor=None):
    """All events; values(step) gives the diagnostics."""
    monitor = monitor or Monitor()
    return [event for step in range(steps) for event in monitor.update(step, values(step))]


def test_the_line_says_where_and_what_to_try():
    def values(step):
        late = 8 if step >= 50 else 1
        buckets = {f"bucket_rho_std_{k}": 0.1 * (late if k == 0 else 1) for k in range(5)}
        return {"k3_kl": K3 * late, "stale_k3_kl": 2 * K3 * late, "mismatch_k3_kl": K3 / 9, **buckets}

    alarm = next(event for event in run(values) if event.state is State.ALARM)
    assert alarm.name == "k3_kl" and alarm.growth == pytest.approx(8)
    for words in ("8.0 times the level of steps 2 to 21", "on stale tokens only", "in tokens under p = 0.1", "lower max_staleness"):
        assert words in alarm.message
    assert "\n" not in alarm.message


def test_mismatch_explains_the_whole_gap():
    """When fresh tokens are off, the gap over all tokens and the weights' effective size follow: one cause, one event."""

    def values(step):
        gap = K3 * (8 if step >= 50 else 1)
        return {"mismatch_k3_kl": gap, "k3_kl": gap, "stale_k3_kl": gap, "ess_token": 1 - 10 * gap}

    monitor = Monitor()
    assert {event.name for event in run(values, monitor=monitor)} == {"mismatch_k3_kl"}
    assert monitor.states["k3_kl"] is State.ALARM  # known, but not said


def test_drift_in_bypass_is_not_blamed_on_the_engines():
    """Four optimizer steps a batch without proximal logprobs: the first one's tokens show the same mismatch, the later ones' move on."""

    def values(step):
        late = 8 if step >= 50 else 1
        return {"mismatch_k3_kl": K3, "k3_kl": K3, "drift_from_behavior_k3_kl": 20 * K3 * late}

    events = run(values)
    assert {event.name for event in events} == {"drift_from_behavior_k3_kl"} and events[-1].state is State.ALARM
    assert "optimizer steps" in events[-1].message and "engine" not in events[-1].message

    def off_policy(step):
        gap = K3 * (8 if step >= 50 else 1)
        return {"k3_kl": gap, "drift_from_behavior_k3_kl": 20 * gap}

    assert {event.name for event in run(off_policy)} == {"k3_kl"}  # the first step's tokens are off-policy already


def test_a_mean_rho_that_is_not_one_alarms_at_once_and_scatter_does_not():
    """Five standard errors; below them, a value that comes and goes is nothing."""
    events = Monitor().update(0, {"rho_mean_deviation": 6.0})
    assert [event.state for event in events] == [State.ALARM]
    assert all(word in events[0].message for word in ("temperature", "top-p", "shifted by one", "another policy"))
    rng = random.Random(0)
    assert run(lambda step: {"rho_mean_deviation": abs(rng.gauss(0, 1))}, 400) == []


def test_what_is_missing_of_one_is_followed():
    """Effective sample size from 0.99 to 0.8: what is missing grows 20-fold."""
    events = run(lambda step: {"ess_token": 0.99 if step < 50 else 0.8})
    assert events[-1].state is State.ALARM and events[-1].growth == pytest.approx((0.2 + 1e-3) / (0.01 + 1e-3))


def test_a_loss_of_sample_size_under_a_twentieth_is_none():
    """0.1 % becomes 4 % missing, a growth of 20, and the weights still count almost as one; 6 % is what is told."""
    assert run(lambda step: {"ess_token": 0.999 if step < 50 else 0.96}) == []
    assert [e.name for e in run(lambda step: {"ess_token": 0.999 if step < 50 else 0.94})][:1] == ["ess_token"]


def test_limits_and_infinities_alarm_at_once():
    assert [e.state for e in Monitor().update(0, {"broken_tokens": 3.0})] == [State.ALARM]
    assert [e.state for e in Monitor().update(0, {"rejected_share": 0.95})] == [State.ALARM]
    monitor = Monitor()
    assert monitor.update(0, {"k3_kl": math.inf}) == []  # no limit of its own: patience holds
    assert [e.state for e in monitor.update(1, {"k3_kl": math.nan})] == [State.ALARM]


def test_absent_numbers_leave_a_series_alone():
    """Every other step has none: the same events, at twice the steps."""
    dense = first_events(noisy(1, rate=0.1), 100)
    series, monitor, found = noisy(1, rate=0.1), Monitor(), {}
    for step in range(200):
        for event in monitor.update(step, {"k3_kl": next(series)} if step % 2 == 0 else {}):
            found.setdefault(event.state, step)
    assert found == {state: 2 * step for state, step in dense.items()}


@pytest.mark.parametrize("cut", [0, 10, 30, 55])
def test_a_restart_changes_nothing(cut):
    """A monitor that was pickled into a checkpoint goes on as if it had never stopped."""
    numbers = [next(series) for series in [noisy(3, rate=0.08)] for _ in range(120)]
    straight, resumed = Monitor(), Monitor()
    expected = [straight.update(step, {"k3_kl": value}) for step, value in enumerate(numbers)]
    got = [resumed.update(step, {"k3_kl": value}) for step, value in enumerate(numbers[:cut])]
    resumed = pickle.loads(pickle.dumps(resumed))
    got += [resumed.update(step, {"k3_kl": value}) for step, value in enumerate(numbers[cut:], cut)]
    assert got == expected and any(expected)


def test_memory_does_not_grow():
    monitor = Monitor()
    series = noisy(0)
    sizes = []
    for step in range(400):
        monitor.update(step, {"k3_kl": next(series)})
        if step in (100, 399):
            sizes.append(len(pickle.dumps(monitor)))
    assert sizes[1] <= sizes[0] + 16


def test_theil_sen():
    """A straight line with one wild value among nine keeps its slope; by hand for three values."""
    line = [2.0 * k + 1 for k in range(9)]
    assert theil_sen(line) == 2
    assert theil_sen([*line[:4], 1e6, *line[5:]]) == pytest.approx(2)
    assert theil_sen([0.0, 1.0, 5.0]) == 2.5  # slopes 1, 4, 2.5
    assert theil_sen([1.0]) == 0


def test_own_symptoms():
    """Any number can be followed, one of the learner too."""
    grad = Symptom("grad_norm", "gradients grow", "clip harder")
    events = run(lambda step: {"grad_norm": 1.0 if step < 50 else 9.0}, monitor=Monitor(symptoms=(grad,)))
    assert events[-1].name == "grad_norm" and "clip harder" in events[-1].message


def test_numbers_are_written_as_a_runs_metrics_of_them_are():
    """Shares in percent, nats with two digits; own symptoms as plain numbers."""
    for name, value, text in (
        ("rejected_share", 0.9704, "97.04%"),
        ("bad_update_share", 0.0123, "1.23%"),
        ("mismatch_k3_kl", 0.02049, "0.02"),
        ("rho_mean_deviation", 7.12345, "7.12"),
        ("broken_tokens", 12345.0, "12,345"),
    ):
        setting = MonitorConfig(setting="dense_bfloat16")
        told = run(lambda step, name=name, value=value: {name: value if step > 50 else 1e-9}, steps=70, monitor=Monitor(setting))
        assert told and told[-1].message.startswith(f"{name} = {text}, "), told
    grad = Symptom("grad_norm", "gradients grow", "clip harder", limit=5.0)
    assert Monitor(symptoms=(grad,)).update(0, {"grad_norm": 9.25})[0].message.startswith("grad_norm = 9.25: ")


def test_symptoms_are_known_numbers():
    from evenkeel.correction import DIAGNOSTICS

    assert all(symptom.name in DIAGNOSTICS for symptom in SYMPTOMS)


def test_a_resumed_monitor_goes_on_as_if_nothing_had_happened():
    """Events of 120 steps are those of k steps, a checkpoint (pickled) and 120 - k steps, to the last digit of their growth.

    Wherever it was taken: in the start, as the level rises, in the alarm, after it.
    """

    def values(step):
        gap = K3 * (6 if 50 <= step < 80 else 1) * (1 + 0.1 * (step % 3))
        return {"k3_kl": gap, "stale_k3_kl": gap, "mismatch_k3_kl": K3 / 9, "bad_update_share": 0.03 if step > 90 else 0.01}

    whole = run(values, 120)
    assert {event.state for event in whole} == {State.ALARM, State.OK, State.WATCH} and len({event.name for event in whole}) == 2
    for k in (5, 22, 40, 53, 54, 55, 60, 82, 85, 95):
        first, second = Monitor(), Monitor()
        events = [event for step in range(k) for event in first.update(step, values(step))]
        second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        assert second.states == first.states
        events += [event for step in range(k, 120) for event in second.update(step, values(step))]
        assert events == whole, k


def test_a_saved_state_is_apart_from_the_monitor():
    """What is updated after the checkpoint is no part of it; settings are the resumed run's own."""
    monitor = Monitor()
    for step in range(40):
        monitor.update(step, {"k3_kl": K3})
    saved = monitor.state_dict()
    before = pickle.dumps(saved)
    monitor.update(40, {"k3_kl": 1.0})
    assert pickle.dumps(saved) == before
    strict = Monitor(MonitorConfig(watch_growth=1.01, alarm_growth=1.02, patience=1))
    strict.load_state_dict(saved)
    assert [e.state for step in range(40, 46) for e in strict.update(step, {"k3_kl": K3 * 2})] == [State.ALARM]


def test_an_older_checkpoint_s_states_are_read():
    """It calls them "stands": an alarm that it holds is no new one after a resume."""
    alarmed, resumed = Monitor(), Monitor()
    for step in range(60):
        alarmed.update(step, {"k3_kl": K3 * (100 if step >= 40 else 1)})
    saved = alarmed.state_dict()
    resumed.load_state_dict({"series": saved["series"], "stands": saved["states"]})
    assert resumed.states["k3_kl"] is State.ALARM and resumed.state_dict() == saved


def test_what_is_forgotten_begins_anew():
    """Half of the tokens rejected under new bounds is their usual; the other symptom keeps its start and alarms."""
    monitor = Monitor()
    for step in range(60):
        monitor.update(step, {"rejected_share": 0.01, "bad_update_share": 0.01})
    monitor.forget(["rejected_share"])
    events = [e for step in range(60, 100) for e in monitor.update(step, {"rejected_share": 0.5, "bad_update_share": 0.2})]
    assert {event.name for event in events} == {"bad_update_share"}
    assert monitor.states["rejected_share"] is State.OK


def test_what_is_usual_covers_what_a_real_model_was_measured_with():
    """SmolLM2-135M, docs/mismatch_on_a_laptop.md: the largest k3 of its kinds of text, by type; of experts in float16 nothing is known."""
    for dtype, measured in (("float32", 4.7e-11), ("float16", 1.2e-4), ("bfloat16", 6.7e-3)):
        usual = usual_level(None, dtype, device="cpu")
        assert usual is not None and usual.high / 10 < measured <= usual.high < usual.alarm
    assert usual_level(None, "float16", device="cpu", has_experts=True) is usual_level(None, "float16", device="cuda") is None


def test_without_a_start_mismatch_is_held_against_what_is_usual_for_the_setting():
    """Dense bfloat16: 0.01 is the alarm level. From the first step on, as soon as patience allows; and it is no alarm without a setting."""
    told = run(lambda step: {"mismatch_k3_kl": 0.02}, steps=5, monitor=Monitor(MonitorConfig(setting="dense_bfloat16")))
    assert [(event.step, event.state) for event in told] == [(1, State.ALARM)]
    assert "above 0.01, the alarm level for dense, bfloat16 (1e-05 to 0.001 is usual)" in told[0].message
    assert run(lambda step: {"mismatch_k3_kl": 0.02}, steps=5) == []
    assert run(lambda step: {"mismatch_k3_kl": 0.009}, steps=80, monitor=Monitor(MonitorConfig(setting="dense_bfloat16"))) == []


def test_a_start_below_the_level_counts_more_than_the_level():
    """A start at 0.002 that doubles to 0.0046 is a watch by itself; a start above the level stays an alarm however steady it is."""
    setting = MonitorConfig(setting="float8_blocks")  # alarm at 0.004
    doubled = run(lambda step: {"mismatch_k3_kl": 0.002 * (2.3 if step > 50 else 1)}, monitor=Monitor(setting))
    assert [e.state for e in doubled] == [State.WATCH]
    steady = Monitor(setting)
    assert [e.step for e in run(lambda step: {"mismatch_k3_kl": 0.02}, steps=100, monitor=steady)] == [1]
    assert steady.state is State.ALARM


def test_rejection_is_told_with_its_criterion_and_the_ratios():
    numbers = {"rejected_share": 0.97, "rejected_by_ratio_geometric_rho": 0.96, "rejected_by_veto": 0.01, "log_ratio_mean": -0.0081}
    (event,) = Monitor().update(0, numbers)
    assert "96% by ratio_geometric_rho, at a mean log rho of -0.0081" in event.message
