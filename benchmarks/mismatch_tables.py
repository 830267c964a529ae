"""Tables of docs/mismatch_on_a_laptop.md, from what benchmarks/real_mismatch.py has measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.mismatch_numbers import BUCKETS, QUANTILES, Interval, Sampled, Treatment, answers_alone, without_normalisation
from benchmarks.mismatch_operators import OPERATORS
from benchmarks.real_mismatch import (
    BATCHES,
    FLOAT8,
    FORMATS,
    KINDS,
    STEPS,
    TEMPERATURES,
    Folder,
    Text,
    label,
    of_engine,
    of_learner,
    packed,
)
from benchmarks.sides import ROOT, put_between
from evenkeel.correction import PackedBatch

PAGE = ROOT / "docs" / "mismatch_on_a_laptop.md"
PRESETS = (
    *("tis-token", "tis-sequence", "mis-token", "mis-sequence", "mis-geometric", "mis-full", "icepop", "kpop"),
    *("rollout-is", "dppo-binary-tv"),
)
NORMALISED = ("tis-token", "tis-sequence", "icepop")
"""Presets whose weights are shown with and without batch normalisation."""
POSITIONS = (0, 6, 12, 18, 24)
NAMES = {
    "norms": "norms",
    "projections": "projections",
    "silu": "SiLU",
    "attention": "attention",
    "head": "head",
    "logprobs": "log-softmax",
}
Rows = Iterable[Sequence[str]]
Number = Callable[[Sampled], float]


def table(head: Sequence[str], rows: Rows) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclass
class Measured:
    """What is in the folders, as tokens."""

    folders: Sequence[Folder]
    """Of the rounds; staleness and costs are in the first."""
    extra: tuple[tuple[str, ...], ...] = ()
    """Further sets of operators."""

    @property
    def first(self) -> Folder:
        return self.folders[0]

    def having(self, engine: str, learner: str) -> list[Folder]:
        """Rounds in which both were measured."""
        return [one for one in self.folders if f"engine-{engine}" in one and f"learner-{learner}" in one]

    def batches(self, engine: str, learner: str, chosen: Callable[[Text], bool] = lambda _: True, *, apart: bool = False) -> list[Sampled]:
        """One for each batch. Args: apart: only the texts on which operators are taken apart."""
        found = []
        for batch in range(BATCHES):
            parts = []
            for folder in self.having(engine, learner):
                texts = [text for text in (folder.apart if apart else folder.texts) if text.batch == batch and chosen(text)]
                parts.append(Sampled.of(folder.values(f"engine-{engine}", texts), folder.values(f"learner-{learner}", texts)))
            found.append(Sampled.joined(parts))
        return found

    def share_left(self, operators: Iterable[str]) -> Interval:
        """k3 with some operators of true on-policy over the usual one, on the same tokens."""
        chosen = tuple(operators)
        sides = label(of_engine(chosen)), label(of_learner(chosen))
        both = Measured(self.having(*sides))
        return Interval.of_pairs(both.batches(*sides, apart=True), both.batches(label(()), label(()), apart=True), lambda one: one.k3)

    def has(self, operators: Iterable[str]) -> bool:
        chosen = tuple(operators)
        return bool(self.having(label(of_engine(chosen)), label(of_learner(chosen))))

    @property
    def formats(self) -> list[tuple[str, str]]:
        """That have been measured, of engine and learner."""
        pairs = [*((one, one) for one in FORMATS), (FLOAT8, "bfloat16")]
        return [pair for pair in pairs if self.having(*pair)]

    def versions(self, dtype: str, step: int, kind: str = "sums") -> list[list[list[float]]]:
        """Of each batch, the logprobs of its answers at temperature 1, of a learner after so many steps."""
        texts = [text for text in self.first.texts if text.temperature == 1.0 and (dtype == "float32" or text.kind == "sums")]
        rows = zip(texts, self.first[f"version-{step}"][dtype], strict=True)
        pairs = [(text, row) for text, row in rows if text.kind == kind]
        return [[row for text, row in pairs if text.batch == batch] for batch in range(BATCHES)]

    def engine_of(self, kind: str) -> list[list[list[float]]]:
        """Likewise of the engine in bfloat16."""
        texts = [text for text in self.first.texts if text.temperature == 1.0 and text.kind == kind]
        return [self.first.values("engine-bfloat16", [text for text in texts if text.batch == batch]) for batch in range(BATCHES)]

    def answers(self, batch: int, version: int | None = None) -> PackedBatch:
        """Sampled answers of a batch at temperature 1, in bfloat16. Args: version: sums alone, of the learner after so many steps."""
        if version is not None:
            texts = [text for text in self.first.texts if text.temperature == 1.0 and text.batch == batch and text.kind == "sums"]
            found = texts, self.engine_of("sums")[batch], self.versions("bfloat16", version)[batch]
        else:
            texts, engine, learner = [], [], []
            for folder in self.having("bfloat16", "bfloat16"):
                mine = [text for text in folder.texts if text.temperature == 1.0 and text.batch == batch and text.kind != "English"]
                texts += mine
                engine += folder.values("engine-bfloat16", mine)
                learner += folder.values("learner-bfloat16", mine)
            found = texts, engine, learner
        return answers_alone(packed(*found))


# -- tables --------------------------------------------------------------------------------------------------------------


def formats_table(measured: Measured) -> str:
    """k3, spread and quantiles of each format, kind of text and temperature."""
    head = [
        "engine",
        "learner",
        "text",
        "temperature",
        "tokens",
        "k3, nats",
        "std of log rho",
        *(f"{100 * q:g}%" for q in QUANTILES),
        "largest",
    ]
    rows = []
    for sides in measured.formats:
        for kind in KINDS:
            for temperature in TEMPERATURES:
                found = measured.batches(*sides, lambda text, k=kind, t=temperature: text.kind == k and text.temperature == t)
                whole = Sampled.joined(found)
                row = [*sides, kind, f"{temperature:g}", f"{len(whole.mu):,}", Interval.over(found, lambda one: one.k3).text(".1e")]
                row += [Interval.over(found, lambda one: one.std).text(".1e"), *(f"{whole.quantile(q):.1e}" for q in QUANTILES)]
                rows.append([*row, f"{whole.largest:.1e}"])
    return table(head, rows)


def bucket_rows(
    measured: Measured, dtype: str, chosen: Callable[[Text], bool] = lambda _: True, *, by_learner: bool = False
) -> list[tuple[str, list[Sampled]]]:
    """Tokens by the engine's probability, or the learner's, at both temperatures: name and batches."""
    found = measured.batches(dtype, dtype, chosen)
    names = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(BUCKETS)]
    return [(name, [one.where(one.buckets(by_learner=by_learner)[place]) for one in found]) for place, name in enumerate(names)]


def buckets_table(measured: Measured, dtype: str = "bfloat16") -> str:
    head = [
        "probability",
        "tokens",
        "k3, nats",
        "share of all k3",
        "std of log rho",
        "mean abs(pi - mu)",
        "icepop leaves out",
        "kpop leaves out",
    ]
    head += ["sampled texts: mean rho", "by the learner's probability"]
    rows = bucket_rows(measured, dtype)
    of_sampled = [bucket_rows(measured, dtype, lambda text: text.kind != "English", by_learner=one) for one in (False, True)]
    total = sum(Sampled.joined(found).k3 * len(Sampled.joined(found).mu) for _, found in rows)
    lines = []
    for place, (name, found) in enumerate(rows):
        whole = Sampled.joined(found)
        line = [name, f"{len(whole.mu):,}", Interval.over(found, lambda one: one.k3).text(".1e")]
        line += [f"{100 * whole.k3 * len(whole.mu) / total:.0f}%", Interval.over(found, lambda one: one.std).text(".3f")]
        line += [Interval.over(found, lambda one: one.distance).text(".4f"), f"{whole.outside_band:.1%}", f"{whole.outside_kl:.1%}"]
        lines.append([*line, *(Interval.over(rows[place][1], lambda one: one.ratio).text(".3f") for rows in of_sampled)])
    return table(head, lines)


def position_rows(measured: Measured, dtype: str) -> list[tuple[str, list[Sampled]]]:
    """Tokens of prose by their place in the answer: name and batches."""
    found = measured.batches(dtype, dtype, lambda text: text.kind != "sums")
    rows = []
    for low, high in itertools.pairwise(POSITIONS):
        rows.append((f"{low} to {high - 1}", [one.where((one.position >= low) & (one.position < high)) for one in found]))
    return rows


def positions_table(measured: Measured, dtype: str = "bfloat16") -> str:
    lines = []
    for name, found in position_rows(measured, dtype):
        numbers = Interval.over(found, lambda one: one.k3).text(".1e"), Interval.over(found, lambda one: one.std).text(".3f")
        lines.append([name, f"{sum(len(one.mu) for one in found):,}", *numbers])
    return table(["place in the answer", "tokens", "k3, nats", "std of log rho"], lines)


def removed(measured: Measured, operators: Iterable[str]) -> Interval:
    """Share of the k3 that is gone with these operators aligned."""
    left = measured.share_left(operators)
    return Interval(1 - left.high, 1 - left.whole, 1 - left.low)


def operators_table(measured: Measured) -> str:
    """Exchanged on both sides; with costs, once they were measured."""
    head = ["operator", "aligned alone: k3 that is gone", "all others aligned: k3 that is left"]
    with_costs = "cost-decode" in measured.first and "cost-step" in measured.first
    lines = []
    for chosen in [*((operator,) for operator in OPERATORS), *measured.extra, OPERATORS]:
        if not measured.has(chosen):
            continue
        others = [other for other in OPERATORS if other not in chosen]
        name = "all" if chosen == OPERATORS else ", ".join(NAMES[one] for one in chosen)
        line = [name, removed(measured, chosen).text(".0%")]
        line.append(measured.share_left(others).text(".1%") if len(chosen) == 1 and measured.has(others) else "")
        lines.append([*line, *(cost_cells(measured, chosen) if with_costs else [])])
    return table([*head, *(["decode", "training step"] if with_costs else [])], lines)


def exchanges_table(measured: Measured) -> str:
    """How far the engine alone moves when one operator is exchanged, from the usual ones and from those of true on-policy."""
    head = ["exchanged in the engine", "k3 from the usual engine", "k3 from the engine of true on-policy", "over the whole mismatch"]
    apart = [[text for text in measured.first.apart if text.batch == batch] for batch in range(BATCHES)]
    usual, every = label(()), label(of_engine(OPERATORS))

    def between(one: str, other: str) -> list[Sampled]:
        sides = [[measured.first.values(f"engine-{name}", texts) for texts in apart] for name in (one, other)]
        return [Sampled.of(*pair) for pair in zip(*sides, strict=True)]

    lines, whole = [], Measured([measured.first]).batches(usual, usual, apart=True)  # the same tokens
    for operator in [one for one in OPERATORS if of_engine([one])]:
        but_one = label(of_engine([other for other in OPERATORS if other != operator]))
        if f"engine-{label([operator])}" not in measured.first or f"engine-{but_one}" not in measured.first:
            continue
        near, far = between(usual, label([operator])), between(every, but_one)
        line = [NAMES[operator], *(Interval.over(found, lambda one: one.k3).text(".1e") for found in (near, far))]
        lines.append([*line, Interval.of_pairs(far, whole, lambda one: one.k3).text(".2f")])
    return table(head, lines)


def cost_cells(measured: Measured, operators: Iterable[str]) -> list[str]:
    """Processor time over that of the usual operators, decode and step: median, smallest and largest of the turns."""
    chosen, cells = tuple(operators), []
    for part, side in (("cost-decode", of_engine), ("cost-step", of_learner)):
        name = label(side(chosen))
        if part not in measured.first or name not in measured.first[part]:
            cells.append("not measured")
        elif not side(chosen):
            cells.append("nothing to align")
        else:
            found = measured.first[part]
            ratios = [one / usual for one, usual in zip(found[name], found[label(())], strict=True)]
            cells.append(Interval(min(ratios), statistics.median(ratios), max(ratios)).text(".2f"))
    return cells


def staleness_rows(measured: Measured, kind: str = "sums") -> list[list[list[Sampled]]]:
    """For each staleness: batches of staleness alone (float32), and for sums of staleness and mismatch (bfloat16)."""
    rows = []
    start = measured.versions("float32", 0, kind)
    for step in range(STEPS + 1):
        now = measured.versions("float32", step, kind)
        row = [[Sampled.of(mu, pi) for mu, pi in zip(start, now, strict=True)]]
        if kind == "sums":
            pairs = zip(measured.engine_of(kind), measured.versions("bfloat16", step), strict=True)
            row.append([Sampled.of(mu, pi) for mu, pi in pairs])
        rows.append(row)
    return rows


def staleness_table(measured: Measured) -> str:
    head = [
        "staleness",
        "sums, staleness alone: k3",
        "with the mismatch of bfloat16: k3",
        "variance: staleness",
        "both",
        "own prose, alone: k3",
    ]
    lines, prose = [], staleness_rows(measured, "own")
    for step, (alone, both) in enumerate(staleness_rows(measured)):
        line = [str(step), Interval.over(alone, lambda one: one.k3).text(".1e"), Interval.over(both, lambda one: one.k3).text(".1e")]
        line += [Interval.over(found, lambda one: one.std**2).text(".1e") for found in (alone, both)]
        lines.append([*line, Interval.over(prose[step][0], lambda one: one.k3).text(".1e")])
    return table(head, lines)


def over_batches(found: Sequence[float]) -> Interval:
    """Mean, smallest and largest."""
    return Interval(min(found), statistics.mean(found), max(found))


def treatments(measured: Measured) -> dict[str, list[list[Treatment]]]:
    """Preset -> of each case (same weights, all texts; staleness 4, sums) the three batches."""
    found = {}
    for preset in PRESETS:
        same = [Treatment.of(measured.answers(batch), preset) for batch in range(BATCHES)]
        stale = []
        if f"version-{STEPS}" in measured.first:
            stale = [Treatment.of(measured.answers(batch, STEPS), preset) for batch in range(BATCHES)]
        found[preset] = [same, stale]
    return found


def presets_table(measured: Measured) -> str:
    head = ["preset", "dropped", "weights cut", "mean factor", "std of it"]
    found = treatments(measured)
    is_late = all(stale for _, stale in found.values())
    head += [f"dropped at staleness {STEPS}", f"mean factor at staleness {STEPS}"] if is_late else []
    lines = []
    for preset, (same, stale) in found.items():
        line = [f"`{preset}`", over_batches([one.dropped for one in same]).text(".1%"), over_batches([one.cut for one in same]).text(".1%")]
        line += [over_batches([one.weight for one in same]).text(".3f"), over_batches([one.spread for one in same]).text(".2f")]
        if is_late:
            late = over_batches([one.dropped for one in stale]).text(".1%"), over_batches([one.weight for one in stale]).text(".3f")
            line += late
        lines.append(line)
    return table(head, lines)


def normalisation_table(measured: Measured) -> str:
    """Mean importance weight over a batch's tokens, without batch normalisation and with it."""
    cases: list[tuple[str, list[PackedBatch]]] = [("same weights", [measured.answers(batch) for batch in range(BATCHES)])]
    if f"version-{STEPS}" in measured.first:
        cases.append((f"sums, staleness {STEPS}", [measured.answers(batch, STEPS) for batch in range(BATCHES)]))
    lines = []
    for name, batches in cases:
        for preset in NORMALISED:
            pairs = [without_normalisation(batch, preset) for batch in batches]
            plain, normalised = (over_batches(column) for column in zip(*pairs, strict=True))
            lines.append([name, f"`{preset}`", plain.text(".3f"), normalised.text(".3f")])
    return table(["batches", "preset", "mean weight, not normalised", "normalised"], lines)


def write_tables(folders: Sequence[Folder], extra: Iterable[Sequence[str]]) -> Measured:
    """Put the tables into the page. Returns: what they are made of."""
    measured = Measured(folders, tuple(map(tuple, extra)))
    parts: dict[str, Callable[[], str]] = {
        "formats": lambda: formats_table(measured),
        "buckets": lambda: buckets_table(measured),
        "positions": lambda: positions_table(measured),
        "operators": lambda: operators_table(measured),
        "exchanges": lambda: exchanges_table(measured),
    }
    parts["presets"] = lambda: presets_table(measured)
    parts["normalisation"] = lambda: normalisation_table(measured)
    if f"version-{STEPS}" in measured.first:
        parts["staleness"] = lambda: staleness_table(measured)
    for name, make in parts.items():
        if f"<!-- {name} -->" in PAGE.read_text():
            put_between(PAGE, name, make())
    return measured
