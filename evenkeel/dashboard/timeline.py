"""The view of the timeline: what each process did when, a lane for each; the part that is asked for, with as many spans as a screen has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from evenkeel.actors.record.timeline import lane_order
from evenkeel.dashboard.open_run import OpenRun, lines_left_out

MOST_SPANS = 4000
"""Spans that go to the browser; where there are more, those of one kind that follow each other closely are one."""
FIRST_S = 120.0
"""What is shown of a longer run at first: its newest part."""
_SHORTEST_S = 1e-3
"""Of a whole timeline whose spans are all at one instant."""
BOOK = "book"
"""Lane of what is no process: finished groups that wait for their batch."""


def timeline(run: OpenRun, asked: Mapping[str, str]) -> dict[str, Any]:
    """Args: asked: `begin` and `end`, unix times of the part that is shown; `group`: one that is followed."""
    spans = run.spans
    left_out = lines_left_out(spans.left_out, run.folder.timeline_path)
    if not len(spans.begin):
        return {"lanes": [], "whole": None, "spans": [], "left_out": left_out}
    begin, end = np.array(spans.begin), np.array(spans.end)
    kind, version, group = np.array(spans.kind), np.array(spans.version), np.array(spans.group)
    whole = float(begin.min()), max(float(end.max()), float(begin.min()) + _SHORTEST_S)
    followed = int(asked["group"]) if asked.get("group") else None
    of_group = _way(spans.kinds, kind, version, group, followed)
    part = _part(asked, whole, (begin[of_group], end[of_group]))
    inside = (begin < part[1]) & ((end > part[0]) | (begin >= part[0]))  # a span may have no length
    lanes = sorted({lane for lane, _, _ in spans.kinds}, key=lane_order)
    columns = kind, begin, end, version, group, np.ones(len(kind), dtype=np.int64)
    own, others = (tuple(column[chosen] for column in columns) for chosen in (inside & of_group, inside & ~of_group))
    shortest_s = 0.0
    if len(others[0]) > max(0, most := MOST_SPANS - len(own[0])):
        others, shortest_s = _merged(others, (part[1] - part[0]) / 1000, most)
    rows = [*_rows(spans.kinds, own), *_rows(spans.kinds, others)]
    known = spans.kinds, kind[inside], begin[inside], end[inside], part
    return {
        "lanes": lanes,
        "whole": whole,
        "part": part,
        "spans": sorted(rows, key=lambda row: row["begin"]),
        "merged_s": shortest_s,
        "busy": [_busy(lane, *known) for lane in lanes if lane != BOOK],
        "queued": _queued(*known),
        "left_out": left_out,
    }


def _way(
    kinds: Sequence[tuple[str, str, str]], kind: np.ndarray, version: np.ndarray, group: np.ndarray, followed: int | None
) -> np.ndarray:
    """[n] bool: spans of a group, and the steps of the version whose batch it was in, which the span of its wait in the book says."""
    if followed is None:
        return np.zeros(len(group), dtype=bool)
    is_what = {what: np.isin(kind, [place for place, one in enumerate(kinds) if one[1] == what]) for what in ("queue", "step")}
    own = group == followed
    trained = version[own & is_what["queue"]]
    return np.asarray(own | (is_what["step"] & (version == trained[-1]))) if len(trained) else np.asarray(own)


def _part(asked: Mapping[str, str], whole: tuple[float, float], followed: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """The part that is shown. Args: followed: begins and ends of the group's spans."""
    if asked.get("begin") and asked.get("end"):
        begin, end = float(asked["begin"]), float(asked["end"])
        if not (math.isfinite(begin) and math.isfinite(end) and begin < end):
            raise ValueError(f"begin = {begin}, end = {end}: no part of a timeline")
        return begin, end
    if len(followed[0]):
        first, last = float(followed[0].min()), float(followed[1].max())
        margin = max(0.1, 0.15 * (last - first))
        return max(whole[0], first - margin), min(whole[1], last + margin)
    return max(whole[0], whole[1] - FIRST_S), whole[1]


def _rows(kinds: Sequence[tuple[str, str, str]], columns: tuple[np.ndarray, ...]) -> Iterator[dict[str, Any]]:
    """Spans as the page has them. Args: columns: kind, begin, end, version, group, and how many spans each stands for."""
    for kind, begin, end, version, group, count in zip(*(column.tolist() for column in columns), strict=True):
        lane, what, why = kinds[kind]
        told = {"version": version if version >= 0 else None, "group": group if group >= 0 else None, "why": why or None}
        yield {"lane": lane, "what": what, "begin": begin, "end": end, "count": count, **told}


def _merged(columns: tuple[np.ndarray, ...], gap_s: float, most: int) -> tuple[tuple[np.ndarray, ...], float]:
    """Spans of one lane and kind that overlap, or follow each other closely, as one; it has a version if all have the same.

    Args: columns: as of `_rows`. gap_s: what is close at least; more, until there are at most `most`, or each kind is one.
    Returns: the columns of these, and what was close.
    """
    kind, begin, end, version, *_ = columns
    order = np.lexsort((begin, kind))
    kind, begin, end, version = kind[order], begin[order], end[order], version[order]
    # Each kind is put far behind the one before, so that one running maximum says how far spans of the same kind have reached.
    length = max(_SHORTEST_S, float(end.max() - begin.min()))
    behind = kind * (3 * length) - begin.min()
    gaps = (begin + behind)[1:] - np.maximum.accumulate(end + behind)[:-1]
    gap_s = min(length, max(gap_s, float(np.partition(gaps, -most)[-most]) if most > 0 else math.inf))
    first = np.flatnonzero(np.concatenate([[True], gaps > gap_s]))
    lowest, highest = np.minimum.reduceat(version, first), np.maximum.reduceat(version, first)
    none = np.full(len(first), -1)
    count = np.diff(first, append=len(kind))
    return (kind[first], begin[first], np.maximum.reduceat(end, first), np.where(lowest == highest, lowest, none), none, count), gap_s


def _busy(
    lane: str, kinds: Sequence[tuple[str, str, str]], kind: np.ndarray, begin: np.ndarray, end: np.ndarray, part: tuple[float, float]
) -> dict[str, Any]:
    """Shares of the part in which a lane did something, waited, and of which nothing is known; overlapping spans count once."""
    length, own = part[1] - part[0], np.isin(kind, [place for place, one in enumerate(kinds) if one[0] == lane])
    begin, end = np.clip(begin[own], *part), np.clip(end[own], *part)
    works = np.isin(kind[own], [place for place, one in enumerate(kinds) if one[1] != "wait"])
    busy, known = _union(begin[works], end[works]), _union(begin, end)
    return {"lane": lane, "busy": busy / length, "waits": (known - busy) / length, "unknown": max(0.0, 1 - known / length)}


def _queued(
    kinds: Sequence[tuple[str, str, str]], kind: np.ndarray, begin: np.ndarray, end: np.ndarray, part: tuple[float, float]
) -> dict[str, float] | None:
    """Finished groups that waited for their batch in this part: how many at a time, and how long each. None: none did."""
    own = np.isin(kind, [place for place, one in enumerate(kinds) if one[0] == BOOK])
    if not own.any():
        return None
    waited = np.clip(end[own], *part) - np.clip(begin[own], *part)
    return {"groups": int(own.sum()), "at_a_time": float(waited.sum()) / (part[1] - part[0]), "seconds": float((end - begin)[own].mean())}


def _union(begin: np.ndarray, end: np.ndarray) -> float:
    """Length of the union of intervals."""
    order = np.argsort(begin)
    begin, end = begin[order], end[order]
    reached = np.maximum.accumulate(np.concatenate([[-math.inf], end]))[:-1]
    return float(np.maximum(0.0, end - np.maximum(begin, reached)).sum())
