"""Bounds, tokens, buckets, workers and books in a real Chromium are those of settings and files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evenkeel.actors.carriers import TokenSample, WaitNotice
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import EventKind, RunEvent, RunFolder
from evenkeel.correction import PRESETS, CorrectionConfig
from evenkeel.dashboard.correction_view import bounds_of, correction
from evenkeel.dashboard.open_run import OpenRun
from tests.evenkeel.dashboard.conftest import Seen, served
from tests.evenkeel.dashboard.made_runs import CONFIG, made, sample, with_tokens

Look = Callable[..., Seen]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunFolder, str]]:
    with made(tmp_path_factory.mktemp("correction")) as folder, served(folder.path) as address:
        for seconds in (30, 60):
            folder.write_event(RunEvent.now("warning", WaitNotice("start of rollout worker 0", seconds, "a <b>node</b>")))
        yield with_tokens(folder, 7, 40), address


def test_a_step_s_tokens_lie_among_the_bounds_of_the_settings(finished: tuple[RunFolder, str], look: Look) -> None:
    _, address = finished
    seen = look(address, "correction?step=7", "#bounds")
    of = sample(7).columns
    own = {k: (of["behavior"][k], of["proximal"][k] - of["behavior"][k]) for k in range(36) if of["sampled"][k]}
    for series, place in ((0, (4, 5)), (1, (6,)), (2, (8,)), (3, (7,))):  # kept, dropped, clipped, cut to a bound
        expected = sorted([float(x), float(y)] for k, (x, y) in own.items() if k % 9 in place)
        assert sorted(seen.points("Acceptance region", series)) == [[pytest.approx(x), pytest.approx(y, abs=1e-6)] for x, y in expected]
    lines = seen.page.evaluate("() => charts.get('Acceptance region').drawn.getOption().series[0].markLine.data.map(d => d.yAxis)")
    config = CorrectionConfig(preset="mis-full")
    assert math.log(config.importance.upper) in [pytest.approx(line) for line in lines]  # type: ignore[arg-type]
    text = seen.page.inner_text("#bounds")
    assert all(f"rejection: {criterion.label}" in text for criterion in config.rejection)
    rows = [row.split("\t") for row in seen.page.locator("#rejected tbody tr").all_inner_texts()]
    assert ["ratio_token_rho", "12.5%", "0", "0"] in rows and ["veto", "–", "0", "0"] not in rows
    sums = {int(n): y for n, y in seen.points("Sequences", 0)}
    assert "Sums over sequences of step 7" in seen.page.inner_text("main")
    assert sums == {5: pytest.approx(sum(y for k, (_, y) in own.items() if k >= 27), abs=1e-5)}


def test_a_run_that_tells_mismatch_and_staleness_apart_has_their_bounds_and_tokens(tmp_path: Path, look: Look) -> None:
    """split-mis bounds the mismatch, at sampling to behaviour, and clips what came since: both are axes then."""
    with made(tmp_path) as folder, served(folder.path) as address:
        folder.write_text("config.yaml", CONFIG.format(name="x", steps=40).replace("mis-full", "split-mis"))
        with_tokens(folder, 7)
        found = sample(7)
        found.columns["at_sampling"] = found.columns["behavior"] + found.columns["token_ids"].astype("float32") / 8 - 1
        label = "ratio_token_mismatch"
        TokenSample(found.version, found.answers, found.offsets, found.columns, ("other", label, "x")).save(folder.tokens_path(7))
        seen = look(address, "correction?step=7", "#bounds")
        assert seen.page.locator("#choose-ratio option:checked").inner_text() == "mismatch = at sampling / behaviour"
        kept = [[pytest.approx(float(found.columns["behavior"][k])), pytest.approx(k % 9 / 8 - 1)] for k in range(36) if k % 9 in (4, 5)]
        assert sorted(seen.points("Acceptance region", 0)) == sorted(kept, key=lambda one: one[0].expected)
        lines = "() => charts.get('Acceptance region').drawn.getOption().series[0].markLine.data.map(d => [Math.exp(d.yAxis), d.name])"
        told = sorted(seen.page.evaluate(lines))
        assert [bound for bound, _ in told] == [pytest.approx(0.5), pytest.approx(2.0)], "a bound of two parts is one line"
        assert told[1][1] == f"importance weight: truncate: 2; rejection: {label}: 2"
        seen.view("correction?step=7&ratio=since_sampling", "#choose-ratio:has(option[value=since_sampling]:checked)")
        seen.page.wait_for_function("() => charts.get('Acceptance region').drawn.getOption().yAxis[0].name.includes('since_sampling')")
        assert sorted(bound for bound, _ in seen.page.evaluate(lines)) == [pytest.approx(0.8), pytest.approx(1.2)]
        rows = correction(OpenRun(folder.path), {"step": "7"})["rejected"]
        assert {"label": label, "share": None, "below": 4, "above": 0} in rows, "in the criterion's own ratio"


def test_a_step_that_another_correction_corrected_is_shown_by_that_one(tmp_path: Path) -> None:
    """Of split-mis there are metrics of a criterion in a ratio that this step's tokens lack: an alarm has put mis-token in its place."""
    label, after = "ratio_token_mismatch", CorrectionConfig(preset="mis-token")
    with made(tmp_path) as folder:
        folder.write_text("config.yaml", CONFIG.format(name="x", steps=41).replace("mis-full", "split-mis"))
        folder.append_metrics(StepMetrics(41, {f"correction/rejected_by_{label}": 0.25}))
        run = OpenRun(with_tokens(folder, 41).path)
        told = correction(run, {})
        assert {"label": label, "share": 0.25, "below": None, "above": None} in told["rejected"]
        assert (told["preset"], told["is_replaced"]) == ("split-mis", False), "nothing says what corrected it"
        replace(sample(41), correction=after.model_dump(mode="json")).save(folder.tokens_path(41))
        told = correction(run, {})
        assert (told["preset"], told["is_replaced"], told["bounds"]) == ("mis-token", True, bounds_of(after))
        replace(sample(41), correction=CorrectionConfig(preset="split-mis").model_dump(mode="json")).save(folder.tokens_path(41))
        assert not correction(run, {})["is_replaced"]


def test_bounds_on_sums_are_no_lines_among_means(tmp_path: Path, look: Look) -> None:
    criteria = "[{level: geometric, upper: 1.25}, {level: sequence, upper: 8}, {level: token, upper: 3}]"
    with made(tmp_path) as folder, served(folder.path) as address:
        folder.write_text("config.yaml", CONFIG.format(name="x", steps=40).replace("{preset: mis-full}", f"{{rejection: {criteria}}}"))
        with_tokens(folder, 7)
        seen = look(address, "correction?step=7", "#bounds")
        seen.points("Sequences", 0)
        lines = "name => charts.get(name).drawn.getOption().series[0].markLine.data.map(d => Math.exp(d.yAxis))"
        assert seen.page.evaluate(lines, "Sequences") == [pytest.approx(1.25)]
        assert pytest.approx(3.0) in seen.page.evaluate(lines, "Acceptance region")
        assert "Means over sequences of step 7" in seen.page.inner_text("main") and "8" in seen.page.inner_text("#bounds")


def test_bounds_of_turns_have_turns_for_points(tmp_path: Path) -> None:
    with made(tmp_path) as folder:
        with_tokens(folder, 7)
        found = sample(7, turns=True)
        found.save(folder.tokens_path(7))
        run, of = OpenRun(folder.path), found.columns
        assert correction(run, {"step": "7"})["units"]["tokens"] == [4] * 4
        config = CONFIG.format(name="x", steps=40).replace("{preset: mis-full}", "{importance: {mode: truncate, level: turn, upper: 2}}")
        folder.write_text("config.yaml", config)
        told = correction(run, {"step": "7"})
        assert told["by_turn"] and told["units"]["tokens"] == [1, 3] * 4
        rho = of["proximal"].astype(float) - of["behavior"]
        assert told["units"]["rho"] == pytest.approx([x for k in range(0, 36, 9) for x in (rho[k + 4], rho[k + 6 : k + 9].sum())])


def test_mismatch_by_probability_is_that_of_the_step_s_numbers(finished: tuple[RunFolder, str], look: Look) -> None:
    _, address = finished
    seen = look(address, "correction", "#bounds")
    chart = "Mismatch by probability under the learner"
    assert seen.points(chart, 0) == [10, 20, 30, 40, 50] and seen.points(chart, 1) == [1 + i / 8 for i in range(5)]
    assert seen.points(chart, 2) == [[i, 1 + i / 8, 0.25] for i in range(5)]


def test_every_preset_s_bounds_are_told(tmp_path: Path) -> None:
    """Those of its settings, each once: what has a bound that isn't listed would look like a region without one."""
    with made(tmp_path, steps=2) as folder:
        for name in PRESETS:
            config = CorrectionConfig(preset=name)
            bounds = bounds_of(config)
            own = {one["part"].split(",")[0] for one in bounds if one["part"].startswith("rejection")}
            assert own == {f"rejection: {criterion.label}" for criterion in config.rejection}
            assert any(one["part"].startswith("veto") for one in bounds) == (config.veto is not None)
            assert any(one["part"].startswith("clip") for one in bounds) == config.objective.kind.endswith("clip")
            assert any(one["part"].startswith("importance") for one in bounds) == (config.importance.mode in ("truncate", "clip", "mask"))
            assert all(one["lower"] is not None or one["upper"] is not None for one in bounds)
            if config.proximal == "behavior":
                assert {one["ratio"] for one in bounds} <= {"q", None}, "in bypass every ratio is q"
        by_age = {"mode": "truncate", "upper_by_staleness": [4.0, 2.0]}
        told = bounds_of(CorrectionConfig.model_validate({"importance": by_age}))
        assert [(one["part"], one["upper"]) for one in told if "importance" in one["part"]] == [
            ("importance weight: truncate, staleness 0", 4.0),
            ("importance weight: truncate, staleness 1+", 2.0),
        ]
        folder.write_text("config.yaml", CONFIG.format(name="x", steps=40).replace("mis-full", "of-tomorrow"))
        with pytest.raises(ValueError, match=r"config\.yaml: correction: not settings of this version"):
            correction(OpenRun(folder.path), {})


def test_workers_and_books_are_those_of_the_last_step(finished: tuple[RunFolder, str], look: Look) -> None:
    """164 admitted = 160 trained + 1 discarded + 3 under way; worker 1 samples twice what worker 0 does."""
    _, address = finished
    seen = look(address, "pool", "#book", width=400)
    tiles = seen.page.locator("#book b").all_inner_texts()
    assert tiles == ["164", "160", "1", "3", "balanced"]
    rows = [row.split("\t") for row in seen.page.locator("#workers tbody tr").all_inner_texts()]
    assert [(row[0], row[1], row[3], row[5], row[6]) for row in rows] == [
        ("0", "to the last step", "1 to 40", "400", "33.3%"),
        ("1", "to the last step", "1 to 40", "800", "66.7%"),
    ]
    assert "60 s\tstart of rollout worker 0 (a <b>node</b>)\t2" in seen.page.inner_text("#waits")
    failures = [row.split("\t")[:2] for row in seen.page.locator("#counters tbody tr").all_inner_texts()]
    assert failures == [
        ["80", "pool/failures_total/request_failed"],
        ["5", "reward/exceptions_total"],
        ["0", "pool/failures_total/engine_lost"],
        ["0", "sync/failures_total"],
    ]
    assert seen.points("Rollout workers", 0) == [[step, 2] for step in range(1, 41)]


def test_books_that_don_t_add_up_say_so(tmp_path: Path) -> None:
    from evenkeel.dashboard.pool_view import pool

    with made(tmp_path, steps=1) as folder:
        assert [one["state"] for one in pool(OpenRun(folder.path), {})["workers"]] == ["samples"] * 2
        names = ("groups/admitted_total", "groups/trained_total", "groups/discarded_total", "groups/outstanding")
        folder.append_metrics(StepMetrics(2, dict(zip(names, (10, 8, 1, 2), strict=True))))
        assert pool(OpenRun(folder.path), {})["book"]["is_balanced"] is False
        folder.append_metrics(StepMetrics(3, {"reward/mean": 0.5}))
        assert pool(OpenRun(folder.path), {})["book"]["is_balanced"] is None, "a step that doesn't say"


def test_a_worker_s_state_is_what_the_run_has_said_of_it_last(tmp_path: Path) -> None:
    from evenkeel.dashboard.pool_view import pool

    def states() -> list[str]:
        return [one["state"] for one in pool(OpenRun(folder.path), {})["workers"]]

    with made(tmp_path, steps=1) as folder:
        for text, expected in (
            ("rollout 1 is up (process 7)", ["samples", "samples"]),
            ("rollout worker 0 is gone: missed its heartbeat; others take its 3 groups", ["lost", "samples"]),
            ("rollout worker 1 leaves, with 2 groups under way and 20 s for them: its process was told to end", ["lost", "leaving"]),
            ("rollout worker 1 has left; 1 group goes on elsewhere from 31 tokens", ["lost", "left"]),
            ("rollout 1 is up (process 8)", ["lost", "samples"]),
        ):
            folder.event("info", text)
            assert states() == expected
        folder.write_event(RunEvent.now("info", "going on from step 1", EventKind.RESUMED))
        assert states() == ["samples", "samples"]
