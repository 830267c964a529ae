"""The pictures of a run's report: each a title, an inline SVG and a caption that says what to look at; and the numbers of all steps that
they are drawn from.

Drawn by matplotlib. Ink and grid take the page's colours, so that they can be read on a light and on a dark page; the curves' own
colours are of middle lightness for the same reason. Numbers are a column for each metric that is shown, and sums by worker, as arrays:
a run of 150,000 steps with 300 metrics each has gigabytes of them as objects. They are read in one pass.
"""

from __future__ import annotations

import enum
import io
import itertools
import math
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from evenkeel.actors.carriers import ScatterSample
from evenkeel.actors.metrics.catalogue import CATALOGUE
from evenkeel.actors.metrics.step_metrics import StepMetrics, by_worker, pass_at_most
from evenkeel.correction.diagnostics.quantities import Unit
from evenkeel.correction.early_warning.monitor import Event, ReferenceLevel, State

COLOURS = ("#3a7fc1", "#dd7a2b", "#3c9c63", "#a05cb8", "#c94f5c", "#8a8f2f")
"""Colours of middle lightness: to be seen on a light and on a dark page."""


MOST_POINTS = 5000
"""Points of a curve. Of a longer one, which has more than the picture has pixels, the first and the last are drawn, and the lowest and the
highest of each part."""


def running_mean(values: np.ndarray, half_width: int) -> np.ndarray:
    """Mean over up to 2 half_width + 1 neighbours; fewer at the ends, so that nothing is made up there. [n] -> [n]"""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half_width, 0), np.minimum(index + half_width + 1, len(values))
    return np.asarray((sums[last] - sums[first]) / (last - first))


def drawn_points(values: np.ndarray) -> np.ndarray:
    """Indices of those that are drawn, of a curve of any length. [n] -> [at most MOST_POINTS + 2]"""
    if len(values) <= MOST_POINTS:
        return np.arange(len(values))
    parts = np.array_split(np.arange(len(values)), MOST_POINTS // 2)
    ends = [part[pick(values[part])] for part in parts for pick in (np.argmin, np.argmax)]
    return np.unique([0, *ends, len(values) - 1])


_OF_WORKERS = "worker/"


@dataclass(slots=True)
class WorkerTotals:
    """What one rollout worker did, over all steps."""

    first_step: int
    last_step: int = 0
    groups: float = 0
    tokens: float = 0
    waits: float = 0.0
    """Sum of its shares of time waited."""
    steps_with_wait: int = 0

    def add(self, metrics: StepMetrics, name: str) -> None:
        self.last_step = metrics.step
        self.groups += metrics.get(f"worker/groups/{name}", 0)
        self.tokens += metrics[f"worker/tokens/{name}"]
        if math.isfinite(wait := metrics.get(f"worker/wait_share/{name}", math.nan)):
            self.waits, self.steps_with_wait = self.waits + wait, self.steps_with_wait + 1


class StepColumns:
    """The values that are finite, by metric, with the place of their steps."""

    def __init__(self, steps: Iterable[StepMetrics]) -> None:
        """Args: steps: in order; each is looked at once and not kept."""
        self.last: StepMetrics | None = None
        self.workers: dict[str, WorkerTotals] = {}
        """Workers by name, in the order in which they came."""
        self._steps = array("q")
        # Places in `_steps`, and values.
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        for metrics in steps:
            self._add(metrics)

    def _add(self, metrics: StepMetrics) -> None:
        place, self.last = len(self._steps), metrics
        self._steps.append(metrics.step)
        for name, value in metrics.items():
            if not name.startswith(_OF_WORKERS) and math.isfinite(value):
                places, values = self._columns.setdefault(name, (array("l"), array("d")))
                places.append(place)
                values.append(value)
        for name in by_worker(metrics, "tokens"):
            self.workers.setdefault(name, WorkerTotals(metrics.step)).add(metrics, name)

    def __len__(self) -> int:
        return len(self._steps)

    def values(self, name: str) -> list[float]:
        """Values of a metric, in the order of steps; steps without it are left out."""
        return self._columns[name][1].tolist() if name in self._columns else []

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps [n], values [n]) of a metric."""
        places, values = self._columns.get(name, (array("l"), array("d")))
        return np.array(self._steps, dtype=np.int64)[np.array(places, dtype=np.int64)], np.array(values)

    def members(self, family: str) -> list[str]:
        """Open parts of the names of a family of the catalogue, sorted."""
        return sorted(name[len(family) :] for name in self._columns if name.rpartition("/")[0] + "/" == family)

    def table(self, family: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(steps [n], values [n] by the open part of the name) of a family, at steps with any of its members; 0 where one is absent."""
        columns = {part: self._columns[family + part] for part in self.members(family)}
        rows = np.unique(np.concatenate([np.array(places, dtype=np.int64) for places, _ in columns.values()] or [np.array([], np.int64)]))
        found = {part: np.zeros(len(rows)) for part in columns}
        for part, (places, values) in columns.items():
            found[part][np.searchsorted(rows, np.array(places, dtype=np.int64))] = values
        return np.array(self._steps, dtype=np.int64)[rows], found


def those_of(names: Iterable[str]) -> Callable[[str], bool]:
    """Whether a metric is one of these, a member of one of their families, or of a worker. Args: names: of metrics and of families."""
    shown = {*names, *(name for name in CATALOGUE if name.startswith(_OF_WORKERS))}
    return lambda name: name in shown or name.rpartition("/")[0] + "/" in shown


_LEAST_DISTANCE = 1e-8  # nats; smaller ones, 0 among them, are drawn there on a logarithmic axis
_INK, _GRID = "#010203", "#040506"  # stand-ins for the page's own colours, which are put in afterwards
# Where a legend hides no curve.
_ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "fontsize": 9, "handlelength": 1.2, "borderaxespad": 0.1}
# Most characters of a legend in one row.
_LEGEND_CHARACTERS = 70
# Lines at events of the monitor.
_MARKS: dict[State, Any] = {
    State.WATCH: {"color": COLOURS[1], "linestyle": ":", "linewidth": 1.2},
    State.ALARM: {"color": COLOURS[4], "linestyle": "--", "linewidth": 1.2},
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be selected, and takes the page's font
    "font.size": 10,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "lines.linewidth": 1.6,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of the report."""

    title: str
    svg: str
    """An <svg> element."""
    caption: str
    """What to look at, and what would be bad news."""
    is_wide: bool = False


class _Scale(enum.Enum):
    LINEAR = enum.auto()
    LOG = enum.auto()
    SHARE = enum.auto()
    """0 to 100 %."""


@dataclass(frozen=True, slots=True)
class _Curves:
    """A plot of metrics over steps."""

    title: str
    names: tuple[str, ...]
    y_label: str
    """Empty: the unit of the metrics."""
    caption: str
    is_logarithmic: bool = False
    is_before_tokens: bool = False
    """The plots of single tokens come after this one: the scatter, and staleness."""

    @property
    def unit(self) -> Unit:
        return CATALOGUE[self.names[0]].unit

    @property
    def scale(self) -> _Scale:
        return _Scale.LOG if self.is_logarithmic else _Scale.SHARE if self.unit is Unit.SHARE else _Scale.LINEAR


_CURVES = (
    _Curves(
        "Reward",
        ("reward/mean", "reward/accuracy"),
        "of the batch",
        "Mean reward, and accuracy: the share of answers that are right (evaluation.correct_at). Where one rises and the other doesn't, "
        "something else than right answers is rewarded. Both are of training prompts at the sampling temperature; held-out accuracy is the "
        "judge.",
    ),
    _Curves(
        "Parts of the reward",
        ("reward/component/",),
        "mean of each part",
        "The reward is the sum of its parts. Where one part rises while another falls, you see what the policy really learns.",
    ),
    _Curves(
        "k3 KL from behaviour to proximal policy",
        ("mismatch/k3", "mismatch_and_staleness/k3"),
        "nats a token",
        "Tokens of staleness 0, which not every step has, show the mismatch of the engines at equal weights: it should be flat and low. "
        "All tokens carry staleness as well. A rise over the run is the early sign of a collapse.",
        is_logarithmic=True,
    ),
    _Curves(
        "Spread of the log-ratio",
        ("mismatch/log_ratio_std", "mismatch_and_staleness/log_ratio_std", "mismatch_and_staleness/max_abs_log_ratio"),
        "",
        "Standard deviation of log pi_prox - log mu, and its largest absolute value. Single tokens do harm long before the mean shows it.",
        is_logarithmic=True,
        is_before_tokens=True,
    ),
    _Curves(
        "Entropy",
        ("learner/entropy",),
        "nats a token",
        "A slow fall is learning; a fall to nearly 0 while the reward is still low means that exploration ended too early.",
    ),
    _Curves(
        "Gradient norm",
        ("learner/grad_norm",),
        "L2 norm before clipping",
        "Single peaks are clipped and do no harm; a steady rise, above all together with the k3 KL, does.",
    ),
    _Curves(
        "Throughput",
        ("throughput/rollout_tokens_per_s", "throughput/learner_tokens_per_s"),
        "",
        "Rollouts count sampled tokens over wall time, the learner prompt and response tokens over its training time.",
    ),
    _Curves(
        "Share of time that each side waits",
        ("wait/rollout_share", "wait/learner_share"),
        "share of the step",
        "The side that never waits is the bottleneck: give it more machines. Both high at once: look at weight sync and rewards.",
    ),
    _Curves(
        "Length of sampled and of trained answers",
        ("length/sampled_tokens", "length/trained_tokens"),
        "",
        "The two should lie together. Trained answers shorter than sampled ones mean that long answers get lost on the way.",
    ),
    _Curves(
        "Answers cut off",
        ("length/truncated_share",),
        "share of the batch",
        "Answers that were cut at max_tokens. If there are many, the policy learns to be short, whatever the task: raise max_tokens. If "
        "nearly all are from the first step on, the model may know no end of an answer.",
    ),
    _Curves(
        "What the correction took away",
        ("rejection/rejected_share", "rejection/vetoed_share", "rejection/truncated_share", "learner/clip_share"),
        "",
        "Of the trained tokens: rejected, in a vetoed sequence, stopped by the trust region. Of the importance weights: cut to their "
        "bound. Well below a tenth is usual.",
    ),
    _Curves(
        "Groups without gradient",
        ("groups/all_correct", "groups/all_wrong"),
        "groups of the batch",
        "Answers of these groups all got the same reward: nothing is learnt from them. Many all wrong: the task is too hard; many all "
        "correct: too easy.",
    ),
    _Curves(
        "Where the time goes",
        ("time/step_s", "time/generate_s", "time/train_s", "time/sync_s"),
        "",
        "In asynchronous training the step should be about as long as the longer of generating and training, not as both together.",
    ),
)
_STALENESS = "staleness/tokens/"
PLOTTED = (*(name for curves in _CURVES for name in curves.names), _STALENESS)
"""Metrics and families that are drawn over steps."""


def draw_plots(
    steps: StepColumns,
    evaluations: Sequence[StepMetrics],
    scatter: ScatterSample | None,
    warnings: Sequence[Event] = (),
    usual: ReferenceLevel | None = None,
) -> list[Plot]:
    """All plots for which a run has numbers, the most telling ones first.

    Args:
        warnings: events of the monitor; watches and alarms are marked on the curves.
        usual: mismatch of runs like this one.
    """
    plots = [draw_accuracy(evaluations)]
    for curves in _CURVES:
        plot = draw_curves(curves, steps, warnings)
        if plot is not None and usual is not None and curves.names[0] == "mismatch/k3":
            plot = replace(plot, caption=f"{plot.caption} Usual at staleness 0 ({usual.text}): up to {usual.high:.1e} nats.")
        plots.append(plot)
        if curves.is_before_tokens:
            plots += [draw_scatter(scatter), draw_staleness(steps)]
    return [plot for plot in plots if plot is not None]


def draw_accuracy(evaluations: Sequence[StepMetrics]) -> Plot | None:
    """Held-out accuracy with its 95 % Wilson band."""
    points = [metrics for metrics in evaluations if "held_out/accuracy" in metrics]
    if not points:
        return None
    x = [metrics.step for metrics in points]

    def draw(axes: Axes) -> None:
        y = [metrics["held_out/accuracy"] for metrics in points]
        low = [metrics.get("held_out/wilson_low", value) for metrics, value in zip(points, y, strict=True)]
        high = [metrics.get("held_out/wilson_high", value) for metrics, value in zip(points, y, strict=True)]
        axes.errorbar(x, y, [np.subtract(y, low).clip(0), np.subtract(high, y).clip(0)], fmt="none", ecolor=COLOURS[0], capsize=3)
        axes.fill_between(x, low, high, color=COLOURS[0], alpha=0.18, linewidth=0)
        axes.plot(x, y, "o-", color=COLOURS[0], markersize=4, label="mean")
        if best := [(metrics.step, *found) for metrics in points if (found := pass_at_most(metrics)) is not None]:
            steps, ks, shares, lows, highs = zip(*best, strict=True)
            axes.fill_between(steps, lows, highs, color=COLOURS[1], alpha=0.18, linewidth=0)
            axes.plot(steps, shares, "s--", color=COLOURS[1], markersize=4, label=f"pass@{max(ks)}")
            axes.legend(ncols=2, **_ABOVE)
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("share of right answers")
        _step_axis(axes, x)

    caption = "Questions that training never sees. Bars and band are 95 % Wilson intervals; points whose intervals overlap may be equal."
    if any(pass_at_most(metrics) is not None for metrics in points):
        caption += " pass@k: at least one of k answers is right. Questions are the unit of the intervals, not answers."
    return Plot("Held-out accuracy", _svg("held_out", draw), caption)


def draw_curves(curves: _Curves, steps: StepColumns, warnings: Sequence[Event] = ()) -> Plot | None:
    """Metrics over steps, with a line at each watch and alarm; None if the run has none of them."""
    series = [entry for name in curves.names for entry in _series(name, steps)]
    if curves.is_logarithmic:
        series = [(label, x[y > 0], y[y > 0]) for label, x, y in series]
    series = [entry for entry in series if len(entry[1])]
    if not series:
        return None

    def draw(axes: Axes) -> None:
        for (label, x, y), colour in zip(series, itertools.cycle(COLOURS), strict=False):
            smooth = running_mean(np.log(y) if curves.is_logarithmic else y, max(1, len(y) // 25))
            smooth = np.exp(smooth) if curves.is_logarithmic else smooth
            if len(y) > 25:  # a running mean over the faint single steps
                drawn = drawn_points(y)
                axes.plot(x[drawn], y[drawn], color=colour, alpha=0.3, linewidth=0.9)
                axes.plot(x[drawn], smooth[drawn], color=colour, label=label)
            else:
                axes.plot(x, y, color=colour, label=label, marker="o" if len(y) < 3 else None, markersize=4)
        for event in warnings:
            if event.state in _MARKS:
                axes.axvline(event.step, zorder=0.5, **_MARKS[event.state])
        if len(series) > 1:
            is_long = sum(len(label) for label, *_ in series) > _LEGEND_CHARACTERS
            axes.legend(ncols=2 if is_long else 4, columnspacing=1.2, **_ABOVE)
        axes.set_ylabel(curves.y_label or curves.unit)
        _value_axis(axes, curves.scale, [y for _, _, y in series])
        _step_axis(axes, [step for _, x, _ in series for step in (x[0], x[-1])])

    return Plot(curves.title, _svg(curves.title, draw), curves.caption)


def draw_staleness(steps: StepColumns) -> Plot | None:
    """Shares of trained tokens by staleness, one band a version."""
    x, found = steps.table(_STALENESS)
    if not len(x):
        return None
    ages = sorted((age for age in found if age.rstrip("+").isdecimal()), key=lambda age: int(age.rstrip("+")))
    starts = np.arange(0, len(x), 1 + (len(x) - 1) // MOST_POINTS)  # of as many steps each, so that there are few enough
    counts = np.array([np.add.reduceat(found[age], starts) for age in ages])
    shares = counts / np.maximum(counts.sum(axis=0), 1.0)
    edges = np.append(x[starts], x[-1] + 1) - 0.5  # a step's bar stands on its number

    def draw(axes: Axes) -> None:
        floor = np.zeros(len(starts))
        for age, share, colour in zip(ages, shares, itertools.cycle(COLOURS), strict=False):
            top = floor + share
            axes.stairs(top, edges, baseline=floor, fill=True, color=colour, alpha=0.75, linewidth=0, label=f"staleness {age}")
            floor = top
        axes.legend(ncols=4, columnspacing=1.2, **_ABOVE)
        axes.set_ylabel("share of trained tokens")
        _value_axis(axes, _Scale.SHARE, [np.array([1.0])])
        _step_axis(axes, x.tolist())

    caption = (
        "How many versions lay between sampling a token and training on it. Nothing may be older than max_staleness; "
        "a run that is always at that bound is one in which rollouts are far ahead of the learner."
    )
    return Plot("Staleness", _svg("staleness", draw), caption)


def draw_scatter(sample: ScatterSample | None) -> Plot | None:
    """pi_prox against mu of sampled tokens, and their log-ratio against mu."""
    if sample is None or not len(sample.step):
        return None
    mu, prox = sample.behavior_logprobs.astype(np.float64), sample.proximal_logprobs.astype(np.float64)
    finite = np.isfinite(mu) & np.isfinite(prox)
    fresh = sample.staleness <= 0
    distance = np.maximum(np.abs(prox - mu), _LEAST_DISTANCE)
    layers = [("staleness 0", finite & fresh, COLOURS[0]), ("older", finite & ~fresh, COLOURS[1])]

    def draw(left: Axes, right: Axes) -> None:
        lowest = float(np.minimum(mu, prox)[finite].min(initial=-1.0))
        left.plot([lowest, 0], [lowest, 0], color=_GRID, linewidth=1)
        for label, chosen, colour in reversed(layers):  # the few fresh ones on top
            if chosen.any():
                # As a bitmap: thousands of vector points would make the page slow.
                left.scatter(mu[chosen], prox[chosen], s=6, color=colour, alpha=0.5, linewidths=0, label=label, rasterized=True)
                right.scatter(mu[chosen], distance[chosen], s=6, color=colour, alpha=0.5, linewidths=0, rasterized=True)
        left.set(xlabel="log mu (nats): the engine that sampled", ylabel="log pi_prox (nats): the learner")
        left.legend(ncols=2, markerscale=2.5, **_ABOVE)
        _value_axis(right, _Scale.LOG, [distance[finite]])
        right.set(xlabel="log mu (nats)", ylabel="|log pi_prox - log mu| (nats)")

    caption = (
        f"{int(finite.sum()):,} trained tokens of steps {int(sample.step.min())} to {int(sample.step.max())}, drawn at random. "
        "On the left all should lie on the diagonal, those of staleness 0 exactly. On the right is the distance from it: what staleness 0 "
        "shows is mismatch of the engines, the rest is what newer weights changed."
    )
    return Plot("pi_prox against mu", _svg("scatter", draw, panels=2), caption, is_wide=True)


def _series(name: str, steps: StepColumns) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(label, steps, values) of a metric, or of each member of a family; steps without the metric are left out."""
    if name not in CATALOGUE or not CATALOGUE[name].is_family:  # a member of a family isn't listed itself
        return [(_label(name), *steps.series(name))]
    return [(part, *steps.series(name + part)) for part in steps.members(name)]


def _label(name: str) -> str:
    return CATALOGUE[name].label if name in CATALOGUE else name


def _step_axis(axes: Axes, steps: Sequence[int]) -> None:
    low, high = min(steps), max(steps)
    axes.set_xlim(low - 0.02 * (high - low) - 0.5, high + 0.02 * (high - low) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel("step")


def _value_axis(axes: Axes, scale: _Scale, values: Sequence[np.ndarray]) -> None:
    low, high = min(float(y.min()) for y in values), max(float(y.max()) for y in values)
    if scale is _Scale.LOG:
        axes.set_yscale("log")
        if high < 20 * low:  # at least one decade, or the axis has no labelled tick
            axes.set_ylim(low / 4, high * 4)
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif scale is _Scale.SHARE:
        axes.set_ylim(0, min(1.02, max(0.05, high * 1.1)))
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0 if high > 0.05 else 1))
    elif low >= 0:
        axes.set_ylim(0, high * 1.08 if high > 0 else 1.0)


def _svg(name: str, draw: Callable[..., None], *, panels: int = 1) -> str:
    """An <svg> element with what `draw` puts on its axes; sized by the page."""
    # A salt of its own keeps the ids of one picture's clip paths apart from another's; both end up on one page.
    style: Any = {**_STYLE, "svg.hashsalt": name}
    with rc_context(style):
        figure = Figure(figsize=(5.6 * panels, 3.1 if panels == 1 else 4.2), layout="constrained")
        draw(*np.atleast_1d(figure.subplots(1, panels)))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", dpi=160, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    markup = buffer.getvalue()
    markup = markup[markup.index("<svg") :]
    markup = re.sub(r"<metadata>.*?</metadata>", "", markup, flags=re.DOTALL)
    markup = re.sub(r'<svg ([^>]*?)\bwidth="[^"]*"', r"<svg \1", markup, count=1)
    markup = re.sub(r'<svg ([^>]*?)\bheight="[^"]*"', r"<svg \1", markup, count=1)
    markup = re.sub(r'<g id="[^"]*">', "<g>", markup)  # names of groups, the same in every picture; nothing refers to them
    return markup.replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
