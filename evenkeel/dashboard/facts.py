"""What a run's numbers say in words: rows of tables, for people."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from evenkeel.actors.metrics.catalogue import CATALOGUE
from evenkeel.actors.metrics.step_metrics import (
    StepMetrics,
    accuracy,
    accuracy_by_task,
    accuracy_of_what,
    pass_at_most,
    shown,
    with_interval,
)
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.terminal import duration
from evenkeel.correction.diagnostics.quantities import Unit
from evenkeel.correction.early_warning.monitor import ReferenceLevel
from evenkeel.dashboard.columns import StepColumns

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")
_MOST_CLIPPED = 50
_MEDIAN, _MEAN, _LARGEST, _LAST = (", median", statistics.median), (", mean", statistics.fmean), (", largest", max), ("", itemgetter(-1))
# Rows of the summary: the metric; and what is shown of its values in all steps, with words for that which follow the metric's label.
SUMMARY: tuple[tuple[str, tuple[str, Callable[[Sequence[float]], float]]], ...] = (
    ("reward/mean", (", last step", itemgetter(-1))),
    ("reward/accuracy", (", last step", itemgetter(-1))),
    ("time/step_s", _MEDIAN),
    ("throughput/rollout_tokens_per_s", _MEDIAN),
    ("throughput/learner_tokens_per_s", _MEDIAN),
    ("wait/rollout_share", _MEDIAN),
    ("wait/learner_share", _MEDIAN),
    ("length/truncated_share", _MEDIAN),
    ("groups/no_gradient_share", _MEDIAN),
    ("mismatch/k3", _LARGEST),
    ("mismatch/max_abs_log_ratio", _LARGEST),
    ("mismatch_and_staleness/k3", _LARGEST),
    ("mismatch_and_staleness/max_abs_log_ratio", _LARGEST),
    ("sync/probe_max_abs_difference", _LARGEST),
    ("staleness/max", ("", max)),
    ("staleness/mixed_version_share", _MEAN),
    ("groups/trained_total", _LAST),
    ("groups/discarded_total", _LAST),
    ("reward/exceptions_total", _LAST),
    ("reward/timeouts_total", _LAST),
    ("steps/skipped_total", _LAST),
    ("steps/overflowed_total", _LAST),
)
_OF_ANSWERS = ("held_out/reward", "held_out/truncated_share")
ELAPSED = "time/elapsed_s"


def summary_rows(
    steps: StepColumns, evaluations: Sequence[StepMetrics], config: dict[str, Any], usual: ReferenceLevel | None = None
) -> list[tuple[str, str]]:
    """Rows (what, value) of the table at the head of the page; a value that isn't known has no row. Args: usual: mismatch of such runs."""
    rows: list[tuple[str, str]] = []
    for title, metrics in first_and_last(evaluations):
        measured = accuracy(metrics) + accuracy_of_what(metrics)
        rows.append((f"held-out accuracy {title}", f"{measured} (95 % Wilson), after {metrics.step} steps"))
        rows += [(f"held-out accuracy of {name} {title}", text) for name, text in accuracy_by_task(metrics).items()]
        if (best := pass_at_most(metrics)) is not None:
            rows.append((f"held-out pass@{best[0]} {title}", with_interval(*best[1:])))
        rows += [(f"{CATALOGUE[name].label} {title}", shown(metrics, name)) for name in _OF_ANSWERS if name in metrics]
    if (last := steps.last) is None:
        return rows
    if ELAPSED in last.finite():
        rows.append(("wall time", duration(last[ELAPSED])))
    rows.append(("steps", f"{last.step} of {config['steps']}" if "steps" in config else str(last.step)))
    for name, (which, over_steps) in SUMMARY:
        if values := steps.values(name):
            text = CATALOGUE[name].text(over_steps(values))
            if name == "mismatch/k3" and usual is not None:
                text += f" (usual: up to {CATALOGUE[name].number(usual.high)}, {usual.text})"
            rows.append((CATALOGUE[name].label + which, text))
    return rows


def worker_rows(steps: StepColumns) -> list[tuple[str, str, str, str, str]]:
    """(name, first and last step, groups, tokens, time waited) of each worker, if there were two or more."""
    if len(steps.workers) < 2:
        return []
    total = sum(worker.tokens for worker in steps.workers.values())
    return [
        (
            name,
            f"{worker.first_step} to {worker.last_step}",
            CATALOGUE["worker/groups/"].number(worker.groups),
            CATALOGUE["worker/tokens/"].number(worker.tokens) + (f" ({Unit.SHARE.number(worker.tokens / total)})" if total else ""),
            CATALOGUE["worker/wait_share/"].number(worker.waits / worker.steps_with_wait) if worker.steps_with_wait else "",
        )
        for name, worker in steps.workers.items()
    ]


def clipped_rows(folder: RunFolder, say: Callable[[str], object] = lambda _: None) -> list[tuple[str, str]]:
    """(which tokens, the most frequent ones) of what the objective clipped over the run, by the sign of the advantage.

    Args: say: is told of a tokenizer that can't be read.
    """
    counted = {sign: counts for sign, counts in folder.read_clipped_tokens().items() if counts}
    known = readable(folder.model_path / "tokenizer.json", tokenizer_of, say) if counted else None

    def word(token: int) -> str:
        """The token's text; its id if the run has no tokenizer of the usual form."""
        return str(token) if known is None else repr(known.decode([token], skip_special_tokens=False))

    return [
        (f"{sign} advantage", ", ".join(f"{word(token)} {count:,}" for token, count in counts.most_common(_MOST_CLIPPED)))
        for sign, counts in counted.items()
    ]


def slowest_rows(folder: RunFolder) -> list[tuple[str, ...]]:
    """(prompt, seconds of its rewards, seconds of its answers, their tokens, answers without a reward, worker)."""
    return [
        (
            one.prompt_id,
            CATALOGUE["time/reward_s"].text(one.reward_s),
            CATALOGUE["time/generate_s"].text(one.generate_s),
            CATALOGUE["worker/tokens/"].number(one.response_tokens),
            str(one.unscored),
            one.worker,
        )
        for one in folder.read_slowest()
    ]


def tokenizer_of(path: Path) -> Tokenizer:
    """A tokenizer.json, read once as long as it doesn't change. Raises: OSError; for a damaged one what tokenizers raises, which has no
    errors of its own."""
    return _tokenizer(str(path), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _tokenizer(path: str, changed: int) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def readable(path: Path, load: Callable[[Path], T], say: Callable[[str], object]) -> T | None:
    """What a file has for the page; None if it isn't there, or is damaged, which is said."""
    if not path.is_file():
        return None
    try:
        return load(path)
    except Exception as error:  # tokenizers has none of its own, numpy, zipfile and zlib have one each
        say(f"{path} can't be read, and what the page would have of it is left out: {str(error) or type(error).__name__}")
        return None


def status(steps: StepColumns, config: dict[str, Any]) -> str:
    if (last := steps.last) is None:
        return "No step is finished yet."
    total = config.get("steps")
    if total is not None and last.step < int(total):
        return f"Stands at step {last.step} of {total}."
    return f"Finished after {last.step} steps."


def headline(evaluations: Sequence[StepMetrics]) -> dict[str, str] | None:
    """Accuracy before and after, for the head of the page; None before the second evaluation."""
    pair = dict(first_and_last(evaluations))
    if len(pair) < 2:
        return None
    before, after = pair["before"], pair["after"]
    gain = after["held_out/accuracy"] - before["held_out/accuracy"]
    shown_gain = ("+" if gain >= 0 else "") + CATALOGUE["held_out/accuracy"].number(gain)
    told = {when: accuracy(metrics) for when, metrics in pair.items()}
    return {**told, **{f"{when}_on": accuracy_of_what(metrics).strip() for when, metrics in pair.items()}, "gain": shown_gain}


def first_and_last(evaluations: Sequence[StepMetrics]) -> list[tuple[str, StepMetrics]]:
    known = [metrics for metrics in evaluations if "held_out/accuracy" in metrics]
    return list(zip(("before", "after"), [known[0], known[-1]] if len(known) > 1 else known, strict=False))
