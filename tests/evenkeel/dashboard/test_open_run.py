"""A folder that is read while it grows is what it would be read at once: over torn lines, cuts by a resume, and files that are gone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.dashboard.charts import MOST_POINTS
from evenkeel.dashboard.columns import StepColumns
from evenkeel.dashboard.open_run import OpenRun
from evenkeel.dashboard.overview import overview
from evenkeel.dashboard.server import json_bytes
from evenkeel.dashboard.timeline import timeline
from tests.evenkeel.dashboard.made_runs import CONFIG, made, numbers


def rewards(run: OpenRun) -> list[tuple[int, float]]:
    steps, values = run.steps.series("reward/mean")
    return list(zip(steps.tolist(), values.tolist(), strict=True))


def test_what_has_come_since_is_added_and_what_a_resume_took_back_is_gone(tmp_path: Path) -> None:
    with made(tmp_path, steps=5) as folder:
        run = OpenRun(folder.path)
        assert [step for step, _ in rewards(run)] == [1, 2, 3, 4, 5] and overview(run, {})["left_out"] == []
        with folder.metrics_path.open("a") as file:
            file.write('{"step": 6, "reward/mean": 0.2')  # being written
        assert len(rewards(run)) == 5
        with folder.metrics_path.open("a") as file:
            file.write("5}\n")
        assert rewards(run)[-1] == (6, 0.25)
        folder.rewind(3)
        folder.append_metrics(StepMetrics(4, {"reward/mean": 0.75}))
        assert [step for step, _ in rewards(run)] == [1, 2, 3, 4] and rewards(run)[-1] == (4, 0.75)
        folder.rewind(3)
        for step in range(4, 30):  # longer than it was when it was read, with other lines
            folder.append_metrics(StepMetrics(step, {"reward/mean": step / 32}))
        assert rewards(run) == [(s, v) for s, v in rewards(OpenRun(folder.path))] and rewards(run)[-1] == (29, 29 / 32)
        folder.metrics_path.unlink()
        assert rewards(run) == []


LINES = ('{"step": 1e999}', "[]", "null", '{"step": 2, "reward/mean": "x"}', '{"step": 2, "reward/mean": 1', "\xff", "", "[" * 5000)


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_line_that_is_not_ours_is_left_out(tmp_path: Path, line: str) -> None:
    with made(tmp_path, steps=1) as folder:
        run = OpenRun(folder.path)
        with folder.metrics_path.open("a", encoding="latin-1") as file:
            file.write(line + "\n" + json.dumps({"step": 2, "reward/mean": 0.5, "of/tomorrow": 7.0}) + "\n")
        assert rewards(run)[1:] == [(2, 0.5)] and "of/tomorrow" not in run.steps.names
        with folder.evaluations_path.open("a", encoding="latin-1") as file:
            file.write(f"{line}\n{line}\n")
        steps, evaluations = overview(run, {})["left_out"]
        assert steps.startswith(f"{folder.metrics_path} has 1 line that can't be read")
        assert evaluations.startswith(f"{folder.evaluations_path} has 2 lines that can't be read")


def test_columns_of_lines_are_those_of_the_metrics_that_were_written(tmp_path: Path) -> None:
    with made(tmp_path) as folder:
        read, direct = OpenRun(folder.path).steps, StepColumns(folder.read_metrics())
        assert read.names == direct.names and len(read) == 40
        for name in read.names:
            for ours, theirs in zip(read.series(name), direct.series(name), strict=True):
                assert np.array_equal(ours, theirs)
        assert 2 not in read.series("learner/grad_norm")[0], "step 2's is infinite, and stands apart in its line"
        assert {name: (w.tokens, w.last_step) for name, w in read.workers.items()} == {"0": (400, 40), "1": (800, 40)}


def test_workers_that_come_and_go_are_summed_up_over_lines_of_other_names(tmp_path: Path) -> None:
    """Worker 2 from step 21 on, worker 0 until then; every third step has a number that others lack."""
    columns = StepColumns()
    for step in range(1, 41):
        here = (0, 1) if step <= 20 else (1, 2)
        line = {"step": step} | {f"worker/tokens/{w}": 10 * (w + 1) for w in here} | {f"worker/weight_version/{w}": step - 1 for w in here}
        columns.add(line | ({"reward/mean": step / 64, "worker/wait_share/1": 0.5} if step % 3 == 0 else {}))
    told = {name: (w.first_step, w.last_step, w.tokens, w.version, w.waits, w.steps_with_wait) for name, w in columns.workers.items()}
    assert told == {"0": (1, 20, 200, 19, 0, 0), "1": (1, 40, 800, 39, 6.5, 13), "2": (21, 40, 600, 39, 0, 0)} and list(told) == [
        "0",
        "1",
        "2",
    ]
    assert columns.series("reward/mean")[0].tolist() == list(range(3, 40, 3)) and columns.names == ["reward/mean"]
    with pytest.raises(TypeError, match=r"reward/mean = True: no number"):
        columns.add({"step": 41, "reward/mean": True})
    assert len(columns) == 40 and columns.last is not None and columns.last.step == 40


SPANS = ("{", "[1]", '{"lane": "x", "what": "y", "begin": 2, "end": 1}', '{"lane": "x", "what": "y", "begin": 1, "end": 2, "group": 1e300}')


@pytest.mark.parametrize("line", [*SPANS, '{"lane": "x", "what": "y", "begin": 1, "end": 2, "version": ' + "9" * 30 + "}", "\xff"])
def test_a_span_that_is_not_ours_is_left_out(tmp_path: Path, line: str) -> None:
    with made(tmp_path, steps=1) as folder:
        good = '{"lane": "x", "what": "y", "begin": 5, "end": 6.5, "version": 3, "group": null, "why": null}'
        folder.timeline_path.write_text(f"{line}\n{good}\n", encoding="latin-1")
        run = OpenRun(folder.path)
        spans = run.spans
        (said,) = timeline(run, {})["left_out"]
        assert said.startswith(f"{folder.timeline_path} has 1 line that can't be read")
        assert [list(of) for of in (spans.begin, spans.end, spans.version, spans.group, spans.kind)] == [[5.0], [6.5], [3], [-1], [0]]


@pytest.mark.parametrize(
    "name", ["staleness/tokens/0", "correction/bucket_tokens_0", "correction/rejected_by_ratio_token_rho", "reward/mean"]
)
def test_any_metric_that_a_step_has_can_be_a_chart(tmp_path: Path, name: str) -> None:
    """Members of families, too: the page remembers what was asked for, and would show nothing any more."""
    with made(tmp_path, steps=3) as folder:
        run = OpenRun(folder.path)
        assert name in run.steps.names
        chart = overview(run, {"more": name})["charts"][0]
    assert (chart["title"], chart["series"][0]["y"].tolist()) == (name, run.steps.values(name))


def test_ten_thousand_steps_of_two_hundred_metrics_are_few_points_with_their_extremes(tmp_path: Path) -> None:
    """What goes to the browser doesn't grow with the run; a part of the steps has all of its own."""
    folder = RunFolder.create(tmp_path / "long", "long")
    folder.write_text("config.yaml", CONFIG.format(name="long", steps=10_000))
    rest = {f"correction/bucket_tokens_{i}": 1.5 for i in range(180)}
    lines = []
    for step in range(1, 10_001):
        record = numbers(step).record() | rest
        record["reward/mean"] = 40.0 if step == 7_777 else record["reward/mean"]
        lines.append(json.dumps(record) + "\n")
    folder.metrics_path.write_text("".join(lines))
    folder.close()
    run = OpenRun(folder.path)
    began = time.monotonic()
    found = overview(run, {})
    print(f"{folder.metrics_path.stat().st_size / 1e6:.0f} MB read and drawn in {time.monotonic() - began:.2f} s")
    curve = found["charts"][0]["series"][0]
    assert len(curve["x"]) <= MOST_POINTS + 2 and curve["y"].max() == 40.0 and (curve["x"][0], curve["x"][-1]) == (1, 10_000)
    assert len(json_bytes(found)) < 600_000
    part = overview(run, {"from": "7700", "to": "7800"})["charts"][0]["series"][0]
    assert part["name"] == curve["name"] == "reward/mean" and part["x"].tolist() == list(range(7700, 7801))
