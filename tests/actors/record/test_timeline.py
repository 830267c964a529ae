"""timeline.jsonl: spans of all processes by one clock, in a file that is bounded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from evenkeel.actors.carriers import LaneReport, Span
from evenkeel.actors.record import timeline as timeline_module
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.timeline import LaneSpan, Timeline, append_spans, read_timeline


class Clock:
    """The driver's; unix time is the process's own plus 1e9 s."""

    def __init__(self) -> None:
        self.now = 5000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """For the timeline alone: other threads go on by the real one."""
    one = Clock()
    monkeypatch.setattr(timeline_module, "time", one)
    return one


def test_spans_of_a_node_whose_clock_is_wrong_stand_where_the_driver_saw_them(clock: Clock) -> None:
    """Its clock is 300 s ahead, and reports take 0.5, 0.02 and 2 s: from the second on spans are right to 0.02 s, and never early."""
    written: list[LaneSpan] = []
    timeline = Timeline(written.extend)
    for way_s in (0.5, 0.02, 2.0):
        clock.now += 100.0
        true = 1e9 + clock.now
        report = LaneReport("worker-3", true + 300.0, (Span("sample", true + 290.0, true + 299.0, 4, 17),))
        clock.now += way_s
        timeline.take(report)
        (span,) = written
        wrong_s = span.begin - (true - 10.0)
        assert 0.0 <= wrong_s == pytest.approx(0.5 if way_s == 0.5 else 0.02) and span.end - span.begin == pytest.approx(9.0)
        assert (span.lane, span.what, span.version, span.group) == ("worker-3", "sample", 4, 17)
        written.clear()
    timeline.take(LaneReport("rank-0", 1e9 + clock.now, (Span("step", 1e9, 1e9 + 1.0),)))
    assert written == [], "less than a second after the last write it waits for others"
    timeline.flush()
    assert [span.begin for span in written] == [1e9], "lanes have clocks of their own"


def test_the_file_is_bounded_and_keeps_whole_lines_of_the_newest_spans(tmp_path: Path) -> None:
    path, size = tmp_path / "timeline.jsonl", 0
    for number in range(400):
        append_spans(path, [LaneSpan("sample", 1e9 + number, 1e9 + number + 1, number, None, lane="worker-0")], most_bytes=20_000)
        size = max(size, path.stat().st_size)
    kept = [span.version for span in read_timeline(path)]
    assert kept == list(range(400 - len(kept), 400)) and 75 < len(kept) < 200 and size <= 20_000
    assert len(path.read_text().splitlines()) == len(kept)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_where_the_disk_has_no_room_for_the_newer_half_no_span_is_lost_or_refused(tmp_path: Path) -> None:
    """A folder in the place of the file that is to be written: the lines are there already, and would be written again."""
    path = tmp_path / "timeline.jsonl"
    (no_room := tmp_path / f".{os.getpid()}.timeline.jsonl").mkdir()

    def add(number: int) -> None:
        append_spans(path, [LaneSpan("sample", 1e9 + number, 1e9 + number + 1, number, None, lane="worker-0")], most_bytes=20_000)

    for number in range(400):
        add(number)
    assert [span.version for span in read_timeline(path)] == list(range(400)) and path.stat().st_size > 20_000
    no_room.rmdir()
    for number in range(400, 420):
        add(number)
    assert path.stat().st_size < 20_000 and read_timeline(path)[-1].version == 419


def test_a_line_that_is_torn_or_no_span_is_left_out_and_a_resume_repairs_the_file(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "x") as folder:
        folder.write_text("config.yaml", "steps: 10\n")
        good = LaneSpan("step", 1e9, 1e9 + 2, 3, None, "why not", lane="rank-0")
        folder.append_spans([good])
        with folder.timeline_path.open("a") as file:
            for wrong in ({"begin": 2.0, "end": 1.0}, {"begin": "NaN"}, {"group": "a"}, {"what": None, "lane": None, "begin": None}):
                file.write(json.dumps(good.record() | wrong) + "\n")
            file.write('{"lane": "rank-0", "what": "st')
        assert folder.read_timeline() == [good]
    (half := tmp_path / "run" / ".123.timeline.jsonl").write_text("that a kill has left")
    with RunFolder.open(tmp_path / "run") as folder:
        assert not half.exists()
        folder.append_spans([good])
        assert folder.read_timeline() == [good, good]
