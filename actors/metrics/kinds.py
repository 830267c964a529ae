"""What is said of a metric of a run: how it behaves over time, how values of several parts become one, its names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from evenkeel.correction.diagnostics.quantities import NUMBER, Quantity, Unit


class Kind(StrEnum):
    """How a metric behaves over time."""

    GAUGE = "gauge"
    """A value of this step; it may rise and fall."""
    COUNTER = "counter"
    """A running total since the run began, restored on resume; its name ends in _total, that of a family in _total/."""
    HISTOGRAM = "histogram"
    """A family whose last part is an upper bound, and whose value counts what fell into that bucket in this step."""


class Reduction(StrEnum):
    """How values of several ranks or workers become one."""

    SUM = "sum"
    MEAN = "mean"
    """Weighted by what each part counted; from sums and counts, never a mean of means."""
    MAX = "max"
    MIN = "min"
    LAST = "last"
    """There is one source only."""


_PROMETHEUS_SUFFIX = {
    Unit.ONE: "",
    Unit.SECONDS: "_seconds",
    Unit.SHARE: "_ratio",
    Unit.NATS: "_nats",
    Unit.NATS_SQUARED: "_nats_squared",
    Unit.TOKENS: "_tokens",
    Unit.TOKENS_PER_SECOND: "_tokens_per_second",
    Unit.VERSIONS: "_versions",
    Unit.BYTES: "_bytes",
    Unit.TIMESTAMP: "_timestamp_seconds",
}
_SCORE, _WHOLE = ".3f", ",.0f"
"""Digits of rewards and accuracies, and of counters."""
# What the catalogue's own names end in, taken off before the suffix above is put on.
_NAME_SUFFIX = re.compile(r"(/tokens|_tokens_per_s|_share|_versions|_tokens|_bytes|_time_s|_s|_total)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Quantity):
    """One listed quantity of a run, or a family of them when the name ends in a slash or an underscore."""

    name: str
    kind: Kind
    reduction: Reduction
    """How values of several ranks or workers are combined. Documentation only: whoever records the metric combines them."""
    part: str = "part"
    """Of a family: what its open part names; the Prometheus label."""

    @property
    def is_family(self) -> bool:
        return self.name.endswith(("/", "_"))

    def has_member(self, last: str) -> bool:
        """Whether a family has a member whose name ends in `last`; one whose members users choose has any."""
        return not self.members or re.fullmatch(self.members, last) is not None

    @property
    def prometheus_name(self) -> str:
        """Conventional name: evenkeel_ prefix, base unit as suffix, _total on counters (the client library appends that)."""
        stem = _NAME_SUFFIX.sub("", self.name.rstrip("/_"))
        suffix = _PROMETHEUS_SUFFIX[self.unit]
        stem = re.sub(r"[^a-zA-Z0-9]+", "_", stem)
        return f"evenkeel_{stem}" if stem.endswith(suffix) else f"evenkeel_{stem}{suffix}"


def gauge_of(quantity: Quantity, name: str, reduction: Reduction = Reduction.LAST, more: str = "", *, before: str = "") -> Metric:
    """A quantity that is declared elsewhere, as a gauge of that name.

    Args: more: a sentence that holds in a run alone. before: a word before its label, where a run shows it of other tokens as well.
    """
    return Metric(
        quantity.unit,
        f"{before} {quantity.label}".lstrip(),
        f"{quantity.help} {more}".rstrip(),
        quantity.of,
        name=name,
        kind=Kind.GAUGE,
        reduction=reduction,
        digits=quantity.digits,
        members=quantity.members,
    )


def gauge(
    name: str, unit: Unit, reduction: Reduction, label: str, help: str, of: str = "", *, digits: str = "", members: Iterable[str] = ()
) -> Metric:
    """Args: members: of a family, the last parts of its members' names; none: users choose them."""
    return gauge_of(Quantity(unit, label, help, of, digits, "|".join(members)), name, reduction)


def score(name: str, unit: Unit, reduction: Reduction, label: str, help: str) -> Metric:
    """A reward or an accuracy."""
    return gauge(name, unit, reduction, label, help, digits=_SCORE)


def counter(name: str, label: str, help: str, unit: Unit = Unit.ONE, *, part: str = "part", members: Iterable[str] = ()) -> Metric:
    """Args: members: as for `gauge`."""
    names = "|".join(members)
    return Metric(unit, label, help, name=name, kind=Kind.COUNTER, reduction=Reduction.SUM, part=part, digits=_WHOLE, members=names)


def histogram(name: str, unit: Unit, label: str, help: str) -> Metric:
    """A family by whole numbers, the last of which may be of all that is larger ("8+")."""
    return Metric(unit, label, help, name=name, kind=Kind.HISTOGRAM, reduction=Reduction.SUM, members=NUMBER + r"\+?")


def by_worker(name: str, unit: Unit, reduction: Reduction, label: str, help: str) -> Metric:
    return Metric(unit, label, help, name=f"worker/{name}/", kind=Kind.GAUGE, reduction=reduction, part="worker")


def by_k(name: str, label: str, help: str) -> Metric:
    return Metric(
        Unit.SHARE,
        label,
        help,
        name=f"held_out/{name}/",
        kind=Kind.GAUGE,
        reduction=Reduction.LAST,
        part="k",
        digits=_SCORE,
        members=NUMBER,
    )
