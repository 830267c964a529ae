"""Numbers of a step, by names of the catalogue (catalogue.py); an unlisted name is an error.

Packages and actors return dataclasses or dicts of numbers; actors/record/ puts them into a `StepMetrics`. metrics.jsonl, TensorBoard,
Prometheus, Weights & Biases, the terminal, the report and docs/metrics.md are views. `python -m actors.metrics` prints docs/metrics.md.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from evenkeel.actors.carriers import DiscardReason
from evenkeel.actors.json_lines import step_of
from evenkeel.actors.metrics.catalogue import CATALOGUE, Kind, Metric
from evenkeel.correction.errors import EvenkeelError

DISCARD_COUNTERS = {
    DiscardReason.INVALID: "groups/invalid_total",
    DiscardReason.UNIFORM: "groups/refilled_total",
    DiscardReason.FAILED: "groups/failed_total",
    DiscardReason.LOST: "groups/failed_total",
}
"""Counters by the reason for which a group was discarded."""
T = TypeVar("T")
_JOINED_FAMILIES = [metric for metric in CATALOGUE.values() if metric.name.endswith("_")]


class MetricError(EvenkeelError, LookupError):
    """A number that the catalogue doesn't list."""


def lookup(name: str) -> Metric:
    """The catalogue's entry for a name; for a member of a family, the family's.

    Raises: MetricError naming the nearest listed metric, or the members of the family.
    """
    metric = _find(name)
    if metric is None:
        nearest = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.0)[0]
        family = _family_of(name) if name not in CATALOGUE else None
        near = f"the nearest one is {nearest!r}" if family is None else f"members of {family.name!r} are {family.members}"
        raise MetricError(f"metric {name!r} is not in the catalogue (actors/metrics/catalogue.py); {near}. Use that, or list the new one.")
    return metric


def is_listed(name: str) -> bool:
    """True for a metric of the catalogue and for a member of one of its families."""
    return _find(name) is not None


def _find(name: str) -> Metric | None:
    metric = CATALOGUE.get(name)
    if metric is not None:
        return None if metric.is_family else metric
    family = _family_of(name)
    return family if family is not None and family.has_member(name[len(family.name) :]) else None


def _family_of(name: str) -> Metric | None:
    """The family in which a name would be, whether it has such a member or not."""
    if (family := CATALOGUE.get(name[: name.rfind("/") + 1])) is not None:  # a run of hundreds of workers has thousands of such names
        return family
    return next((one for one in _JOINED_FAMILIES if name.startswith(one.name) and "/" not in name[len(one.name) :]), None)


def member(name: str) -> str:
    """The last part of a family member's name ("accuracy" of "reward/component/accuracy"), "" for a plain metric."""
    metric = lookup(name)
    return name[len(metric.name) :] if metric.is_family else ""


def members(metrics: Mapping[str, float], family: str) -> dict[str, float]:
    """Values of a family of the catalogue, by the last part of their names. Raises: KeyError for a name that is no family there."""
    declared = CATALOGUE[family]
    return {name[len(family) :]: value for name, value in metrics.items() if name.startswith(family) and _find(name) is declared}


def shown(metrics: Mapping[str, float], name: str, within: str = "{}") -> str:
    """A number with its unit, as the catalogue has it written, in the place of the braces of `within`; "-" where it is absent."""
    return within.format(lookup(name).text(metrics[name])) if name in metrics else "-"


class StepMetrics(Mapping[str, float]):
    """The numbers of one step (or of one evaluation), by listed name.

    Missing values are left out, not set to 0. NaN and infinity are kept; metrics.jsonl stores them separately because JSON can't.
    """

    def __init__(self, step: int, values: Mapping[str, float | None] | None = None) -> None:
        self._values: dict[str, float] = {"step": step}
        self.update(values or {})

    @property
    def step(self) -> int:
        return int(self._values["step"])

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def set(self, name: str, value: float | None) -> None:
        """Record one number. Raises: MetricError for an unlisted name, or one that is there already with another value."""
        lookup(name)
        if value is None:
            return
        number = float(value)
        before = self._values.get(name)
        if before is not None and before != number and not (math.isnan(before) and math.isnan(number)):
            raise MetricError(
                f"metric {name!r} was recorded twice in step {self.step}: {before} and {number}. One place emits each metric."
            )
        self._values[name] = value if isinstance(value, int) else number  # counts stay whole numbers in metrics.jsonl

    def update(self, values: Mapping[str, float | None], *, prefix: str = "") -> None:
        """Record many numbers, each under `prefix` + its name; with a family's prefix under those of its members."""
        for name, value in values.items():
            self.set(prefix + name, value)

    @classmethod
    def of_record(cls, record: Mapping[str, Any], *, wanted: Callable[[str], bool] = lambda name: True) -> StepMetrics:
        """Read what `record` made; names that this version's catalogue doesn't list, or that aren't wanted, are left out.

        Raises: KeyError, ValueError, TypeError, AttributeError or OverflowError for anything else.
        """
        metrics = cls(step_of(record))
        values = {name: value for name, value in record.items() if name not in ("step", "non_finite")}
        values |= {name: float(word) for name, word in record.get("non_finite", {}).items()}
        for name, value in values.items():
            if wanted(name) and is_listed(name):
                metrics.set(name, value)
        return metrics

    def record(self) -> dict[str, Any]:
        """The numbers as a line of JSON has them, which has no word for values that aren't finite: these stand under "non_finite", as
        words."""
        non_finite = self.non_finite()
        return {**self.finite(), **({"non_finite": non_finite} if non_finite else {})}

    def finite(self) -> dict[str, float]:
        """The values that are numbers, which is what can be plotted."""
        return {name: value for name, value in self._values.items() if math.isfinite(value)}

    def non_finite(self) -> dict[str, str]:
        """Names whose value is "inf", "-inf" or "nan"."""
        return {name: str(value) for name, value in self._values.items() if not math.isfinite(value)}


def by_worker(metrics: Mapping[str, float], quantity: str) -> dict[str, float]:
    """Values of a family worker/QUANTITY/ by the worker's name, in the order in which workers came."""
    return dict(sorted(members(metrics, f"worker/{quantity}/").items(), key=lambda item: (len(item[0]), item[0])))


def pass_at_most(metrics: Mapping[str, float]) -> tuple[int, float, float, float] | None:
    """(k, pass@k, its 95 % interval from, to) of the largest k that an evaluation has with its interval; None where each problem was asked
    once."""
    by_k, low, high = (members(metrics, f"held_out/pass_at{end}/") for end in ("", "_low", "_high"))
    return max(((int(k), by_k[k], low[k], high[k]) for k in by_k.keys() & low.keys() & high.keys()), default=None)


def accuracy(metrics: Mapping[str, float]) -> str:
    """Held-out accuracy with its 95 % interval: "0.512 [0.480, 0.544]"; "-" where nothing could be scored."""
    names = "held_out/accuracy", "held_out/wilson_low", "held_out/wilson_high"
    return with_interval(*(metrics[name] for name in names)) if set(names) <= set(metrics) else shown(metrics, names[0])


def with_interval(share: float, low: float, high: float) -> str:
    """A held-out share with its interval, for people."""
    number = CATALOGUE["held_out/accuracy"].number
    return f"{number(share)} [{number(low)}, {number(high)}]"


def accuracies_of_tasks(metrics: Mapping[str, float]) -> dict[str, tuple[float, float, float]]:
    """(held-out accuracy, 95 % interval from, to) of each of several tasks, by name."""
    found, low, high = (members(metrics, f"held_out/task_{name}/") for name in ("accuracy", "wilson_low", "wilson_high"))
    return {name: (share, low[name], high[name]) for name, share in found.items() if name in low and name in high}


def accuracy_by_task(metrics: Mapping[str, float]) -> dict[str, str]:
    """As `accuracy`, of each of several tasks by name."""
    return {name: with_interval(*share) for name, share in accuracies_of_tasks(metrics).items()}


def accuracy_of_what(metrics: Mapping[str, float]) -> str:
    """What that accuracy is measured on: " on 512 problems x 4 answers, 3 of them not scored"."""
    text = f" on {shown(metrics, 'held_out/problems')} problems" if "held_out/problems" in metrics else ""
    text += f" x {shown(metrics, 'held_out/samples')} answers" if metrics.get("held_out/samples", 1) > 1 else ""
    return text + (f", {shown(metrics, 'held_out/unscored')} of them not scored" if metrics.get("held_out/unscored") else "")


def markdown() -> str:
    """docs/metrics.md: the catalogue as tables, one a group of names."""
    lines = [
        "# Metrics",
        "",
        "Every number that a run shows, generated from `actors/metrics/catalogue.py` (`make docs`).",
        "In metrics.jsonl, TensorBoard and trackers a metric has the name on the left; Prometheus has the one below it.",
        "A name that ends in `<...>` is a family. A number that a step doesn't have is absent: it is neither 0 nor NaN.",
        "The column `over ranks` is how one value was made of those of several ranks or workers; a mean is weighted by what each counted.",
        "rho is pi_prox / mu of a sampled token. The [glossary](glossary.md) explains the terms.",
    ]
    group = None
    for metric in CATALOGUE.values():
        head = metric.name.split("/")[0] if "/" in metric.name else "progress"
        if head != group:
            group = head
            lines += ["", f"## {group}", "", "| name | kind | unit | over ranks | meaning |", "|---|---|---|---|---|"]
        shown = metric.name + ("<...>" if metric.is_family else "")
        total = "_total" if metric.kind is Kind.COUNTER else ""
        name = f"`{shown}`<br>`{metric.prometheus_name}{total}`"
        meaning = metric.help.replace("|", "\\|")
        lines.append(f"| {name} | {metric.kind} | {metric.shown_unit} | {metric.reduction} | {meaning} |")
    return "\n".join(lines) + "\n"
