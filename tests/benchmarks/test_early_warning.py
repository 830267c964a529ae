"""The scoring of warnings, on series made by hand whose scores can be counted; and our monitor on the recorded runs."""

import math
import statistics

import pytest

from benchmarks.early_warning import (
    CANDIDATES,
    Audit,
    Setting,
    Warned,
    WarningScore,
    alone,
    choose,
    cusum_turn,
    first_watch,
    monitor_config,
    monitor_warnings,
    of,
    score,
    shares,
    turn_of,
)
from evenkeel.correction.early_warning.monitor import MonitorConfig
from lab.recorded_runs import SERIES, RecordedRun, collapse_step, load_runs, write_run

GOOD, BAD = 0.6, 0.0


def outcome(*stretches):
    """(reward, steps) one after another."""
    return [reward for reward, steps in stretches for _ in range(steps)]


def run(rewards, *, onset=None, seed=1, **series):
    return RecordedRun("made up", seed, {"sampled_reward": rewards, **series}, onset)


def test_a_collapse_is_the_step_from_which_the_reward_stays_lost():
    """From 0.6 to 0 at step 50: the mean of steps 48 to 52 is 0.24, the first under 0.3; that of 47 to 51 is 0.36.

    To 0.2 it takes one step more: 0.36 at step 50, 0.28 at 51.
    """
    assert collapse_step(outcome((GOOD, 50), (BAD, 30))) == 50
    assert collapse_step(outcome((0.2, 20), (GOOD, 30), (0.2, 30))) == 51, "half of the best, not of the start"


@pytest.mark.parametrize(
    "rewards",
    [
        outcome((GOOD, 80)),
        outcome((GOOD, 30), (BAD, 20), (GOOD, 30)),  # it comes back
        outcome((GOOD, 50), (0.35, 30)),  # worse, but not lost
        outcome((GOOD, 72), (BAD, 8)),  # too short to tell
        outcome((BAD, 80)),  # it never was anything
    ],
)
def test_what_is_no_collapse(rewards):
    assert collapse_step(rewards) is None


def test_detection_lead_and_false_alarms_by_hand():
    """Three collapses at step 50, disturbed from step 30 on, and a run that stays well: 3 * 30 + 80 = 170 healthy steps."""
    lost = outcome((GOOD, 50), (BAD, 30))
    runs = [run(lost, onset=30), run(lost, onset=30), run(lost, onset=30), run(outcome((GOOD, 80)))]
    said = [
        [Warned(10, "a", False), Warned(38, "a", False), Warned(45, "b", True)],  # a false alarm, then 12 steps ahead; 5 for an alarm
        [Warned(50, "a", True)],  # too late
        [Warned(30, "a", False)],  # at once: 20 steps
        [Warned(70, "a", True), Warned(71, "b", True)],
    ]
    result = score(runs, said)
    assert (result.collapsed, sorted(result.leads)) == (3, [12, 20])
    assert result.detection == pytest.approx(2 / 3)
    assert result.lead == (6, 12, 16)  # of 0, 12, 20
    assert (result.false_alarms, result.disturbed, result.healthy_steps) == (3, 2, 170)
    assert result.false_alarm_rate == pytest.approx(300 / 170)
    assert result.merit == pytest.approx((2 / 3 - 2 / 4, 12))
    severe = score(runs, said, only_severe=True)
    assert (severe.leads, severe.false_alarms, severe.disturbed) == ([5], 2, 1)


def test_a_collapse_before_its_onset_is_not_announced():
    result = score([run(outcome((GOOD, 20), (BAD, 60)), onset=40)], [[Warned(5, "a", False)]])
    assert (result.leads, result.false_alarms, result.healthy_steps) == ([], 1, 20)


def test_nothing_to_score():
    assert math.isnan(WarningScore().detection) and math.isnan(WarningScore().false_alarm_rate)


def test_thresholds_are_chosen_on_one_half_alone():
    """A system that is right below a threshold of 1 on even seeds, above it on odd ones: the even ones decide."""
    lost = outcome((GOOD, 50), (BAD, 30))
    runs = [run(lost, onset=30, seed=seed) for seed in (*range(8), 10, 11)]
    fitted, held_out, fresh = shares(runs)
    assert [[runs[k].seed for k in share] for share in (fitted, held_out, fresh)] == [[0, 2, 4, 6], [1, 3, 5, 7], [10, 11]]

    def system(setting):
        is_low = setting.threshold < 1
        return [[Warned(40, "a", False)] if is_low == (one.seed % 2 == 0) else [] for one in runs]

    chosen = choose(runs, system, fitted, only_severe=False)
    assert chosen == Setting(max(c.threshold for c in CANDIDATES if c.threshold < 1)), "the nearest of equals to what is shipped"
    assert choose(runs, system, held_out, only_severe=False) == Setting()


def test_a_setting_of_ones_is_the_monitor_as_shipped():
    assert Setting() in CANDIDATES and monitor_config(Setting()) == MonitorConfig()


def test_warnings_are_changes_for_the_worse():
    """Up to 3x, up to 12x, down to 3x, down to 1x: a watch, an alarm, and no words on the way back."""
    k3 = [1e-3 * factor for factor in outcome((1, 50), (3, 30), (12, 30), (3, 30), (1, 30))]
    said = monitor_warnings(run([GOOD] * len(k3), k3_kl=k3))
    assert [(warned.what, warned.is_severe) for warned in said] == [("k3_kl", False), ("k3_kl", True)]
    assert 50 <= said[0].step < 60 and 80 <= said[1].step < 90


def test_a_signal_alone_speaks_as_the_monitor_does():
    """Of a run in which nothing else is known the monitor says the same; a falling number is followed by what grows then."""
    k3 = [1e-3 * factor for factor in outcome((1, 50), (3, 30), (12, 30), (3, 30), (1, 30))]
    told = run([GOOD] * len(k3), k3_kl=k3, entropy=[1e-3 / value for value in k3], onset=60)
    said = monitor_warnings(told)
    for signal in ("k3", "entropy falls"):
        (mine,) = alone([told], signal, Setting())
        assert [(warned.step, warned.is_severe) for warned in mine] == [(warned.step, warned.is_severe) for warned in said]
        assert {warned.what for warned in mine} == {signal}
    (later,) = alone([told], "k3", Setting(3.0))
    assert [warned.is_severe for warned in later] == [False] and later[0].step >= 80, "a watch at 8 times the level; 64 never come"
    assert first_watch(told, "k3") == 60, "it has been watched since before the onset"
    assert first_watch(told, "drift k3") is None, "not recorded"


def test_a_disturbance_grows_from_its_onset_on():
    """20 steps from 1 version and the plain rate to 8 and four times it: half-way at the tenth, 1 + 7/2 versions rounded down."""
    from lab.record_collapse import CONDITIONS, Disturbance, at_step, onset_of

    end = CONDITIONS["staleness"]
    assert at_step(end, 29, onset=30) == Disturbance() and at_step(end, 49, onset=30) == at_step(end, 99, onset=30) == end
    assert at_step(end, 39, onset=30) == Disturbance(rate_factor=2.5, max_staleness=4)
    assert sorted(onset_of(seed) for seed in range(20)) == list(range(30, 50))


def test_what_is_recorded_with_which_engine():
    """Fresh batches for every engine but float32, whose names are as they were; each run in a file of its own."""
    from pathlib import Path

    from lab.record_collapse import ENGINES, wanted_runs

    plain = wanted_runs("float32", ("healthy", "noise"), (3,))
    assert [one.path(Path()).name for one in plain] == ["healthy-03.json.gz", "noise-03.json.gz"]
    runs = wanted_runs("float8", ("healthy", "learning_rate", "noise"), (0, 1))
    names = [one.path(Path()).name for one in runs]
    assert names == [f"float8-{name}-0{seed}.json.gz" for seed in (0, 1) for name in ("healthy", "learning_rate")]
    assert runs[1].settings == {
        "rate_factor": 10.0, "max_staleness": 0, "mu_noise": 0.0, "onset": 30, "ramp_steps": 20, "engine": "float8",
    }  # fmt: skip
    assert [name for name, one in ENGINES.items() if one.max_staleness] == ["float32"]


@pytest.fixture(scope="module")
def recorded():
    """The committed runs, and what our monitor says of each."""
    runs = load_runs()
    return runs, [monitor_warnings(one) for one in runs]


def test_what_is_written_is_what_is_read(tmp_path):
    series = {"k3_kl": [0.5, None, math.inf], "sampled_reward": [1.0, 0.0, 0.5]}
    write_run(tmp_path / "noise-03.json.gz", "noise", 3, {"onset": 41, "ramp_steps": 20}, series)
    assert load_runs(tmp_path) == [RecordedRun("noise", 3, series, onset=41)]
    batch = {"lengths": [2], "behavior": [-0.5, -1.0], "proximal": [-0.5, -1.1], "advantages": [1.0, 1.0]}
    write_run(tmp_path / "noise-03.json.gz", "noise", 3, {"onset": 41, "ramp_steps": 20}, series, {29: batch})
    assert load_runs(tmp_path)[0].batches == {29: batch}


def test_recorded_runs_by_outcome(recorded):
    """As benchmarks/early_warning.py prints it; a run's condition doesn't decide, its reward does."""
    runs, _ = recorded
    collapsed = {}
    for one in runs:
        collapsed[one.condition] = collapsed.get(one.condition, 0) + (one.collapse is not None)
    assert collapsed == {"healthy": 0, "learning_rate": 14, "noise": 14, "staleness": 13}
    assert all(one.collapse > one.onset for one in runs if one.collapse is not None)


def test_the_monitor_on_the_half_that_its_thresholds_are_not_from(recorded):
    """The figures of docs/correction.md: every collapse is announced, and the undisturbed runs stay quiet."""
    runs, said = recorded
    _, held_out, _ = shares(runs)
    result = score(of(runs, held_out), of(said, held_out))
    assert (len(result.leads), result.collapsed, result.runs) == (14, 14, 20)
    assert result.lead == (9.25, 13.5, 17.25)
    assert (result.false_alarms, result.disturbed) == (4, 1)
    severe = score(of(runs, held_out), of(said, held_out), only_severe=True)
    assert (len(severe.leads), severe.lead, severe.false_alarms) == (14, (9, 11.5, 14.5), 2)
    assert not any(words for one, words in zip(runs, said, strict=True) if one.condition == "healthy")


def test_the_monitor_on_runs_recorded_after_it_was_finished(recorded):
    """The figures of docs/correction.md for seeds 10 to 13: all twelve collapses are announced, and no run is disturbed."""
    runs, said = recorded
    _, _, fresh = shares(runs)
    result = score(of(runs, fresh), of(said, fresh))
    assert (len(result.leads), result.collapsed, result.runs, result.false_alarms) == (12, 12, 16, 0)
    assert result.lead == (12.75, 15, 18.25)
    severe = score(of(runs, fresh), of(said, fresh), only_severe=True)
    assert (len(severe.leads), severe.lead) == (12, (10.75, 13, 17.5))


def test_the_thresholds_are_the_best_of_the_other_half(recorded):
    """All 15 collapses of the even seeds are announced, half of them 17 steps ahead or more, and no run is disturbed."""
    runs, said = recorded
    fitted, _, _ = shares(runs)
    assert score(of(runs, fitted), of(said, fitted)).merit == (1, 17)


@pytest.fixture(scope="module")
def mismatched():
    """The committed runs of other engines at staleness 0, and what our monitor says of each."""
    runs = load_runs(SERIES / "mismatch")
    return runs, [monitor_warnings(one) for one in runs]


MISMATCHED = ("bfloat16", "float8", "float8_blocks", "moe_bfloat16")


def test_runs_with_a_mismatch_in_every_step(mismatched):
    """Ten seeds of each engine; the undisturbed stay well, the others collapse. Nothing but mismatch is between mu and pi_prox."""
    runs, _ = mismatched
    collapsed = {(one.condition, one.seed): one.collapse is not None for one in runs}
    expected = [
        (f"{engine}-{end}", seed, end != "healthy") for engine in MISMATCHED for end in ("healthy", "steep_rate") for seed in range(10)
    ]
    assert collapsed == {(condition, seed): is_lost for condition, seed, is_lost in expected}
    assert all(one.collapse > one.onset for one in runs if one.collapse is not None)
    for one in runs:
        assert all(value > 0 for value in one.series["mismatch_k3_kl"][: one.onset])  # lost policies reach 0
        assert one.series["mismatch_k3_kl"] == one.series["k3_kl"] and set(one.series["staleness_mean"]) == {0.0}


def test_drift_and_bad_updates_warn_and_mismatch_does_not(mismatched):
    """The figures of docs/correction.md, over all engines: watches before the collapse, and in runs that stay well."""
    runs, _ = mismatched
    warned = {"mismatch k3": 6, "drift k3": 32, "bad updates": 35, "gradient norm": 6, "entropy falls": 4}
    false = {"mismatch k3": 11, "drift k3": 0, "bad updates": 0, "gradient norm": 4, "entropy falls": 35}
    for signal in warned:
        first = [(one, first_watch(one, signal)) for one in runs]
        lost = [one.collapse - step for one, step in first if one.collapse is not None and step is not None and step < one.collapse]
        assert len(lost) == warned[signal], signal
        assert sum(step is not None for one, step in first if one.collapse is None) == false[signal], signal


def test_mismatch_falls_when_the_policy_is_lost(mismatched):
    """Where one token has all the probability both sides say 1: 35 of 40 runs end with less than a tenth of what was usual."""
    runs, _ = mismatched
    ends = []
    for one in runs:
        if one.collapse is not None:
            mismatch = one.series["mismatch_k3_kl"]
            ends.append(statistics.median(mismatch[-10:]) / statistics.median(mismatch[2 : one.onset]))
    assert len(ends) == 40 and sum(end < 0.1 for end in ends) == 35 and statistics.median(ends) < 1e-6


def test_the_monitor_on_runs_with_mismatch(mismatched):
    """The figures of docs/correction.md for the odd seeds."""
    runs, said = mismatched
    _, held_out, _ = shares(runs)
    result = score(of(runs, held_out), of(said, held_out))
    assert (len(result.leads), result.collapsed, result.runs, result.lead) == (19, 20, 40, (2, 4, 7.25))
    assert (result.false_alarms, result.disturbed) == (9, 6)
    severe = score(of(runs, held_out), of(said, held_out), only_severe=True)
    assert (len(severe.leads), severe.lead, severe.false_alarms, severe.disturbed) == (12, (0, 1, 5.25), 2, 2)


def test_float16_recorded_last_says_the_same():
    """Ten seeds, of which nothing was decided; k3 of the mismatch is usually 8e-7."""
    runs = load_runs(SERIES / "mismatch_float16")
    assert {(one.condition, one.collapse is not None) for one in runs} == {("float16-healthy", False), ("float16-steep_rate", True)}
    assert len(runs) == 20
    for signal, warned, false in (("mismatch k3", 4, 5), ("drift k3", 9, 0), ("bad updates", 9, 0)):
        first = [(one.collapse, first_watch(one, signal)) for one in runs]
        assert sum(step is not None and step < lost for lost, step in first if lost is not None) == warned, signal
        assert sum(step is not None for lost, step in first if lost is None) == false, signal
    result = score(runs, [monitor_warnings(one) for one in runs])
    assert (len(result.leads), result.collapsed, result.lead) == (10, 10, (5, 6, 7.75))


def test_the_turn_is_where_falls_have_added_up() -> None:
    """Ten rewards of mean 0.6 and deviation 0.1. At 0.3 each step is 3 deviations under the mean, of which half a one is for nothing: 2.5,
    then 5, over 3 at the second step. At 0.52 it is 0.3 a step: over 3 at the eleventh. At 0.55 nothing is left."""
    start = [0.5, 0.7] * 5
    assert cusum_turn([*start, *[0.3] * 20]) == 11
    assert cusum_turn([*start, *[0.52] * 20]) == 20
    assert cusum_turn([*start, *[0.55] * 200]) is None and cusum_turn(start) is None


def test_a_warning_after_the_turn_is_an_audit() -> None:
    """A run that falls from 0.6 to 0 at step 50 has turned at 50: before, it hadn't moved at all. Warnings 12 steps and 1 before, and 3
    after; one before the onset is none; in an undisturbed run of 0.6 throughout any is a false alarm. A run that was disturbed and falls
    to 0.36, which is no collapse, is of neither kind."""
    lost, kept = run(outcome((GOOD, 50), (BAD, 50)), onset=30), run(outcome((GOOD, 100)))
    survived = run(outcome((GOOD, 50), (0.6 * GOOD, 50)), onset=30)
    assert turn_of(lost) == 50 and turn_of(kept) is None

    def said(*steps: int) -> list[Warned]:
        return [Warned(step, "k3", False) for step in steps]

    warnings = [said(38, 60), said(49), said(53), said(10), said(99), [], said(55)]
    found = Audit.of([lost, lost, lost, lost, kept, kept, survived], warnings)
    assert found == Audit(failed=4, flagged=3, leads=(12, 1, -3), clean=2, false_alarms=1, survived=1, survived_flagged=1)
    assert (found.warned(), found.warned(5)) == (2, 1)
    assert found.row("x") == "| x | 3 of 4 | 2 | 1 | 1 | 1 of 2 | 1 of 1 |"
