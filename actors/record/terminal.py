"""What a person sees while a run goes on: a live panel on a terminal, one plain line a step anywhere else.

The view only shows; it is given phases, step metrics and events, and knows nothing of actors. `terminal_svg` draws the panel of a
run folder as a picture for documents (docs/generate.py --terminal).
"""

from __future__ import annotations

import io
import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from evenkeel.actors.carriers import EventLevel
from evenkeel.actors.config import RunConfig
from evenkeel.actors.metrics.catalogue import CATALOGUE, SKIPPED
from evenkeel.actors.metrics.step_metrics import accuracy, accuracy_by_task, accuracy_of_what, by_worker, pass_at_most, shown, with_interval
from evenkeel.actors.processes.output import UnfailingStream
from evenkeel.actors.record.run_folder import LEVEL_OF_STATE, RunFolder
from evenkeel.correction.early_warning.monitor import ReferenceLevel, State, usual_level
from evenkeel.correction.errors import EvenkeelError
from evenkeel.engines.contract import expert_count
from evenkeel.learner.hf.folder import read_json
from evenkeel.learner.results import SkipReason

_EVENT_STYLE: dict[EventLevel, str] = {"info": "cyan", "watch": "yellow", "warning": "yellow", "alarm": "bold red", "error": "bold red"}
_SPARKS, _SPARKS_WIDTH = "▁▂▃▄▅▆▇█", 14
_REWARD, _MISMATCH, _REJECTED, _WARNING = "reward/mean", "mismatch/k3", "rejection/rejected_share", "monitor/level"
# Metrics in the left column of the panel.
_LEFT = (_REWARD, "reward/accuracy", "learner/entropy", "mismatch_and_staleness/k3", _REJECTED, _WARNING)
_LABEL_WIDTH = max(len(CATALOGUE[name].label) for name in _LEFT)
_RECENT_STEPS = 20
# More workers than that are shown as a range.
_WORKERS_BY_NAME = 4
_NO_UPDATE = {SkipReason.NOT_FINITE: "loss or gradient not finite", SkipReason.NO_GRADIENT: "no gradient"}
_TOKENS, _WAIT_SHARE, _VERSION = (CATALOGUE[f"worker/{quantity}/"] for quantity in ("tokens", "wait_share", "weight_version"))


class TerminalView:
    """Live view of one run. Use it from one thread, `event` from any; `close` it whatever happens. What can't be printed is dropped."""

    def __init__(self, total_steps: int, header: str, *, folder: str = "", console: Console | None = None) -> None:
        """Args:
        total_steps: training steps of the whole run.
        header: what runs, in one line.
        folder: where the run is written down.
        console: None: standard output, with a live panel if that is a terminal.
        """
        self._console = console or Console(file=cast(TextIO, UnfailingStream(sys.stdout)))
        self._state = _State(total_steps, header, folder)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._state.render, console=self._console, refresh_per_second=2, transient=False)
            self._live.start()
        else:
            self._say(header + (f" -> {folder}" if folder else ""))

    def compare_with(self, usual: ReferenceLevel | None) -> None:
        """Set what mismatch is usual for such a run; None: not known."""
        self._state.usual = usual

    def phase(self, text: str) -> None:
        """What the run does or waits for now."""
        if text != self._state.phase and self._live is None:
            self._say(f"... {text}")
        self.waiting(text)

    def waiting(self, text: str) -> None:
        """The same, for what only the live panel has room for: the parts of a step."""
        if text != self._state.phase:
            self._state.phase = text
            self._state.phase_since = time.monotonic()

    def step(self, metrics: Mapping[str, float]) -> None:
        """A step is finished. metrics: by catalogue name; what is absent isn't shown."""
        self._state.take(metrics)
        if self._live is None:
            self._say(step_line(metrics, self._state.total_steps))
            if workers := workers_line(metrics):
                self._say(f"    workers  {workers}")

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """A held-out evaluation is finished. metrics: of the held_out group."""
        self._state.take_evaluation(metrics)
        text = evaluation_line(metrics)
        if self._live is None:
            self._say(text)
        else:
            self._console.print(Text(text, style="green"))

    def event(self, level: EventLevel, text: str) -> None:
        """Something that a person should know. level: info, warning or error; watch or alarm, from the early warning."""
        line = Text(f"{level}: {text}" if level != "info" else text, style=_EVENT_STYLE.get(level, "") if self._live else "")
        self._console.print(line, soft_wrap=True)

    def show(self, table: Table) -> None:
        """Print what doesn't fit in one line, as a table."""
        self._console.print(table, soft_wrap=self._live is None)

    def close(self, summary: str = "") -> None:
        """Leave the terminal as it was, and say how it ended."""
        if self._live is not None:
            self._state.phase = ""
            self._live.stop()
            self._live = None
        if summary:
            self._console.print(Text(summary), soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class _State:
    """What the panel shows; filled by the view, drawn twice a second."""

    def __init__(self, total_steps: int, header: str, folder: str = "") -> None:
        self.total_steps = total_steps
        self.header, self.folder = header, folder
        self.usual: ReferenceLevel | None = None
        # Of the last step with tokens of staleness 0, and that step: many have none.
        self._mismatch: tuple[int, float] | None = None
        self.phase = ""
        self.phase_since = time.monotonic()
        self.metrics: dict[str, float] = {}
        self.held_out: dict[str, float] = {}
        self.first_held_out: dict[str, float] = {}
        self.rewards: list[float] = []
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %  "),
            TextColumn("{task.fields[left]}"),
            expand=True,
        )
        self._task = self._progress.add_task("steps", total=total_steps, left="")

    def take(self, metrics: Mapping[str, float]) -> None:
        self.metrics = dict(metrics)
        if "held_out/accuracy" in metrics:
            self.take_evaluation(metrics)
        if _MISMATCH in metrics:
            self._mismatch = int(metrics.get("step", 0)), metrics[_MISMATCH]
        if _REWARD in metrics:
            self.rewards.append(metrics[_REWARD])
        if "time/step_s" in metrics:
            self._step_times.append(metrics["time/step_s"])
        step = int(metrics.get("step", 0))
        left = ""
        if self._step_times and step < self.total_steps:
            pace = sum(self._step_times) / len(self._step_times)  # of recent steps: the first ones wait for engines
            left = f"about {duration(pace * (self.total_steps - step))} left"
        self._progress.update(self._task, completed=step, left=left)

    def take_evaluation(self, metrics: Mapping[str, float]) -> None:
        self.held_out = dict(metrics)
        if "held_out/accuracy" in metrics:
            self.first_held_out = self.first_held_out or dict(metrics)

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress]
        if self.metrics or self.held_out:
            parts += [Text(""), self._numbers(), self._lines()]
        if self.phase:
            parts += [Text(""), self._phase_line()]
        title = Text(self.header, style="bold", overflow="ellipsis", no_wrap=True)
        return Panel(Group(*parts), title=title, title_align="left", padding=(0, 1))

    def _numbers(self) -> Table:
        """The main numbers; fits 80 columns, the usual width."""
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
        special: dict[str, RenderableType] = {
            _REWARD: self._reward(),
            _REJECTED: shown(self.metrics, _REJECTED, "{} of tokens"),
            _WARNING: self._warning(),
        }
        right = [
            (CATALOGUE["time/step_s"].label, shown(self.metrics, "time/step_s")),
            ("rollout", self._side("throughput/rollout_tokens_per_s", "wait/rollout_share")),
            ("learner", self._side("throughput/learner_tokens_per_s", "wait/learner_share")),
            ("staleness", self._staleness()),
            ("weights", shown(self.metrics, "weight_version", "version {}")),
            ("answers", self._answers()),
        ]
        for name, (label, value) in zip(_LEFT, right, strict=True):
            table.add_row(CATALOGUE[name].label, special.get(name) or shown(self.metrics, name), label, value)
        return table

    def _lines(self) -> Table:
        """What takes the panel's width."""
        table = Table.grid(padding=(0, 1))
        table.add_column(style="dim", no_wrap=True, min_width=_LABEL_WIDTH)
        table.add_column(overflow="fold")
        table.add_row("held-out", self._accuracy())
        for name, text in accuracy_by_task(self.held_out).items():
            table.add_row("", f"{name} {text}")
        table.add_row("mismatch", self._mismatch_text())
        if "groups/no_gradient_share" in self.metrics:
            table.add_row("groups", self._groups())
        if workers := workers_line(self.metrics):
            table.add_row("workers", workers)
        if self.folder:
            table.add_row("run folder", self.folder)
        return table

    def _answers(self) -> str:
        parts = (("length/trained_tokens", "{}"), ("turns/mean", "{} turns"), ("length/truncated_share", "{} cut"))
        return ", ".join(shown(self.metrics, name, words) for name, words in parts if name in self.metrics) or "-"

    def _groups(self) -> str:
        """How many of the batch's groups teach nothing, and why."""
        words = {"no_gradient_share": "{} without gradient", "all_correct": "{} all correct", "all_wrong": "{} all wrong"}
        return ", ".join(shown(self.metrics, f"groups/{name}", one) for name, one in words.items() if f"groups/{name}" in self.metrics)

    def _mismatch_text(self) -> str:
        """Mismatch of the newest step that has one, beside what is usual."""
        if self._mismatch is None:
            return "-"
        step, value = self._mismatch
        text = f"k3 KL {CATALOGUE[_MISMATCH].text(value)}" + (f" at step {step}" if step != self.metrics.get("step") else "")
        return text + (f"; usual: up to {CATALOGUE[_MISMATCH].number(self.usual.high)}" if self.usual else "")

    def _warning(self) -> Text:
        state = _early_warning(self.metrics)
        if state is None:
            return Text("-")
        return Text(state, style="" if state is State.OK else _EVENT_STYLE[LEVEL_OF_STATE[state]])

    def _reward(self) -> str:
        if not self.rewards:
            return "-"
        return f"{CATALOGUE[_REWARD].text(self.rewards[-1])}  {sparkline(self.rewards, width=_SPARKS_WIDTH)}"

    def _accuracy(self) -> str:
        if "held_out/accuracy" not in self.held_out:
            return "-"
        text = accuracy(self.held_out)
        if (best := pass_at_most(self.held_out)) is not None:
            text += f", pass@{best[0]} {CATALOGUE['held_out/pass_at/'].text(best[1])}"
        if self.held_out.get("held_out/unscored"):
            text += f", {shown(self.held_out, 'held_out/unscored')} not scored"
        if self.first_held_out["held_out/accuracy"] != self.held_out["held_out/accuracy"]:
            text = f"{shown(self.first_held_out, 'held_out/accuracy')} → {text}"
        return text

    def _side(self, speed: str, waits: str) -> str:
        return shown(self.metrics, speed) + (f", waits {shown(self.metrics, waits)}" if waits in self.metrics else "")

    def _staleness(self) -> str:
        parts = (("mean", "staleness/mean"), ("max", "staleness/max"), ("mixed", "staleness/mixed_version_share"))
        return ", ".join(f"{label} {shown(self.metrics, name)}" for label, name in parts if name in self.metrics) or "-"

    def _phase_line(self) -> Text:
        elapsed = time.monotonic() - self.phase_since
        return Text(self.phase + (f" ({duration(elapsed)})" if elapsed >= 2 else ""), style="cyan")


# Metrics that a line says of a step.
_STEP_LINE = (
    _REWARD,
    "reward/accuracy",
    "time/step_s",
    "throughput/rollout_tokens_per_s",
    "throughput/learner_tokens_per_s",
    "wait/rollout_share",
    "wait/learner_share",
    "staleness/mean",
    "turns/mean",
    "length/truncated_share",
    "groups/no_gradient_share",
    _MISMATCH,
    "mismatch_and_staleness/k3",
    _REJECTED,
)


def step_line(metrics: Mapping[str, float], total_steps: int) -> str:
    """A step in one line, for logs."""
    parts = [f"{CATALOGUE[name].label} {shown(metrics, name)}" for name in _STEP_LINE if name in metrics]
    if metrics.get("learner/optimizer_steps") == 0:
        parts.append(f"no update: {_why_no_update(metrics)}")
    if (state := _early_warning(metrics)) not in (None, State.OK):
        parts.append(f"{CATALOGUE[_WARNING].label} {state}")
    return f"step {int(metrics.get('step', 0)):>{len(str(total_steps))}}/{total_steps}  " + "  ".join(parts)


def _why_no_update(metrics: Mapping[str, float]) -> str:
    words = _NO_UPDATE | {SkipReason.OVERFLOW: f"gradient overflowed, loss scale {shown(metrics, 'learner/loss_scale')}"}
    return ", ".join(words[reason] for reason in SkipReason if metrics.get(SKIPPED + reason))


def workers_line(metrics: Mapping[str, float]) -> str:
    """Who did what in a step, if there are two or more workers; of many the range."""
    tokens = by_worker(metrics, "tokens")
    waits, versions = by_worker(metrics, "wait_share"), by_worker(metrics, "weight_version")
    if len(tokens) < 2:
        return ""
    if len(tokens) <= _WORKERS_BY_NAME:
        of_each = {
            name: [_TOKENS.text(count)]
            + ([f"waits {_WAIT_SHARE.text(waits[name])}"] if name in waits else [])
            + ([f"v{_VERSION.text(versions[name])}"] if name in versions else [])
            for name, count in tokens.items()
        }
        return "  ".join(f"{name}: {', '.join(parts)}" for name, parts in of_each.items())
    ranges = [f"{_TOKENS.number(min(tokens.values()))} to {_TOKENS.text(max(tokens.values()))}"]
    if waits:
        ranges.append(f"wait {_WAIT_SHARE.text(min(waits.values()))} to {_WAIT_SHARE.text(max(waits.values()))}")
    if versions:
        ranges.append(f"v{_VERSION.text(min(versions.values()))} to v{_VERSION.text(max(versions.values()))}")
    return f"{len(tokens)}: {', '.join(ranges)}"


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """A held-out evaluation in one line."""
    text = f"held-out accuracy {accuracy(metrics)}{accuracy_of_what(metrics)}"
    if by_task := accuracy_by_task(metrics):
        text += f" ({', '.join(f'{name} {one}' for name, one in by_task.items())})"
    if (best := pass_at_most(metrics)) is not None:
        text += f", pass@{best[0]} {with_interval(*best[1:])}"
    if metrics.get("held_out/reward", metrics.get("held_out/accuracy")) != metrics.get("held_out/accuracy"):
        text += f", reward {shown(metrics, 'held_out/reward')}"
    if metrics.get("held_out/truncated_share"):
        text += f", {shown(metrics, 'held_out/truncated_share')} cut"
    if metrics.get("held_out/turns", 1) != 1:
        text += f", {shown(metrics, 'held_out/turns')} turns"
    if "held_out/weight_version" in metrics:
        text += f", weight version {shown(metrics, 'held_out/weight_version')}"
    return text


def sparkline(values: list[float], *, width: int) -> str:
    """A curve of `width` characters at most: means of equal stretches, from the smallest to the largest of them."""
    if not values:
        return ""
    width = min(width, len(values))
    bounds = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def duration(seconds: float) -> str:
    """Seconds as a person says them: "42 s", "3 min 05 s", "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def terminal_svg(folder: RunFolder, *, until_step: int | None = None) -> str:
    """The live panel of a run as it stood at a step, drawn from the run folder's numbers as an SVG picture that stands alone.

    Args:
        folder: the run.
        until_step: None: the last one.
    """
    steps = [metrics for metrics in folder.read_metrics() if until_step is None or metrics.step <= until_step]
    shown_until = steps[-1].step if steps else 0
    config = folder.read_config()
    name = config.get("name", folder.path.name)
    state = _State(int(config.get("steps", shown_until)), f"evenkeel: {name}", f"{folder.path.parent.name}/{folder.path.name}")
    state.usual = usual_mismatch_of(folder)
    for evaluation in folder.read_evaluations():
        if evaluation.step <= shown_until:
            state.take_evaluation(evaluation)
    for metrics in steps:
        state.take(metrics)
    state.phase = "step in training; rollouts go on" if shown_until < state.total_steps else ""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(state.render())
    picture = console.export_svg(title="evenkeel train")
    return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # rich's font comes from a server; any monospace will do


def _early_warning(metrics: Mapping[str, float]) -> State | None:
    """None for a step without diagnostics."""
    return list(State)[int(metrics[_WARNING])] if _WARNING in metrics else None


def usual_mismatch(config: RunConfig, *, has_experts: bool) -> ReferenceLevel | None:
    """How far engine and learner usually are apart at equal weights in such a run. Args: config: with devices and types."""
    return usual_level(
        config.monitor.thresholds.setting,
        config.learner.resolved_dtype,
        device=config.rollout.engine.resolved_device,
        has_experts=has_experts,
        has_float8=config.rollout.engine.has_float8,
        replays_routes=config.learner.routing_replay == "rollout",
    )


def usual_mismatch_of(folder: RunFolder) -> ReferenceLevel | None:
    """The same of a run that may be an earlier version's, or not whole: None for what its folder doesn't say."""
    config = folder.read_config()
    try:
        model = read_json(folder.model_path / "config.json")
    except EvenkeelError:
        return None
    stated = next((model[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if model.get(name)), None)
    return usual_level(
        _at(config, "monitor", "thresholds", "setting"),
        str(_at(config, "learner", "dtype")),
        device=str(_at(config, "rollout", "engine", "device")),
        has_experts=expert_count(str(model.get("model_type")), stated) > 0,
        has_float8=_at(config, "rollout", "engine", "quantization") == "float8_block",
        replays_routes=_at(config, "learner", "routing_replay") == "rollout",
    )


def _at(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
