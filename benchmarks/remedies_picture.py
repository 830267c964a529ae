"""The picture of benchmarks/remedies.py: what is kept, bias and noise, by length and KL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from benchmarks.remedy_outcome import RemedyOutcome

CURVES = {
    "ppo": ("#8a8f2f", ":"),
    "tis-token": ("#3a7fc1", "-"),
    "rollout-is": ("#7fb2e5", "--"),
    "tis-sequence": ("#a05cb8", "-"),
    "mis-sequence": ("#a05cb8", "--"),
    "mis-geometric": ("#c94f5c", "-"),
    "mis-geometric-miles": ("#dd7a2b", "--"),
}
"""Colour and line of what is drawn. The other presets on tokens lie on tis-token, the other ones on sequences by their like."""
ROWS = (("kept_tokens", "tokens kept"), ("bias", "bias"), ("noise", "noise"))


def draw(found: Sequence[RemedyOutcome], path: Path) -> None:
    """Write a PNG: one column for each KL, one row for each of ROWS."""
    kls = sorted({one.kl for one in found})
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd"}
    with rc_context(style):
        figure = Figure(figsize=(11, 7), layout="constrained")
        axes = figure.subplots(len(ROWS), len(kls), sharex=True, sharey="row")
        for column, kl in enumerate(kls):
            axes[0][column].set_title(f"k3 = {kl:g}", fontsize=10)
            for row, (field, label) in enumerate(ROWS):
                _curves(axes[row][column], [one for one in found if one.kl == kl], field)
                if column == 0:
                    axes[row][0].set_ylabel(label)
            axes[-1][column].set_xlabel("tokens of an answer")
        axes[0][0].yaxis.set_major_formatter(PercentFormatter(1.0))
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(CURVES), frameon=False, fontsize=9)
        figure.savefig(path, dpi=110, metadata={"Software": None})


def _curves(axes: Axes, found: Sequence[RemedyOutcome], field: str) -> None:
    axes.set_xscale("log", base=2)
    lengths = sorted({one.length for one in found})
    axes.xaxis.set_major_locator(FixedLocator(lengths[::2]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for preset, (colour, line) in CURVES.items():
        values = [getattr(one, field) for length in lengths for one in found if one.preset == preset and one.length == length]
        axes.plot(lengths, values, color=colour, linestyle=line, linewidth=1.8, marker="o", markersize=3, label=preset)
    axes.set_ylim(-0.03, 1.08 if field == "kept_tokens" else 1.25)
