"""Early warning: the diagnostics of a run against the run's own start.

Each symptom is followed on a log scale. Its level is the median of the last steps against the median of the first ones; the last two
steps alone are held against them as well, for jumps; its trend is the median of all slopes between two of the last steps (Theil-Sen). All
are held against the scatter of the first steps, and must be large in themselves: a tiny change is no event, however certain. An event says
when a symptom's state changes; others act on it.

What comes first was measured on recorded runs of a nano model that a learning rate, a queue or noise ruined: drift, bad updates and the KL
of stale tokens warn before gradient norm and reward, entropy last. Mismatch at equal weights, which papers report as the first sign
(docs/correction.md), didn't warn there: it says that the engines disagree. Entropy alone is no symptom: it falls in most runs that go well.

On independent noise around a constant, a run of 300 steps shows a false watch in fewer than 1 of 100 cases for each symptom, and a false
alarm in fewer than 1 of 1000. Noise with a memory gives more watches (1 in 6 runs where a step keeps 0.8 of the one before), and as few
alarms. tests/correction/test_monitor.py has these rates, and the delays on series that grow; benchmarks/early_warning.py scores the
monitor on runs that collapsed, and its thresholds are from half of those.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from pydantic import Field, field_validator

from ..diagnostics.quantities import BUCKET_EDGES, DIAGNOSTIC_FAMILIES, DIAGNOSTICS, Quantity, Unit, of_family
from ..errors import ConfigError
from ..settings.base import NamedSettings

# ----------------------------------------------------------------------------------------------------------------------
# What the early warning follows: for each symptom what is wrong when it grows, and what to try.
#
# No remedy names a correction that would reject most of a batch in the situation that it is given for: tests/correction/test_remedies.py
# checks each by benchmarks/remedies.py, up to a KL of 0.1 and for answers of any length.


@dataclass(frozen=True, slots=True)
class Symptom:
    """A diagnostic that is followed."""

    name: str
    """Name of the diagnostic (correction.diagnostics.quantities.DIAGNOSTICS)."""
    meaning: str
    """What is wrong when it grows."""
    remedy: str
    """What to try."""
    offset: float = 1e-12
    """Added before the log: growth is not measured below it."""
    is_share_missing: bool = False
    """True: 1 - value is followed, because the diagnostic is 1 when all is well."""
    least: float = 0.0
    """Below this value of the followed quantity nothing is wrong, however much it has grown."""
    limit: float | None = None
    """Value that is an alarm at once, regardless of the run's baseline."""
    implied_by: str | None = None
    """Symptom that explains this one: while it is in the same state or a worse one, this one is silent."""
    is_level_of_bounds: bool = False
    """Its usual level depends on the correction's bounds: when these change, it is followed anew."""
    is_eased_by_bounds: bool = True
    """True: narrower bounds of the correction help against it. False: they would add to it, or don't help."""
    has_reference_level: bool = False
    """True: LEVELS has its levels in published setups, and above the alarm level it is an alarm without a baseline, too."""

    def quantity(self, value: float) -> float:
        """What is followed, >= 0."""
        return max(1 - value if self.is_share_missing else value, 0.0)

    def is_over_limit(self, value: float) -> bool:
        return self.limit is not None and self.quantity(value) >= self.limit


SYMPTOMS = (
    Symptom(
        "mismatch_k3_kl",
        "engine and learner disagree at the same weights",
        "compare dtypes and weight checksums of both, raise the engine's precision or replay its routing (learner.routing_replay); until "
        "then set correction.preset: dppo-binary-tv or tis-token, on which sources differ (docs/correction.md, What was found)",
        offset=1e-9,
        has_reference_level=True,
    ),
    Symptom(
        "k3_kl",
        "the sampled tokens are off-policy",
        "lower max_staleness, or set correction.preset: dppo-binary-tv or mis-token",
        offset=1e-9,
        implied_by="mismatch_k3_kl",
    ),
    Symptom(
        "ess_token",
        "a few tokens carry most of the batch's weight",
        "lower max_staleness, or bound the weights (correction.preset: tis-token, or icepop, which leaves such tokens out); sources differ "
        "on both (docs/correction.md, What was found)",
        offset=1e-3,
        is_share_missing=True,
        least=0.05,
        limit=0.95,
        implied_by="k3_kl",
    ),
    Symptom(
        "rejected_share",
        "rejection leaves out more and more of the batch",
        "find the cause before widening the bounds: lower max_staleness or the learning rate; a band on geometric means rejects nearly all "
        "once the KL exceeds it, a product of ratios once KL times length exceeds 1",
        offset=0.02,
        limit=0.9,
        implied_by="k3_kl",
        is_level_of_bounds=True,
        is_eased_by_bounds=False,
    ),
    Symptom(
        "drift_k3_kl",
        "each update moves the policy further than the early ones did",
        "lower the learning rate, or take fewer optimizer steps per batch",
        offset=1e-9,
    ),
    Symptom(
        "drift_from_behavior_k3_kl",
        "the later optimizer steps of a batch train on tokens that the earlier ones have moved further away",
        "lower the learning rate, or take fewer optimizer steps per batch",
        offset=1e-9,
        implied_by="k3_kl",
    ),
    Symptom(
        "rho_mean_deviation",
        "mean rho is not 1: the tokens were not drawn from the policy whose logprobs came with them",
        "check the sampling temperature and top-p, logprobs that are shifted by one token, or that are of another policy or of edited text",
        offset=5.0,
        limit=5.0,
        is_eased_by_bounds=False,
    ),
    Symptom(
        "bad_update_share",
        "tokens of negative advantage that the sampler found likely have lost 0.5 or more of their probability (mu - pi >= 0.5)",
        "set correction.preset: dppo-binary-tv, or lower the learning rate",
        offset=5e-3,
    ),
    Symptom(
        "broken_tokens",
        "logprobs or advantages are not finite",
        "look for overflow in engine or learner",
        offset=1.0,
        limit=1.0,
        is_eased_by_bounds=False,
    ),
)
"""What is followed unless a monitor is given others."""


# ----------------------------------------------------------------------------------------------------------------------
# Levels of mismatch that were published or measured, by setting: data, for the page and for a monitor without a start to compare with.


@dataclass(frozen=True, slots=True)
class ReferenceLevel:
    """What is usual for one kind of engine and learner at equal weights."""

    text: str
    """The setting, in words."""
    low: float
    """Least k3 KL seen, nats; where the source has another estimator, its text says so."""
    high: float
    """Largest one seen in a run that went well."""
    alarm: float
    """k3 KL, nats, from which `mismatch_k3_kl` is an alarm though the run has known nothing else. A published limit if there is one;
    otherwise ten times the largest usual value, which leaves room for another model, or the level at which a source saw a run go bad."""
    source: str
    """Where the figures are from, and how the alarm level follows."""


LEVELS: dict[str, ReferenceLevel] = {
    "float32": ReferenceLevel(
        "both in float32",
        0.0,
        3e-10,
        3e-9,
        "this project on CPUs; true on-policy gives 0. It grows with depth and size: up to 7.6e-14 with 3 layers and 6M parameters; with "
        "30 layers and 135M 4.7e-11 on a processor with AVX-512, 1.8e-10 on one with AVX2, rounded up here. Ten times the largest",
    ),
    "dense_bfloat16": ReferenceLevel(
        "dense, bfloat16",
        1e-5,
        1e-3,
        1e-2,
        "Miles post (1e-5 to 1e-3); Qwen3-8B 6.4e-4 (arXiv 2510.11370). Ten times the largest",
    ),
    "cpu_bfloat16": ReferenceLevel(
        "dense, bfloat16 on CPUs",
        4e-5,
        8e-3,
        8e-2,
        "this project: 4e-5 with 3 layers and 6M parameters, 8e-3 with 30 and 135M; SGLang rounds after each operator there. Ten times "
        "the largest",
    ),
    "cpu_float16": ReferenceLevel(
        "dense, float16 on CPUs",
        2.7e-5,
        1.2e-4,
        1.2e-3,
        "this project: 2.7e-5 to 1.2e-4 with 30 layers and 135M, a 59th of what it has in bfloat16; less with fewer layers. Ten times the "
        "largest",
    ),
    "moe_bfloat16": ReferenceLevel(
        "mixture of experts, bfloat16",
        1e-3,
        1e-1,
        1e-1,
        "Miles post (1e-3 to 1e-1); Qwen3-30B-A3B 1.5e-3 (arXiv 2510.11370). The end of the published range, which is wide already",
    ),
    "moe_bfloat16_replay": ReferenceLevel(
        "the same with routing replay from the engine (R3)",
        5e-4,
        1e-3,
        1e-2,
        "Qwen3-30B-A3B: about half of 1.5e-3 (arXiv 2510.11370). Ten times the largest",
    ),
    "float8_blocks": ReferenceLevel(
        "float8 with a scale for each block, or mxfp8",
        1.4e-3,
        2.4e-3,
        4e-3,
        "NeMo-RL pull request 2744: 1.4e-3 to 1.8e-3 (9B), 2.4e-3 (35B); its nightly limits are 3e-3 and 4e-3. "
        "With a float8 cache and answers of 8k more: 9e-3 (verl issue 7519, KL)",
    ),
    "float8_tensor": ReferenceLevel(
        "float8 with one scale a tensor",
        1.0e-2,
        1.0e-2,
        3e-2,
        "verl issue 7519 (KL, answers of 8k, float8 cache): 1.0e-2 at first, growing by 40 to 50 % in 8 steps; at 3.1e-2 "
        "chi-square was 1.0",
    ),
    "float8_both": ReferenceLevel(
        "mixture of experts, engine and learner in float8",
        3.4e-4,
        3.7e-4,
        3.7e-3,
        "Qwen3.5-35B-A3B (xtuner issue 2044); 8.7e-3 one step later if the learner quantises float32 masters instead of bfloat16 weights. "
        "Ten times the largest",
    ),
}
"""Levels by the name that `monitor.thresholds.setting` takes."""


def usual_level(
    setting: str | None,
    dtype: str,
    *,
    device: str = "cuda",
    has_experts: bool = False,
    has_float8: bool = False,
    replays_routes: bool = False,
) -> ReferenceLevel | None:
    """What is usual for a run: the level of its `setting`, or without one that of its types. None: none is known.

    Args:
        dtype: of the learner's weights.
        device: the engine's.
        has_float8: the engine's projections are in float8.
        replays_routes: the learner takes the engine's choice of experts (R3).
    """
    if setting is None and dtype == "bfloat16":
        of_experts = "moe_bfloat16_replay" if replays_routes else "moe_bfloat16"
        of_dense = "cpu_bfloat16" if device == "cpu" else "dense_bfloat16"
        setting = "float8_blocks" if has_float8 else of_experts if has_experts else of_dense
    elif setting is None and dtype == "float32":
        setting = "float32"
    elif setting is None and dtype == "float16" and device == "cpu" and not (has_experts or has_float8):
        setting = "cpu_float16"
    return LEVELS.get(setting or "")


def levels_table() -> str:
    """Markdown, one row for each level."""
    lines = ["| `setting` | engine and learner | usual k3 KL, nats | alarm | from |", "| --- | --- | --- | --- | --- |"]
    for name, level in LEVELS.items():
        usual = f"{level.low:.2g}" if level.low == level.high else f"{level.low:.2g} to {level.high:.2g}"
        lines.append(f"| `{name}` | {level.text} | {usual} | {level.alarm:.2g} | {level.source} |")
    return "\n".join(lines)


# Standard deviation of a normal distribution over its median absolute deviation.
_MAD_TO_STD = 1.4826
# Standard error of a median over that of a mean: the root of pi / 2.
_MEDIAN_LOSS = 1.2533


class State(enum.StrEnum):
    """How serious a symptom is; the worst comes last."""

    OK = "ok"
    WATCH = "watch"
    """Look at it: it grows, or has grown."""
    ALARM = "alarm"
    """Act: at this rate the run is lost."""

    @property
    def rank(self) -> int:
        return list(State).index(self)


class MonitorConfig(NamedSettings):
    """When a symptom becomes an event."""

    skip_steps: int = Field(default=2, ge=0)
    """Steps at the start of the run that are left out, while the optimizer warms up."""
    baseline_steps: int = Field(default=20, ge=8)
    """Steps after those, from which the monitor learns what is usual for this run; there is no event before their end."""
    level_steps: int = Field(default=8, ge=3)
    """Last steps whose median is the level."""
    jump_steps: int = Field(default=2, ge=1)
    """Steps over which a jump is looked for: fewer steps show a change sooner, but it must be larger."""
    trend_steps: int = Field(default=24, ge=8)
    """Last steps from whose slopes the trend is taken."""
    watch_growth: float = Field(default=2.0, gt=1)
    """Growth of level or trend from which a symptom is watched; of a symptom that is 1 when all is well, growth of 1 minus it."""
    alarm_growth: float = Field(default=4.0, gt=1)
    """Factor by which the level must grow for an alarm."""
    watch_deviations: float = Field(default=5.0, gt=0)
    """Standard errors of the run's own scatter by which it must grow for a watch."""
    alarm_deviations: float = Field(default=7.0, gt=0)
    """Standard errors of the run's own scatter by which it must grow for an alarm."""
    patience: int = Field(default=2, ge=1)
    """Steps in a row that a new state must hold before it is an event."""
    setting: str | None = None
    """Kind of engine and learner, by a name of reference_levels.LEVELS (dense_bfloat16 ...). Mismatch above its alarm level is an alarm as
    long as the run has no baseline of its own, or if that baseline was above it already. Unset: only the run's own baseline counts."""

    @field_validator("setting")
    @classmethod
    def _is_listed(cls, setting: str | None) -> str | None:
        if setting is not None and setting not in LEVELS:
            raise ConfigError(f"monitor.thresholds.setting = {setting}: no level is known for it. Take one of {', '.join(LEVELS)}.")
        return setting


@dataclass(frozen=True, slots=True)
class Event:
    """A symptom's state has changed."""

    step: int
    name: str
    """Name of the symptom."""
    state: State
    value: float
    """The diagnostic's value at this step."""
    growth: float
    """Level divided by the level at the run's start; 1: no change. Not a number if a limit was passed before there was a baseline."""
    message: str
    """One line: what is wrong, since when, where, and what to try."""


@dataclass(slots=True)
class _Series:
    """The history of one diagnostic, as far as it is needed; y is its logarithm."""

    kept: int
    first_steps: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=deque)
    seen: int = 0

    def add(self, step: int, y: float, config: MonitorConfig) -> None:
        self.seen += 1
        if self.seen <= config.skip_steps:
            return
        if len(self.first) < config.baseline_steps:
            self.first.append(y)
            self.first_steps.append(step)
        self.last.append(y)
        while len(self.last) > self.kept:
            self.last.popleft()

    def is_ready(self, config: MonitorConfig) -> bool:
        """Whether there are enough values for the baseline, and for a level that doesn't overlap it."""
        return self.seen >= config.skip_steps + config.baseline_steps + config.level_steps

    @property
    def start(self) -> _Start:
        """What was usual in the first steps."""
        return _start_of(tuple(self.first))

    def shift(self, steps: int) -> float:
        """Level of the last steps above that of the start."""
        return statistics.median(list(self.last)[-steps:]) - self.start.level


@dataclass(frozen=True, slots=True)
class _Start:
    """What was usual in a run's first steps, by the logarithms of a diagnostic."""

    level: float
    """Median."""
    scatter: float
    """Robust standard deviation, at least 2%: otherwise any change would stand out in a series that hardly moves."""
    memory: float
    """Factor on standard errors for noise in which a step resembles the one before: from the correlation of neighbours."""


@lru_cache(maxsize=256)  # asked several times a step, and the first steps stay what they are
def _start_of(first: tuple[float, ...]) -> _Start:
    middle, mean = statistics.median(first), statistics.fmean(first)
    scatter = max(_MAD_TO_STD * statistics.median(abs(y - middle) for y in first), 0.02)
    y = [value - mean for value in first]
    square = sum(value * value for value in y)
    correlation = sum(a * b for a, b in itertools.pairwise(y)) / square if square > 0 else 0.0
    correlation = min(max(correlation, 0.0), 0.9)
    return _Start(middle, scatter, math.sqrt((1 + correlation) / (1 - correlation)))


@dataclass(slots=True)
class _SymptomState:
    """The state of a symptom, and the candidate for its next state, which must hold for some steps."""

    state: State = State.OK
    candidate: State = State.OK
    held: int = 0


class Monitor:
    """Follows the diagnostics of one run. Everything it knows is plain numbers: `state_dict` goes into a checkpoint."""

    def __init__(self, config: MonitorConfig | None = None, symptoms: Sequence[Symptom] = SYMPTOMS) -> None:
        self._config = config or MonitorConfig()
        self._symptoms = tuple(symptoms)
        # What is followed of a diagnostic, and what is added to it before the log.
        self._followed: dict[str, tuple[Callable[[float], float], float]] = dict.fromkeys(_CLUES, (float, 1e-9))
        self._followed |= {symptom.name: (symptom.quantity, symptom.offset) for symptom in self._symptoms}
        self._series: dict[str, _Series] = {}
        self._symptom_states = {symptom.name: _SymptomState() for symptom in self._symptoms}

    @property
    def states(self) -> dict[str, State]:
        """State of every symptom, including those that another one explains."""
        return {name: current.state for name, current in self._symptom_states.items()}

    @property
    def state(self) -> State:
        """The worst of them."""
        return max(self.states.values(), key=lambda state: state.rank, default=State.OK)

    def update(self, step: int, diagnostics: Mapping[str, float]) -> list[Event]:
        """Take the numbers of a step; return the changes of state, worst first.

        Args:
            diagnostics: from `diagnose`. What is absent in a step leaves its series as it was.
        """
        self._record(step, diagnostics)
        changed = []
        for symptom in self._symptoms:
            if symptom.name in diagnostics and self._settle(symptom, diagnostics[symptom.name]):
                changed.append(symptom)
        events = [self._event(step, symptom, diagnostics) for symptom in changed if not self._is_implied(symptom)]
        return sorted(events, key=lambda event: -event.state.rank)

    def state_dict(self) -> dict[str, Any]:
        """Histories and states as data that JSON holds. Settings are no part of it: a resumed run has its own."""
        return {
            "series": {name: asdict(series) | {"last": list(series.last)} for name, series in self._series.items()},
            "states": {name: asdict(current) for name, current in self._symptom_states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned; symptoms that weren't followed then start anew."""
        self._series = {name: _Series(**{**series, "last": deque(series["last"])}) for name, series in state["series"].items()}
        states = state["states" if "states" in state else "stands"].items()  # as older checkpoints call it
        saved = {name: _SymptomState(State(s["state"]), State(s["candidate"]), s["held"]) for name, s in states}
        self._symptom_states |= {name: current for name, current in saved.items() if name in self._symptom_states}

    def forget(self, names: Iterable[str]) -> None:
        """Start these series anew, in state ok, because their numbers mean something else from now on."""
        for name in names:
            self._series.pop(name, None)
            if name in self._symptom_states:
                self._symptom_states[name] = _SymptomState()

    def _record(self, step: int, diagnostics: Mapping[str, float]) -> None:
        kept = max(self._config.level_steps, self._config.trend_steps)
        for name, (quantity, offset) in self._followed.items():
            if name in diagnostics and math.isfinite(diagnostics[name]):
                series = self._series.setdefault(name, _Series(kept))
                series.add(step, math.log(quantity(diagnostics[name]) + offset), self._config)

    def _state_now(self, symptom: Symptom, value: float) -> State:
        """The state according to this step's numbers alone."""
        if not math.isfinite(value) or symptom.is_over_limit(value) or self._is_over_reference(symptom, value):
            return State.ALARM
        series = self._series[symptom.name]
        part = self._config
        if not series.is_ready(part) or symptom.quantity(value) < symptom.least:
            return State.OK
        shifts = [self._shift(series, steps) for steps in (part.level_steps, part.jump_steps)]
        if _is_up(shifts, part.alarm_growth, part.alarm_deviations):
            return State.ALARM
        if _is_up(shifts, part.watch_growth, part.watch_deviations):
            return State.WATCH
        shift, error = shifts[0]
        return State.WATCH if shift >= 2 * error and self._rises(series) else State.OK

    def _is_over_reference(self, symptom: Symptom, value: float) -> bool:
        """Whether this symptom is above the alarm level of the setting, and the run has no baseline below it."""
        if self._config.setting is None or not symptom.has_reference_level or value < LEVELS[self._config.setting].alarm:
            return False
        series = self._series[symptom.name]
        return not series.is_ready(self._config) or series.start.level >= math.log(LEVELS[self._config.setting].alarm)

    def _shift(self, series: _Series, steps: int) -> tuple[float, float]:
        """Log level of the last steps minus that of the start, and its standard error."""
        start = series.start
        error = _MEDIAN_LOSS * start.scatter * start.memory * math.sqrt(1 / steps + 1 / self._config.baseline_steps)
        return series.shift(steps), error

    def _rises(self, series: _Series) -> bool:
        """Whether the trend alone is steep and certain enough for a watch."""
        count = len(series.last)
        if count < self._config.trend_steps:
            return False
        trend, start = theil_sen(list(series.last)), series.start
        error = _MEDIAN_LOSS * start.scatter * start.memory * math.sqrt(12 / (count**3 - count))
        return trend * count >= math.log(self._config.watch_growth) and trend >= self._config.watch_deviations * error

    def _settle(self, symptom: Symptom, value: float) -> bool:
        """Move the symptom to a state that has held long enough, or at once past its limit; True if it moved."""
        current, state = self._symptom_states[symptom.name], self._state_now(symptom, value)
        current.held = current.held + 1 if state is current.candidate else 1
        current.candidate = state
        if state is current.state or (current.held < self._config.patience and not symptom.is_over_limit(value)):
            return False
        current.state = state
        return True

    def _is_implied(self, symptom: Symptom) -> bool:
        cause = self._symptom_states.get(symptom.implied_by or "")
        return cause is not None and cause.state is not State.OK and cause.state.rank >= self._symptom_states[symptom.name].state.rank

    def _event(self, step: int, symptom: Symptom, diagnostics: Mapping[str, float]) -> Event:
        state, value = self._symptom_states[symptom.name].state, diagnostics[symptom.name]
        growth = self._growth(symptom.name)
        number = _quantity(symptom.name).number(value)
        if state is State.OK:
            message = f"{symptom.name} = {number} is back at its usual level"
        else:
            message = f"{symptom.name} = {number}{self._history(symptom, growth)}{self._reference(symptom, value)}"
            message += f"{self._place(symptom.name, diagnostics)}: "
            message += f"{symptom.meaning}; {symptom.remedy}"
        return Event(step, symptom.name, state, value, growth, message)

    def _history(self, symptom: Symptom, growth: float) -> str:
        if math.isnan(growth):
            return ""
        series = self._series[symptom.name]
        what = f"its distance from 1 is {growth:.1f} times that" if symptom.is_share_missing else f"{growth:.1f} times the level"
        recent = math.exp(theil_sen(list(series.last)) * (len(series.last) - 1))
        return f", {what} of steps {series.first_steps[0]} to {series.first_steps[-1]} ({recent:.1f}x in the last {len(series.last)} steps)"

    def _reference(self, symptom: Symptom, value: float) -> str:
        if self._config.setting is None or not math.isfinite(value) or not self._is_over_reference(symptom, value):
            return ""
        level, number = LEVELS[self._config.setting], _quantity(symptom.name).number
        return f", above {number(level.alarm)}, the alarm level for {level.text} ({number(level.low)} to {number(level.high)} is usual)"

    def _place(self, name: str, diagnostics: Mapping[str, float]) -> str:
        """Which tokens show the symptom, or which criterion causes it, as far as the numbers show."""
        words = []
        by = of_family("rejected_by_", diagnostics)
        if name == "rejected_share" and by:
            worst = max(by, key=lambda label: by[label])
            words.append(f"{DIAGNOSTIC_FAMILIES['rejected_by_'].number(by[worst])} by {worst}")
            if "log_ratio_mean" in diagnostics:
                words.append(f"at a mean log rho of {_quantity('log_ratio_mean').number(diagnostics['log_ratio_mean'])}")
        if name == "k3_kl":
            fresh, stale = self._growth("mismatch_k3_kl"), self._growth("stale_k3_kl")
            if stale >= self._config.watch_growth and not fresh >= math.sqrt(self._config.watch_growth):
                words.append("on stale tokens only")
        if name in ("k3_kl", "mismatch_k3_kl"):
            rare, *others = (self._growth(f"bucket_rho_std_{k}") for k in range(len(BUCKET_EDGES) + 1))
            if rare >= self._config.watch_growth and all(not other >= rare / 2 for other in others):
                words.append(f"in tokens under p = {BUCKET_EDGES[0]}")
        return "".join(f", {word}" for word in words)

    def _growth(self, name: str) -> float:
        """Level over the level at the start; not a number while there is none."""
        series = self._series.get(name)
        if series is None or not series.is_ready(self._config):
            return math.nan
        return math.exp(max(series.shift(self._config.level_steps), series.shift(self._config.jump_steps)))


# Followed only to say where a symptom sits: they give no events of their own.
_CLUES = ("mismatch_k3_kl", "stale_k3_kl", *(f"bucket_rho_std_{k}" for k in range(len(BUCKET_EDGES) + 1)))


def _is_up(shifts: Iterable[tuple[float, float]], growth: float, deviations: float) -> bool:
    """Whether the level of the last steps, of level_steps or of jump_steps, exceeds the start's by both the growth and the deviations.

    Args: shifts: of both, as `Monitor._shift` gives them.
    """
    return any(shift >= math.log(growth) and shift >= deviations * error for shift, error in shifts)


def _quantity(name: str) -> Quantity:
    """What is known of a number that is followed; a plain one where a monitor is given symptoms of its own."""
    return DIAGNOSTICS.get(name) or Quantity(Unit.ONE, name, "")


def theil_sen(values: Sequence[float]) -> float:
    """Median of the slopes between all pairs of equally spaced values; 0 for fewer than two.

    Source: Sen (1968); stands up to 29% of outliers.
    """
    count = len(values)
    slopes = [(values[j] - values[i]) / (j - i) for i in range(count) for j in range(i + 1, count)]
    return statistics.median(slopes) if slopes else 0.0
