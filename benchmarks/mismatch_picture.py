"""The pictures of docs/mismatch_on_a_laptop.md, which tokens differ, and where it comes from and what becomes of it; and its tables.

python benchmarks/mismatch_picture.py --folder FOLDER                  # of what real_mismatch.py has measured
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks import mismatch_tables as tables
from benchmarks.mismatch_numbers import Interval, Sampled
from benchmarks.mismatch_operators import OPERATORS
from benchmarks.real_mismatch import rounds
from benchmarks.sides import ROOT, options

if TYPE_CHECKING:
    from benchmarks.mismatch_tables import Measured

COLOURS = ("#3a7fc1", "#dd7a2b", "#3c9c63", "#a05cb8")
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd"}


def draw_tokens(measured: Measured, path: Path) -> None:
    """Write a PNG: spread by probability, its two measures side by side, spread by position, and the distribution."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        (by_probability, measures), (by_position, distribution) = figure.subplots(2, 2)
        for dtype, colour in zip([one for one, other in measured.formats if one == other != "float32"], COLOURS, strict=False):
            rows = tables.bucket_rows(measured, dtype)
            points(by_probability, rows, colour, dtype, lambda one: one.std)
            points(by_position, tables.position_rows(measured, dtype), colour, dtype, lambda one: one.std)
            found = Sampled.joined(measured.batches(dtype, dtype)).log_ratio.abs().sort().values
            shares = 1 - torch.arange(len(found)) / len(found)
            distribution.plot(found.clamp(min=1e-6), shares, color=colour, label=dtype)
        rows = tables.bucket_rows(measured, "bfloat16")
        points(measures, rows, COLOURS[2], "std of log rho", lambda one: one.std)
        points(measures, rows, COLOURS[3], "mean abs(pi - mu)", lambda one: one.distance)
        by_probability.set(yscale="log", ylabel="std of log rho", xlabel="the engine's probability of the token")
        measures.set(yscale="log", xlabel="the same, bfloat16: ratio against distance in probability")
        by_position.set(ylabel="std of log rho", xlabel="place of the token in the answer (prose)", ylim=(0, None))
        distribution.set(xscale="log", yscale="log", xlabel="abs(log rho), nats", ylabel="share of tokens with as much or more")
        for axes in (by_probability, measures, by_position, distribution):
            axes.legend(frameon=False)
        figure.savefig(path, dpi=110, metadata={"Software": None})


def draw_origins(measured: Measured, path: Path) -> None:
    """Write a PNG: shares of the operators, staleness beside mismatch, what presets drop, what batch normalisation takes away."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        has_staleness = f"version-{tables.STEPS}" in measured.first
        panels = figure.subplot_mosaic([["shares", "staleness" if has_staleness else "shares"], ["dropped", "factors"]])
        shares, dropped, factors = (panels[name] for name in ("shares", "dropped", "factors"))
        known = [one for one in OPERATORS if measured.has([one])]
        bars(shares, [tables.removed(measured, [one]) for one in known], COLOURS[0], "gone, aligned alone", -0.2)
        but_one = [[other for other in OPERATORS if other != one] for one in known]
        if all(measured.has(others) for others in but_one):
            bars(shares, [measured.share_left(others) for others in but_one], COLOURS[1], "left, all others aligned", 0.2)
        shares.set_xticks(range(len(known)), [tables.NAMES[one] for one in known], rotation=20)
        shares.yaxis.set_major_formatter(PercentFormatter(1.0))
        shares.set_ylabel("share of the k3")
        if has_staleness:
            staleness, rows = panels["staleness"], tables.staleness_rows(measured)
            both = [(str(step), row[1]) for step, row in enumerate(rows)]  # first: it has all places of the axis, in their order
            points(staleness, both, COLOURS[0], "with mismatch (bfloat16)", lambda one: one.k3)
            alone = [(str(step), row[0]) for step, row in enumerate(rows) if step]
            points(staleness, alone, COLOURS[2], "staleness alone", lambda one: one.k3)
            staleness.set(yscale="log", xlabel="staleness, versions", ylabel="k3, nats (sums)")
            staleness.legend(frameon=False)
        found = tables.treatments(measured)
        same = {name: cases[0] for name, cases in found.items()}
        stale = {name: cases[1] for name, cases in found.items() if cases[1]}
        middle = -0.2 if stale else 0.0
        bars(dropped, [tables.over_batches([one.dropped for one in cases]) for cases in same.values()], COLOURS[0], "same weights", middle)
        bars(factors, [tables.over_batches([one.weight for one in cases]) for cases in same.values()], COLOURS[0], "same weights", middle)
        if stale:
            of_stale = f"sums, staleness {tables.STEPS}"
            bars(dropped, [tables.over_batches([one.dropped for one in cases]) for cases in stale.values()], COLOURS[1], of_stale, 0.2)
            bars(factors, [tables.over_batches([one.weight for one in cases]) for cases in stale.values()], COLOURS[1], of_stale, 0.2)
        dropped.set_ylabel("tokens dropped")
        dropped.yaxis.set_major_formatter(PercentFormatter(1.0))
        factors.set_ylabel("mean factor on a token's gradient")
        for axes in (dropped, factors):
            axes.set_xticks(range(len(found)), list(found), rotation=35, ha="right")
        for axes in (shares, dropped, factors)[: 3 if stale else 1]:  # else one kind of bar
            axes.legend(frameon=False)
        figure.savefig(path, dpi=110, metadata={"Software": None})


def points(axes: Axes, rows: Sequence[tuple[str, list[Sampled]]], colour: str, name: str, number: tables.Number) -> None:
    """A point for all batches together, a bar from the smallest to the largest of one."""
    found = [Interval.over(batches, number) for _, batches in rows]
    ends = [[one.whole - min(one.low, one.whole) for one in found], [max(one.high, one.whole) - one.whole for one in found]]
    axes.errorbar(
        [row for row, _ in rows], [one.whole for one in found], ends, color=colour, marker="o", markersize=4, capsize=3, label=name
    )


def bars(axes: Axes, found: Sequence[Interval], colour: str, name: str, offset: float) -> None:
    """Likewise as bars."""
    ends = [[one.whole - min(one.low, one.whole) for one in found], [max(one.high, one.whole) - one.whole for one in found]]
    places = [place + offset for place in range(len(found))]
    axes.bar(places, [one.whole for one in found], 0.36, yerr=ends, color=colour, ecolor="#444444", capsize=2, label=name)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "images", help="folder for the pictures")
    parser.add_argument("--also", nargs="*", default=[], metavar="A+B", help="further sets of operators, as real_mismatch.py had them")
    arguments = parser.parse_args()
    measured = tables.write_tables(rounds(arguments.folder), [one.split("+") for one in arguments.also])
    draw_tokens(measured, arguments.pictures / "mismatch_tokens.png")
    draw_origins(measured, arguments.pictures / "mismatch_origins.png")


if __name__ == "__main__":
    main()
