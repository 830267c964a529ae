"""Simulated runs for people: a table, the sentence that it comes to, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.reports.colours import COLOURS
from actors.simulation.outcome import FULL_ENGINES, HANDOVER, PUBLISH, UNDER_WAY, Outcome
from correction.errors import counted

ENOUGH = 0.95
"""Share of the best throughput that the choice in the last sentence has to reach."""
_CAUSES = (FULL_ENGINES, UNDER_WAY, HANDOVER, PUBLISH)
_COLUMNS = (
    *("\n\nworkers", "max\nstale-\nness", "\nstep\ns", "\n\ntokens/s", "\nx the\nfirst", "\nlearner\ntrains"),
    *("waits for\nfull\nengines", "answers\nunder\nway", "\n\nother", "\nengines\nsample", "requests\nan\nengine"),
    *("mean\nstale-\nness", "% of tokens\nby staleness\n0, 1, ..."),
)
_TABLE_WIDTH = 400
"""Never cut; the table takes what it needs."""


def show_outcomes(console: Console, outcomes: Sequence[Outcome]) -> None:
    """A row for each shape, and which of them pays."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for one in outcomes:
        waits = one.learner_wait_shares()
        other = sum(waits.get(cause, 0.0) for cause in (HANDOVER, PUBLISH))
        ages = [one.tokens_by_staleness[age] / max(1, one.tokens) for age in range(one.max_staleness + 1)]
        table.add_row(
            str(one.workers),
            str(one.max_staleness),
            f"{one.step_s:.3g}" if one.step_s < 100 else f"{one.step_s:.0f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.tokens_per_s / outcomes[0].tokens_per_s:.2f}",
            f"{one.learner_share:.0%}",
            *(f"{share:.0%}" for share in (*(waits.get(cause, 0.0) for cause in (FULL_ENGINES, UNDER_WAY)), other)),
            f"{one.engine_share:.0%}",
            f"{one.mean_requests:.0f}",
            f"{one.mean_staleness:.2f}",
            " ".join(f"{100 * share:.0f}" for share in ages),
        )
    Console(file=console.file, width=max(console.width, _TABLE_WIDTH), highlight=False).print(table)
    console.print("\n" + recommendation(outcomes), soft_wrap=not console.is_terminal)


def cheapest(outcomes: Sequence[Outcome]) -> Outcome:
    """Within 5 % of the best throughput: with the fewest workers, and of these with the least staleness."""
    most = max(one.tokens_per_s for one in outcomes)
    return min((one for one in outcomes if one.tokens_per_s >= ENOUGH * most), key=lambda one: (one.workers, one.max_staleness))


def recommendation(outcomes: Sequence[Outcome]) -> str:
    """The cheapest of the settings tried, in a sentence, and in what direction a larger one may pay."""
    chosen = cheapest(outcomes)
    edges = [
        name
        for name, all_of in (("workers", {one.workers for one in outcomes}), ("max_staleness", {one.max_staleness for one in outcomes}))
        if len(all_of) > 1 and getattr(chosen, name) == max(all_of)
    ]
    share = chosen.tokens_per_s / max(one.tokens_per_s for one in outcomes)
    return (
        f"{counted(chosen.workers, 'worker')} with max_staleness {chosen.max_staleness}: {share:.0%} of the most "
        f"tokens/s; the learner trains {chosen.learner_share:.0%} of the time, engines sample {chosen.engine_share:.0%}. Fewer workers, or "
        f"less staleness with as many: less than {ENOUGH:.0%}."
        + (f" No larger {' and no larger '.join(edges)} was tried: more may pay." if edges else "")
    )


def draw_outcomes(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Throughput by workers, a curve for each staleness, and what the learner does with its time."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "font.size": 10}
    with rc_context(style):
        figure = Figure(figsize=(11.2, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        _draw_throughput(left, outcomes)
        _draw_learner_time(right, outcomes)
        figure.suptitle(title, fontsize=11)
        figure.savefig(path, format="png", dpi=140)


def _draw_throughput(axes: Any, outcomes: Sequence[Outcome]) -> None:
    for i, staleness in enumerate(sorted({one.max_staleness for one in outcomes})):
        line = sorted((one.workers, one.tokens_per_s) for one in outcomes if one.max_staleness == staleness)
        axes.plot(*zip(*line, strict=True), "o-", color=COLOURS[i % len(COLOURS)], markersize=4, label=f"max_staleness {staleness}")
    limit = max(one.tokens / one.train_s for one in outcomes)
    axes.axhline(limit, color="#888888", linestyle="--", linewidth=1, label="a learner that never waits")
    axes.set_ylim(0)
    axes.set_xticks(sorted({one.workers for one in outcomes}))
    axes.set(xlabel="workers", ylabel="trained response tokens/s")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1.0, handlelength=1.4)


def _draw_learner_time(axes: Any, outcomes: Sequence[Outcome]) -> None:
    names = [f"{one.workers}\n{one.max_staleness}" for one in outcomes]
    places = range(len(outcomes))
    floor = [one.learner_share for one in outcomes]
    axes.bar(places, floor, color=COLOURS[2], label="trains")
    for cause, colour in zip(_CAUSES, (COLOURS[0], COLOURS[1], COLOURS[3], COLOURS[5]), strict=True):
        shares = [one.learner_wait_shares().get(cause, 0.0) for one in outcomes]
        if max(shares) >= 0.005:
            axes.bar(places, shares, bottom=floor, color=colour, label=f"waits: {cause}")
            floor = [a + b for a, b in zip(floor, shares, strict=True)]
    axes.set_xticks(places, names)
    axes.set_ylim(0, 1)
    axes.set(xlabel="workers / max_staleness", ylabel="share of the learner's time")
    axes.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, columnspacing=1.0, handlelength=1.0)
