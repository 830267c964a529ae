"""The timeline: spans in a browser are those of the file; shares are those of intervals, however many spans are drawn as one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.timeline import LaneSpan
from evenkeel.dashboard.open_run import OpenRun
from evenkeel.dashboard.timeline import MOST_SPANS, timeline
from tests.evenkeel.dashboard.conftest import Seen, served
from tests.evenkeel.dashboard.made_runs import made

Look = Callable[..., Seen]
NOON = 1_767_225_600.0
WAY = [
    LaneSpan("sample", NOON + 1, NOON + 4, 3, 17, None, lane="worker-1"),
    LaneSpan("reward", NOON + 4, NOON + 5, 3, 17, None, lane="worker-1"),
    LaneSpan("queue", NOON + 5, NOON + 7, 4, 17, None, lane="book"),
]
"""Of one group."""


def some_spans() -> list[LaneSpan]:
    """Twenty seconds: a step of the driver every two, with a wait before; three samples at a time on worker 1, few on worker 10."""
    found = [
        LaneSpan("update", NOON, NOON + 5, 0, None, None, lane="worker-10"),
        LaneSpan("sample", NOON + 19, NOON + 20, 0, 99, None, lane="worker-10"),
    ]
    for k in range(10):
        at = NOON + 2 * k
        found.append(LaneSpan("wait", at, at + 0.5, k, None, "a batch", lane="driver"))
        found.append(LaneSpan("step", at + 0.5, at + 1.75, k, None, None, lane="driver"))
        found += [LaneSpan("sample", at + 0.1 * i, at + 1.5, k, 100 + 3 * k + i, None, lane="worker-1") for i in range(3)]
    return [*found, *WAY]


def share_of(spans: list[LaneSpan], lane: str, begin: float, end: float, *, waits: bool) -> float:
    """By hand: which of the part's milliseconds are covered."""
    steps = round((end - begin) * 1000)
    covered = bytearray(steps)
    for span in spans:
        if span.lane == lane and (waits or span.what != "wait"):
            first, last = round((max(span.begin, begin) - begin) * 1000), round((min(span.end, end) - begin) * 1000)
            if last > first:
                covered[first:last] = b"\1" * (last - first)
    return sum(covered) / steps


def test_the_picture_has_the_spans_of_the_file_and_one_group_s_way(tmp_path: Path, look: Look) -> None:
    spans = some_spans()
    with made(tmp_path) as folder, served(folder.path) as address:
        folder.append_spans(spans)
        seen = look(address, "timeline", "#shares")
        drawn: list[dict[str, Any]] = seen.points("Timeline", 1)  # type: ignore[assignment]
        names = ("lane", "what", "begin", "end", "group")
        found = {tuple(one["span"][name] for name in names) for one in drawn}
        assert found == {(span.lane, span.what, span.begin, span.end, span.group) for span in spans}
        rows = seen.page.locator("#shares tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in rows] == ["driver", "worker-1", "worker-10"], "workers by their numbers"
        assert (
            seen.page.inner_text("#queued") == "1 finished groups waited in the book for their batch, 2 s each in the mean, 0.1 at a time."
        )
        shares = ["62.5%", "25%", "12.5%"]  # 1.25 s and 0.5 s of each 2; the rest is unknown
        assert [cell.strip() for cell in rows[0].split("	")[2:]] == shares
        assert rows[2].split("\t")[2:] == ["30%", "0%", "70%"]
        seen.page.fill("#group", "17")
        seen.page.keyboard.press("Enter")
        seen.page.wait_for_selector("#followed")
        told = [row.split("\t") for row in seen.page.locator("#followed tbody tr").all_inner_texts()]
        assert [(row[0], row[2], row[3], row[4]) for row in told] == [
            ("1.00 s", "3.000", "worker-1", "sample"),
            ("4.00 s", "1.000", "worker-1", "reward"),
            ("5.00 s", "2.000", "book", "queue"),
            ("8.50 s", "1.250", "driver", "step"),
        ], "it waited for the batch of version 4"
        assert seen.page.inner_text("#part").startswith("0.00 s to 11.06 s of"), "its way with a margin"
        seen.page.focus("[aria-label^='Timeline of']")
        seen.page.keyboard.press("+")
        seen.page.wait_for_function("() => document.querySelector('#part').textContent.startsWith('2.77 s to 8.30 s')")


def test_what_finds_no_room_is_counted_and_no_two_names_overlap(tmp_path: Path, look: Look) -> None:
    """Thirty groups at a time in four rows: the fifth says how many more there are. Where names are written, they don't meet."""
    spans = [
        LaneSpan("sample", NOON + 10 * k + i / 50, NOON + 10 * k + 9 + i / 50, k, 30 * k + i, None, lane="worker-0")
        for k in range(4)
        for i in range(30)
    ]
    spans += [
        LaneSpan("reward", NOON + 10 * k + 9.8, NOON + 10 * k + 12, k, 30 * k + i, None, lane="worker-0")
        for k in range(3)
        for i in range(3)
    ]
    with made(tmp_path, steps=1) as folder, served(folder.path) as address:
        folder.append_spans(spans)
        seen = look(address, "timeline", "#shares")
        drawn: list[dict[str, Any]] = seen.points("Timeline", 1)  # type: ignore[assignment]
        rows = [(one["span"]["row"], one["span"]["begin"], one["span"]["end"], one["span"]["count"]) for one in drawn]
        assert sum(count for _, _, _, count in rows) == len(spans) and {row for row, *_ in rows} == {0, 1, 2, 3, 4}
        for row in range(5):
            ends = sorted((begin, end) for at, begin, end, _ in rows if at == row)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends)), "spans of a row follow each other"
        find = """() => charts.get('Timeline').drawn.getZr().storage.getDisplayList(true)
            .filter(one => one.type === 'tspan' && one.style.text)
            .map(one => {
                const box = one.getBoundingRect().clone();
                if (one.transform) box.applyTransform(one.transform);
                return [one.style.text, box.x, box.y, box.x + box.width, box.y + box.height];
            })"""
        names = seen.page.evaluate(find)
        assert {"sample 0", "26 more", "worker-0"} <= {text for text, *_ in names}
        for (text, *one), (other, *two) in itertools.combinations(names, 2):
            assert one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1], (text, other)


@pytest.mark.parametrize("count", [100, 3 * MOST_SPANS])
def test_shares_are_those_of_all_spans_however_many_are_drawn(tmp_path: Path, count: int) -> None:
    draw = random.Random(count)
    spans = list(WAY)
    for _ in range(count):
        begin = NOON + draw.randrange(100_000) / 1000
        lane, what = draw.choice(["worker-0", "worker-1"]), draw.choice(["sample", "wait"])
        spans.append(
            LaneSpan(what, begin, begin + draw.randrange(1, 30) / 1000, draw.randrange(4), draw.randrange(100, 200), None, lane=lane)
        )
    with made(tmp_path, steps=1) as folder:
        folder.append_spans(spans)
        found = timeline(OpenRun(folder.path), {"begin": str(NOON + 10), "end": str(NOON + 90), "group": "17"})
    assert (found["merged_s"] > 0) == (count > MOST_SPANS) and len(found["spans"]) <= MOST_SPANS
    for row in found["busy"]:
        busy = share_of(spans, row["lane"], NOON + 10, NOON + 90, waits=False)
        known = share_of(spans, row["lane"], NOON + 10, NOON + 90, waits=True)
        assert (row["busy"], row["waits"], row["unknown"]) == pytest.approx((busy, known - busy, 1 - known), abs=1e-5)
    inside = [span for span in spans if span.begin < NOON + 90 and span.end > NOON + 10]
    assert sum(one["count"] for one in found["spans"]) == len(inside)
    for span in inside[::50]:
        drawn = (one for one in found["spans"] if (one["lane"], one["what"]) == (span.lane, span.what))
        assert any(one["begin"] <= span.begin and span.end <= one["end"] for one in drawn), "each lies within one that is drawn"
    whole = timeline(OpenRun(folder.path), {"begin": str(NOON), "end": str(NOON + 101), "group": "17"})
    assert [one["what"] for one in whole["spans"] if one["group"] == 17] == ["sample", "reward", "queue"], "they are never merged"


def test_spans_at_one_instant_are_a_timeline(tmp_path: Path) -> None:
    """Of one kind and of two, fewer and more than are drawn."""
    with made(tmp_path, steps=1) as folder:
        run = OpenRun(folder.path)
        for count in (1, 2 * MOST_SPANS):
            folder.append_spans([LaneSpan("sample", NOON, NOON, 0, None, None, lane=f"worker-{k % 2}") for k in range(count)])
            found = timeline(run, {})
            assert found["part"] == (NOON, NOON + 0.001) and [row["busy"] for row in found["busy"]] == [0.0] * min(2, count)
            drawn = {(one["lane"], one["count"]) for one in found["spans"]}
        assert drawn == {("worker-0", MOST_SPANS + 1), ("worker-1", MOST_SPANS)}


def test_a_followed_group_may_have_more_spans_than_are_drawn_and_be_alone(tmp_path: Path) -> None:
    with made(tmp_path, steps=1) as folder:
        folder.append_spans([LaneSpan("tool", NOON + k, NOON + k + 1, 0, 17, None, lane="worker-0") for k in range(MOST_SPANS + 1)])
        run = OpenRun(folder.path)
        assert len(timeline(run, {"group": "17"})["spans"]) == MOST_SPANS + 1
        folder.append_spans([LaneSpan(what, NOON, NOON + MOST_SPANS + 1, 0, None, None, lane="driver") for what in ("wait", "step")])
        others = [one for one in timeline(run, {"group": "17"})["spans"] if one["group"] is None]
        assert sorted((one["what"], one["count"]) for one in others) == [("step", 1), ("wait", 1)], "each kind is one"


def test_a_long_run_shows_its_newest_part_at_first_and_follows(tmp_path: Path) -> None:
    with made(tmp_path, steps=1) as folder:
        run = OpenRun(folder.path)
        assert timeline(run, {})["lanes"] == []
        folder.append_spans([LaneSpan("step", NOON + k, NOON + k + 1, k, None, None, lane="rank-0") for k in range(500)])
        assert timeline(run, {})["part"] == (NOON + 380, NOON + 500)
        with folder.timeline_path.open("a") as file:
            file.write('{"lane": "rank-0", "what": "st')
        assert timeline(run, {})["whole"] == (NOON, NOON + 500)
        for query in ({"begin": "x", "end": "1"}, {"begin": "3", "end": "2"}, {"group": "x"}, {"begin": "nan", "end": "1"}):
            with pytest.raises(ValueError, match=r"."):
                timeline(run, query)
        folder.close()
        with RunFolder.open(folder.path) as again:  # which cuts the torn line
            again.append_spans([LaneSpan("step", NOON + 500, NOON + 501, 500, None, None, lane="rank-0")])
            assert timeline(run, {})["whole"] == (NOON, NOON + 501)
            kept = again.timeline_path.read_bytes().splitlines(keepends=True)[300:]
            again.timeline_path.write_bytes(b"".join(kept))  # the older half is dropped
            assert timeline(run, {})["whole"] == (NOON + 300, NOON + 501)
