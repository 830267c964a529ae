"""The live panel on a terminal, plain lines elsewhere, and the panel as a picture."""

from __future__ import annotations

import io
import logging
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from evenkeel.actors.metrics.catalogue import SKIPPED
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.terminal import TerminalView, duration, sparkline, terminal_svg
from evenkeel.correction.early_warning.monitor import usual_level
from evenkeel.learner.results import SkipReason

STEP = StepMetrics(
    3,
    {
        "reward/mean": 0.75,
        "time/step_s": 2.0,
        "throughput/rollout_tokens_per_s": 1234.0,
        "throughput/learner_tokens_per_s": 5678.0,
        "wait/rollout_share": 0.12,
        "wait/learner_share": 0.34,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "mismatch/k3": 3e-13,
        "rejection/rejected_share": 0.01,
        "weight_version": 3,
    },
)
HELD_OUT = StepMetrics(
    0,
    {
        "held_out/accuracy": 0.5,
        "held_out/wilson_low": 0.46,
        "held_out/wilson_high": 0.54,
        "held_out/problems": 512,
        "held_out/weight_version": 0,
    },
)


def watch(*, terminal: bool, width: int = 100) -> tuple[TerminalView, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system="standard" if terminal else None)
    return TerminalView(10, "a run", console=console), out


def test_plain_lines_where_there_is_no_terminal() -> None:
    view, out = watch(terminal=False)
    view.phase("starting engines 1/2")
    view.phase("starting engines 1/2")
    view.event("warning", "a reward [red]raised[/red]")
    view.step(STEP)
    view.evaluation(HELD_OUT)
    view.close("the end")
    assert out.getvalue().splitlines() == [
        "a run",
        "... starting engines 1/2",
        "warning: a reward [red]raised[/red]",
        "step  3/10  reward 0.750  step time 2.00 s  rollout speed 1,234 tokens/s  learner speed 5,678 tokens/s  rollout waits 12%  "
        "learner waits 34%  mean staleness 0.50  mismatch k3 KL 3e-13 nats  rejected 1.00%",
        "held-out accuracy 0.500 [0.460, 0.540] on 512 problems, weight version 0",
        "the end",
    ]


def test_a_warning_of_a_logger_stands_above_the_live_panel() -> None:
    """The panel is drawn over what it drew before: a line that is written past it leaves half of it behind."""
    from evenkeel.cli import ToStandardError

    handler, record = ToStandardError(), logging.makeLogRecord({"msg": "waiting for an engine"})
    view, out = watch(terminal=True)
    before = out.getvalue()
    handler.emit(record)
    view.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()[len(before) :])
    assert "waiting for an engine\n╭─ a run" in text.replace("\r", ""), "the warning, and the whole panel below it"


def test_an_evaluation_says_reward_cut_answers_and_turns_where_they_say_more_than_the_accuracy() -> None:
    view, out = watch(terminal=False)
    for reward, cut, turns in ((0.5, 0.0, 1.0), (0.625, 0.4, 1.5)):
        numbers = {"held_out/reward": reward, "held_out/truncated_share": cut, "held_out/turns": turns}
        view.evaluation(StepMetrics(0, {**HELD_OUT, **numbers}))
    plain, more = out.getvalue().splitlines()[1:]
    assert plain == "held-out accuracy 0.500 [0.460, 0.540] on 512 problems, weight version 0"
    assert more == "held-out accuracy 0.500 [0.460, 0.540] on 512 problems, reward 0.625, 40% cut, 1.50 turns, weight version 0"


@pytest.mark.parametrize("terminal", [False, True])
def test_held_out_answers_without_a_score_are_shown_where_there_are_any(terminal: bool) -> None:
    none, some = (dict(HELD_OUT) | {"held_out/unscored": count} for count in (0, 170))
    nothing = {"held_out/problems": 512, "held_out/unscored": 512}
    view, out = watch(terminal=terminal)
    for numbers, shown in ((none, None), (some, "170 of them not scored"), (nothing, "accuracy -")):
        before = len(out.getvalue())
        view.evaluation(StepMetrics(0, numbers))
        said = out.getvalue()[before:]
        assert (shown is None and "not scored" not in said) or (shown is not None and shown in said)
    view.close()


def test_several_answers_to_a_question_are_shown_with_pass_at_the_largest_k() -> None:
    """Those of a file from before there were several have neither."""
    numbers = dict(HELD_OUT) | {"held_out/samples": 16}
    for k, share in ((2, 0.6), (8, 0.7), (16, 0.8)):
        numbers |= {f"held_out/pass_at/{k}": share, f"held_out/pass_at_low/{k}": share - 0.05, f"held_out/pass_at_high/{k}": share + 0.05}
    view, out = watch(terminal=False)
    view.evaluation(StepMetrics(0, numbers))
    line = "held-out accuracy 0.500 [0.460, 0.540] on 512 problems x 16 answers, pass@16 0.800 [0.750, 0.850], weight version 0"
    assert line in out.getvalue()
    panel, screen = watch(terminal=True)
    panel.evaluation(StepMetrics(0, numbers))
    panel.close()
    assert "pass@16 0.800" in screen.getvalue()


def test_several_workers_have_a_line_of_their_own() -> None:
    """Few by name; of many the range, so that the line stays one."""
    one = {"worker/tokens/0": 512, "worker/wait_share/0": 0.03, "worker/weight_version/0": 5}
    two = one | {"worker/tokens/1": 1498, "worker/wait_share/1": 0.25}
    many = {f"worker/tokens/{i}": 100 + i for i in range(16)} | {f"worker/weight_version/{i}": i // 8 for i in range(16)}
    view, out = watch(terminal=False)
    for step, workers in enumerate((one, two, many), start=1):
        view.step(StepMetrics(step, workers))
    assert [line for line in out.getvalue().splitlines() if "workers" in line] == [
        "    workers  0: 512 tokens, waits 3%, v5  1: 1,498 tokens, waits 25%",
        "    workers  16: 100 to 115 tokens, v0 to v1",
    ]
    panel, screen = watch(terminal=True)
    panel.step(StepMetrics(1, two))
    panel.close()
    assert "0: 512 tokens, waits 3%, v5  1: 1,498 tokens, waits 25%" in screen.getvalue()


def test_a_step_without_an_update_says_why() -> None:
    """Four batches left the weights alone: one was rejected to the last token, one had an infinity, one overflowed in float16, and one had
    minibatches of two kinds. Of the last an update was made."""
    view, out = watch(terminal=False)
    nothing, fault, overflow = SkipReason.NO_GRADIENT, SkipReason.NOT_FINITE, SkipReason.OVERFLOW
    for skipped, updates in (((nothing,), 0), ((fault,), 0), ((overflow,), 0), ((nothing, fault, nothing), 0), ((nothing,), 1)):
        told = {SKIPPED + reason: skipped.count(reason) for reason in SkipReason}
        view.step(StepMetrics(3, {**told, "learner/optimizer_steps": updates, "learner/loss_scale": 32768.0}))
    assert out.getvalue().splitlines()[1:] == [
        "step  3/10  no update: no gradient",
        "step  3/10  no update: loss or gradient not finite",
        "step  3/10  no update: gradient overflowed, loss scale 32,768",
        "step  3/10  no update: loss or gradient not finite, no gradient",
        "step  3/10  ",
    ]


def test_a_warning_stays_in_sight_while_it_lasts() -> None:
    """As an event once, and then in the line of every step until the symptom is gone."""
    view, out = watch(terminal=False)
    view.event("alarm", "step 3: k3_kl = 0.008: lower max_staleness")
    for step, level in ((3, 2), (4, 1), (5, 0)):
        view.step(StepMetrics(step, {"reward/mean": 0.5, "monitor/level": level}))
    assert out.getvalue().splitlines()[1:] == [
        "alarm: step 3: k3_kl = 0.008: lower max_staleness",
        "step  3/10  reward 0.500  early warning alarm",
        "step  4/10  reward 0.500  early warning watch",
        "step  5/10  reward 0.500",
    ]


@pytest.mark.parametrize(("level", "shown"), [(0, "ok"), (1, "watch"), (2, "alarm")])
def test_the_panel_has_the_level_in_its_colour(level: int, shown: str) -> None:
    view, out = watch(terminal=True)
    view.step(StepMetrics(3, {"monitor/level": level}))
    view.close()
    row = next(line for line in out.getvalue().splitlines() if "early warning" in line)
    colour = {"ok": "", "watch": "\x1b[33m", "alarm": "\x1b[1;31m"}[shown]  # ANSI: yellow; bold red
    assert f"{colour}{shown}" in row


def test_the_panel_shows_what_a_person_wants_to_know() -> None:
    view, out = watch(terminal=True)
    view.evaluation(HELD_OUT)
    view.step(STEP)
    view.phase("waiting for rollout worker 0")
    view.close("the end")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    for shown in (
        "3/10",
        "30 %",
        "about 14 s left",
        "0.750",
        "0.500 [0.460, 0.540]",
        "2.00 s",
        "1,234 tokens/s, waits 12%",
        "5,678 tokens/s, waits 34%",
        "mean 0.50, max 1",
        "3e-13 nats",
        "1.00% of tokens",
        "the end",
    ):
        assert shown in text, shown


def test_what_is_not_known_of_a_step_is_a_dash_without_words() -> None:
    view, out = watch(terminal=True)
    view.step(StepMetrics(3, {"reward/mean": 0.5}))
    view.close()
    assert "of tokens" not in out.getvalue() and "version" not in out.getvalue()


def test_the_cursor_is_given_back() -> None:
    view, out = watch(terminal=True)
    view.close()
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")


def test_absent_numbers_are_dashes() -> None:
    view, out = watch(terminal=True)
    view.step(StepMetrics(1))
    view.close()
    assert "1/10" in out.getvalue() and "nan" not in out.getvalue()


def test_sparkline_is_means_from_the_smallest_to_the_largest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], width=2) == "▁█"
    assert sparkline([5, 5], width=8) == "▁▁" and sparkline([], width=8) == ""


def test_at_80_columns_nothing_is_cut_off() -> None:
    """As wide as a terminal is if nobody has asked for more; with the longest numbers that a run of the nano recipe shows."""
    view, out = watch(terminal=True, width=80)
    view.evaluation(HELD_OUT)
    stale = {"staleness/mean": 1.25, "staleness/mixed_version_share": 0.125, "learner/entropy": 1.05}
    for step in range(1, 41):
        view.step({**STEP, **stale, "step": step, "reward/mean": step / 40})
    view.evaluation({**HELD_OUT, "held_out/accuracy": 0.912, "held_out/wilson_low": 0.884, "held_out/wilson_high": 0.934})
    view.close()
    panel = out.getvalue().rpartition("a run")[2]
    assert "0.500 → 0.912 [0.884, 0.934]" in panel and "mean 1.25, max 1, mixed 12.5%" in panel and "…" not in panel
    assert max(map(len, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", panel).splitlines())) == 80


def test_what_matters_with_a_pretrained_model_is_seen_at_80_columns() -> None:
    """Answers cut, groups that teach nothing, accuracy beside the reward; mismatch of the last step that has one, beside what is usual; and
    the whole name of the run folder."""
    out, folder = io.StringIO(), "/a/disk/of/somebody/with/long/names/runs/smollm2-sums-of-two-numbers-20261128-223106"
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    view = TerminalView(10, "smollm2-sums: HuggingFaceTB/SmolLM2-135M-Instruct", folder=folder, console=console)
    view.compare_with(usual_level(None, "float32"))
    of_answers = {"reward/accuracy": 0.125, "length/trained_tokens": 17.25, "length/truncated_share": 0.52}
    of_groups = {"groups/no_gradient_share": 0.625, "groups/all_correct": 2, "groups/all_wrong": 3}
    known = {"mismatch/k3": 4.3e-11, "mismatch_and_staleness/k3": 1.4e-05, "learner/entropy": 1.05, "monitor/level": 0}
    view.step({**STEP, **known, **of_answers, **of_groups, "step": 3})
    view.step({**{name: value for name, value in STEP.items() if name != "mismatch/k3"}, **of_answers, **of_groups, "step": 4})
    view.close()
    panel = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).rpartition("smollm2-sums: Hugging")[2]
    for shown in (
        "accuracy      0.125",
        "17 tokens, 52% cut",
        "62% without gradient, 2 all correct, 3 all wrong",
        "k3 KL 4.3e-11 nats at step 3; usual: up to 3e-10 ",
    ):
        assert shown in panel, panel
    assert folder in re.sub(r"[│\s]", "", panel) and "…" not in panel


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")])
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_picture_stands_alone(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "x") as folder:
        folder.write_text("config.yaml", "name: nano\nsteps: 10\n")
        folder.append_metrics(STEP)
        folder.append_evaluation(HELD_OUT)
        picture = terminal_svg(folder)
    ElementTree.fromstring(picture)
    assert "0.750" in picture and "nano" in picture.replace("&#160;", " ")
    assert set(re.findall(r"https?://[^\s\"]+", picture)) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}  # rich's comment
