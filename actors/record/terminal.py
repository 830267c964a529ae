"""What a person sees while a run goes on: a live panel on a terminal, one plain line a step anywhere else.

The view only shows; it is given phases, step metrics and events, and knows nothing of actors. `terminal_svg` draws the panel of a
run folder as a picture for documents.
"""

from __future__ import annotations

import io
import itertools
import re
import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from actors.metrics import by_worker, pass_at_most
from actors.record.run_folder import RunFolder

_EVENT_STYLE = {"info": "cyan", "watch": "yellow", "warning": "yellow", "alarm": "bold red", "error": "bold red"}
_MONITOR_LEVELS = ("ok", "watch", "alarm")
"""Words for the values of monitor/level."""
_SPARKS = "▁▂▃▄▅▆▇█"
_RECENT_STEPS = 20
_WORKERS_BY_NAME = 4
"""More workers than that are shown as a range."""


class TerminalView:
    """Live view of one run. Use it from one thread, `event` from any; `close` it whatever happens."""

    def __init__(self, total_steps: int, header: str, *, console: Console | None = None) -> None:
        """Args:
            total_steps: training steps of the whole run.
            header: what runs, in one line.
            console: None: standard output, with a live panel if that is a terminal.
        """
        self._console = console or Console()
        self._state = _State(total_steps, header)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._state.render, console=self._console, refresh_per_second=2, transient=False)
            self._live.start()
        else:
            self._say(header)

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

    def event(self, level: str, text: str) -> None:
        """Something that a person should know. level: info, warning or error; watch or alarm, from the early warning."""
        line = Text(f"{level}: {text}" if level != "info" else text, style=_EVENT_STYLE.get(level, "") if self._live else "")
        self._console.print(line, soft_wrap=True)

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

    def __init__(self, total_steps: int, header: str) -> None:
        self.total_steps = total_steps
        self.header = header
        self.phase = ""
        self.phase_since = time.monotonic()
        self.metrics: dict[str, float] = {}
        self.held_out: dict[str, float] = {}
        self.first_held_out: dict[str, float] = {}
        self.rewards: list[float] = []
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.percentage:>3.0f} %  "), _Text("left"),
            expand=True,
        )
        self._task = self._progress.add_task("steps", total=total_steps, left="")

    def take(self, metrics: Mapping[str, float]) -> None:
        self.metrics = dict(metrics)
        if "held_out/accuracy" in metrics:
            self.take_evaluation(metrics)
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        if "time/step_s" in metrics:
            self._step_times.append(metrics["time/step_s"])
        step = int(metrics.get("step", 0))
        left = ""
        if self._step_times and step < self.total_steps:
            pace = sum(self._step_times) / len(self._step_times)    # of recent steps: the first ones wait for engines
            left = f"about {duration(pace * (self.total_steps - step))} left"
        self._progress.update(self._task, completed=step, left=left)

    def take_evaluation(self, metrics: Mapping[str, float]) -> None:
        self.held_out = dict(metrics)
        if "held_out/accuracy" in metrics:
            self.first_held_out = self.first_held_out or dict(metrics)

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress]
        if self.metrics or self.held_out:
            parts += [Text(""), self._numbers()]
        if workers_line(self.metrics):
            parts.append(self._workers())
        if self.phase:
            parts += [Text(""), self._phase_line()]
        title = Text(self.header, style="bold", overflow="ellipsis", no_wrap=True)
        return Panel(Group(*parts), title=title, title_align="left", padding=(0, 1))

    def _numbers(self) -> Table:
        table = Table.grid(expand=True, padding=(0, 1))
        for _ in range(2):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
        left: list[tuple[str, RenderableType]] = [
            ("reward", self._reward()),
            ("held-out", self._accuracy()),
            ("mismatch k3", _show(self.metrics, "mismatch/k3", "{:.1e} nats")),
            ("with staleness", _show(self.metrics, "mismatch_and_staleness/k3", "{:.1e} nats")),
            ("rejected", _show(self.metrics, "rejection/rejected_share", "{:.2%} of tokens")),
            ("early warning", self._warning()),
        ]
        right = [
            ("step time", _show(self.metrics, "time/step_s", "{:.2f} s")),
            ("rollout", self._side("throughput/rollout_tokens_per_s", "wait/rollout_share")),
            ("learner", self._side("throughput/learner_tokens_per_s", "wait/learner_share")),
            ("staleness", self._staleness()),
            ("weights", _show(self.metrics, "weight_version", "version {:.0f}")),
            ("entropy", _show(self.metrics, "learner/entropy", "{:.2f} nats")),
        ]
        for (name_1, value_1), (name_2, value_2) in zip(left, right, strict=True):
            table.add_row(name_1, value_1, name_2, value_2)
        return table

    def _workers(self) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        table.add_row("workers", workers_line(self.metrics))
        return table

    def _warning(self) -> Text:
        level = _monitor_level(self.metrics)
        return Text(level or "-", style=_EVENT_STYLE.get(level, ""))

    def _reward(self) -> str:
        if not self.rewards:
            return "-"
        return f"{self.rewards[-1]:.3f}  {sparkline(self.rewards, width=18)}"

    def _accuracy(self) -> str:
        if "held_out/accuracy" not in self.held_out:
            return "-"
        text = f"{self.held_out['held_out/accuracy']:.3f}"
        if "held_out/wilson_low" in self.held_out:
            text += f" [{self.held_out['held_out/wilson_low']:.3f}, {self.held_out['held_out/wilson_high']:.3f}]"
        if (best := pass_at_most(self.held_out)) is not None:
            text += f", pass@{best[0]} {best[1]:.3f}"
        if self.held_out.get("held_out/unscored"):
            text += f", {self.held_out['held_out/unscored']:.0f} not scored"
        if self.first_held_out["held_out/accuracy"] != self.held_out["held_out/accuracy"]:
            text = f"{self.first_held_out['held_out/accuracy']:.3f} → {text}"
        return text

    def _side(self, speed: str, waits: str) -> str:
        text = _show(self.metrics, speed, "{:,.0f} tokens/s")
        return text + (f", waits {self.metrics[waits]:.0%}" if waits in self.metrics else "")

    def _staleness(self) -> str:
        text = _show(self.metrics, "staleness/mean", "mean {:.2f}")
        if "staleness/max" in self.metrics:
            text += f", max {self.metrics['staleness/max']:.0f}"
        if "staleness/mixed_version_share" in self.metrics:
            text += f", mixed {self.metrics['staleness/mixed_version_share']:.0%}"
        return text

    def _phase_line(self) -> Text:
        elapsed = time.monotonic() - self.phase_since
        return Text(self.phase + (f" ({duration(elapsed)})" if elapsed >= 2 else ""), style="cyan")


class _Text(ProgressColumn):
    """A field of the task, without styling."""

    def __init__(self, field: str) -> None:
        super().__init__()
        self._field = field

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get(self._field, "")))


def step_line(metrics: Mapping[str, float], total_steps: int) -> str:
    """A step in one line, for logs."""
    shown = [
        ("reward", "reward/mean", "{:.3f}"),
        ("step", "time/step_s", "{:.2f} s"),
        ("rollout", "throughput/rollout_tokens_per_s", "{:.0f} tok/s"),
        ("learner", "throughput/learner_tokens_per_s", "{:.0f} tok/s"),
        ("rollout waits", "wait/rollout_share", "{:.0%}"),
        ("learner waits", "wait/learner_share", "{:.0%}"),
        ("staleness", "staleness/mean", "{:.2f}"),
        ("mismatch k3", "mismatch/k3", "{:.1e}"),
        ("k3 with staleness", "mismatch_and_staleness/k3", "{:.1e}"),
        ("rejected", "rejection/rejected_share", "{:.2%}"),
    ]
    parts = [f"{label} {form.format(metrics[name])}" for label, name, form in shown if name in metrics]
    if metrics.get("learner/optimizer_steps") == 0:
        parts.append(f"no update: {_why_no_update(metrics)}")
    if (level := _monitor_level(metrics)) not in ("", "ok"):
        parts.append(f"early warning {level}")
    return f"step {int(metrics.get('step', 0)):>{len(str(total_steps))}}/{total_steps}  " + "  ".join(parts)


def _why_no_update(metrics: Mapping[str, float]) -> str:
    if "learner/grad_norm" not in metrics and "learner/loss_scale" in metrics:
        return f"gradient overflowed, loss scale {metrics['learner/loss_scale']:g}"
    return "no gradient" if metrics.get("learner/grad_norm") == 0 else "loss or gradient not finite"


def workers_line(metrics: Mapping[str, float]) -> str:
    """Who did what in a step, if there are two or more workers; of many the range."""
    tokens = by_worker(metrics, "tokens")
    waits, versions = by_worker(metrics, "wait_share"), by_worker(metrics, "weight_version")
    if len(tokens) < 2:
        return ""
    if len(tokens) <= _WORKERS_BY_NAME:
        of_each = {
            name: [f"{count:,.0f} tokens"]
            + ([f"waits {waits[name]:.0%}"] if name in waits else [])
            + ([f"v{versions[name]:.0f}"] if name in versions else [])
            for name, count in tokens.items()
        }
        return "  ".join(f"{name}: {', '.join(parts)}" for name, parts in of_each.items())
    ranges = [f"{min(tokens.values()):,.0f} to {max(tokens.values()):,.0f} tokens"]
    if waits:
        ranges.append(f"wait {min(waits.values()):.0%} to {max(waits.values()):.0%}")
    if versions:
        ranges.append(f"v{min(versions.values()):.0f} to v{max(versions.values()):.0f}")
    return f"{len(tokens)}: {', '.join(ranges)}"


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """A held-out evaluation in one line."""
    text = "held-out accuracy " + _show(metrics, "held_out/accuracy", "{:.3f}")
    if "held_out/wilson_low" in metrics:
        text += f" [{metrics['held_out/wilson_low']:.3f}, {metrics['held_out/wilson_high']:.3f}]"
    if "held_out/problems" in metrics:
        text += f" on {metrics['held_out/problems']:.0f} problems"
    if metrics.get("held_out/samples", 1) > 1:
        text += f" x {metrics['held_out/samples']:.0f} answers"
    if (best := pass_at_most(metrics)) is not None:
        text += ", pass@{} {:.3f} [{:.3f}, {:.3f}]".format(*best)
    if metrics.get("held_out/unscored"):
        text += f", {metrics['held_out/unscored']:.0f} of them not scored"
    if "held_out/weight_version" in metrics:
        text += f", weight version {metrics['held_out/weight_version']:.0f}"
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


def terminal_svg(folder: RunFolder, *, until_step: int | None = None, header: str = "", width: int = 100) -> str:
    """The live panel of a run as it stood at a step, drawn from the run folder's numbers as an SVG picture that stands alone.

    Args:
        folder: the run.
        until_step: None: the last one.
        header: the panel's title; "" takes the run's name.
        width: of the terminal, in characters.
    """
    steps = [metrics for metrics in folder.read_metrics() if until_step is None or metrics.step <= until_step]
    shown_until = steps[-1].step if steps else 0
    config = folder.read_config()
    state = _State(int(config.get("steps", shown_until)), header or f"evenkeel: {config.get('name', folder.path.name)}")
    for evaluation in folder.read_evaluations():
        if evaluation.step <= shown_until:
            state.take_evaluation(evaluation)
    for metrics in steps:
        state.take(metrics)
    state.phase = "step in training; rollouts go on" if shown_until < state.total_steps else ""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(state.render())
    picture = console.export_svg(title="evenkeel train")
    return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)    # rich's font comes from a server; any monospace will do


def _monitor_level(metrics: Mapping[str, float]) -> str:
    """ok, watch or alarm; "" for a step without diagnostics."""
    return _MONITOR_LEVELS[int(metrics["monitor/level"])] if "monitor/level" in metrics else ""


def _show(metrics: Mapping[str, float], name: str, form: str) -> str:
    return form.format(metrics[name]) if name in metrics else "-"
