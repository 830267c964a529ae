"""Run folders as runs leave them, and what the doctor makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import filelock
import pytest
import yaml
from typer.testing import CliRunner

from evenkeel.actors.carriers import WaitNotice
from evenkeel.actors.config import DeadlinesConfig, RunConfig
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record import run_folder as run_folder_module
from evenkeel.actors.record.run_folder import CHECKPOINT_FORMAT, EventKind, RunEvent, RunFolder
from evenkeel.actors.settings.resolve import with_deadlines
from evenkeel.cli import app
from evenkeel.doctor import run_doctor
from evenkeel.doctor.run_doctor import LedgerCheck, RunDiagnosis, RunState, diagnose_run, page
from evenkeel.recipe import as_recipe, load_config

RECIPE = Path(__file__).parents[3] / "recipes/nano_spell_backward.yaml"


def run_folder(path: Path, *, steps: int = 4, done: int = 2, saved: int | None = None) -> RunFolder:
    folder = RunFolder.create(path, "x")
    config = load_config(RunConfig, RECIPE, [f"steps={steps}"])
    folder.write_recipe(as_recipe(config))
    folder.write_config(config)
    lines = []
    for step in range(1, done + 1):
        totals = {"groups/trained_total": 2 * step, "groups/discarded_total": 0}
        folder.append_metrics(StepMetrics(step, {"time/step_s": 2.0, "wait/learner_share": 0.6, **totals}))
        lines += [{"step": step, "prompt_id": f"train/0/{2 * step + k}", "outcome": "trained"} for k in range(2)]
    (path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if saved is not None:
        with folder.checkpoint(saved) as checkpoint:
            (checkpoint.state / "part.json").write_text("{}")
        folder.write_event(RunEvent.now("info", f"checkpoint {folder.checkpoints()[-1].path} in 0.1 s", EventKind.SAVED))
    return folder


def test_the_folder_is_read_with_the_deadlines_that_the_run_had(tmp_path: Path) -> None:
    """Derived ones, of a large model on slow disks: by the defaults a disk would count as hanging that is only slow."""
    folder = RunFolder.create(tmp_path / "run", "x")
    config = with_deadlines(load_config(RunConfig, RECIPE), 10**12)
    folder.write_config(config)
    assert run_doctor._deadlines(folder.read_config()) == config.deadlines
    assert config.deadlines.disk_s > 10 * DeadlinesConfig().disk_s


def test_settings_that_a_resume_would_refuse_are_told(tmp_path: Path) -> None:
    """The rest of the page is there all the same."""
    folder = run_folder(tmp_path / "run", saved=1)
    path = folder.recipe_path
    path.write_text(path.read_text().replace("tokens_per_s: 5.0", "tokens_per_s: -3.0"))
    found = after(folder)
    (line,) = (number for number, text in enumerate(path.read_text().splitlines(), 1) if "tokens_per_s: -3.0" in text)
    refused = f"{path}:{line}: deadlines.tokens_per_s: not settings of this version: Input should be greater than 0"
    assert found.advice[0] == f"A resume would be refused: {refused}"
    assert (found.saved_step, found.step) == (1, 2) and "deadlines.tokens_per_s" in page(found)


def test_settings_that_contradict_each_other_are_told(tmp_path: Path) -> None:
    """Each is right by itself; a resume would be refused all the same."""
    folder = run_folder(tmp_path / "run", saved=1)
    path = folder.recipe_path
    written = yaml.safe_load(path.read_text())
    written["learner"]["batch_invariant"] = True
    folder.write_recipe(written)
    assert after(folder).refused.startswith(f"{path}: learner.batch_invariant: true with true_on_policy: false: ")


def after(folder: RunFolder) -> RunDiagnosis:
    folder.close()
    return diagnose_run(RunFolder.view(folder.path))


def test_a_run_that_was_killed_says_so_and_what_a_resume_does_again(tmp_path: Path) -> None:
    found = after(run_folder(tmp_path / "run", saved=1))
    assert found.state is RunState.VANISHED and found.reason.startswith("its last event is of ")
    assert found.advice[0] == f"evenkeel train --resume {tmp_path / 'run'} goes on from step 1 and does 1 of its steps again."
    assert any("The learner waits 60% of a step" in sentence for sentence in found.advice)
    assert found.books == LedgerCheck(True, "balanced: 4 trained, each prompt once")


def test_a_checkpoint_that_is_cut_does_not_count(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", saved=1)
    with folder.checkpoint(2) as checkpoint:
        (checkpoint.state / "part.json").write_text("{}")
    (folder.checkpoints()[-1].state / "part.json").write_text("")
    found = after(folder)
    assert found.saved_step == 1 and len(found.damaged) == 1 and "part.json" in found.damaged[0]


@pytest.mark.parametrize(
    ("saved", "advice"),
    [
        (1, "evenkeel train --resume FOLDER goes on from step 1 and does 1 of its steps again."),
        (None, "Start it again: there is no checkpoint to go on from."),
    ],
)
def test_a_complete_run_whose_last_checkpoint_is_cut_is_told_what_a_resume_does(tmp_path: Path, saved: int | None, advice: str) -> None:
    folder = run_folder(tmp_path / "run", steps=2, saved=saved)
    with folder.checkpoint(2) as checkpoint:
        (checkpoint.state / "part.json").write_text("{}")
    (folder.checkpoints()[-1].state / "part.json").write_text("")
    found = after(folder)
    assert found.state is RunState.COMPLETE and found.advice[0] == advice.replace("FOLDER", str(folder.path))


@pytest.mark.parametrize(("format_", "whose"), [(CHECKPOINT_FORMAT - 1, "an earlier"), (CHECKPOINT_FORMAT + 1, "a later")])
def test_a_run_whose_checkpoints_another_version_wrote_is_not_told_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: int, whose: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_folder_module, "CHECKPOINT_FORMAT", format_)
        folder = run_folder(tmp_path / "run", saved=1)
    found = after(folder)
    assert f"written by {whose} version of evenkeel (its format is {format_}" in found.advice[0] and "--resume" not in found.advice[0]


def test_running_complete_failed_and_stopped(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    assert diagnose_run(RunFolder.view(folder.path)).state is RunState.RUNNING, "this process holds its lock"
    assert after(run_folder(tmp_path / "b", steps=2)).state is RunState.COMPLETE
    failed = run_folder(tmp_path / "c", steps=2)
    failed.event("error", "weight sync v2 -> rollout 0: not done in 120 s")
    found = after(failed)
    assert found.state is RunState.FAILED and found.reason == "weight sync v2 -> rollout 0: not done in 120 s"
    stopped = run_folder(tmp_path / "d")
    stopped.write_event(RunEvent.now("warning", "asked to end (SIGTERM)", EventKind.ENDING))
    stopped.write_event(RunEvent.now("info", "saved x", EventKind.SAVED))
    found = after(stopped)
    assert (found.state, found.reason) == (RunState.STOPPED, "asked to end (SIGTERM)")
    at_once = run_folder(tmp_path / "e")
    at_once.write_event(RunEvent.now("error", "over, by Ctrl-C", EventKind.STOPPED))
    assert after(at_once).state is RunState.STOPPED


@pytest.mark.parametrize(
    ("saved", "evaluated", "by", "state", "advice"),
    [
        (2, True, EventKind.STOPPED, RunState.COMPLETE, "Nothing. To train on, resume it with more steps: RESUME steps=N"),
        (2, False, EventKind.STOPPED, RunState.STOPPED, "RESUME makes what is left: the evaluation after training and its report."),
        (2, False, None, RunState.COMPLETE, "RESUME makes what is left: the evaluation after training and its report."),
        (2, True, EventKind.NONE, RunState.FAILED, "Nothing. To train on, resume it with more steps: RESUME steps=N"),
        (1, False, EventKind.STOPPED, RunState.STOPPED, "RESUME goes on from step 1 and does 1 of its steps again."),
        (1, False, None, RunState.VANISHED, "RESUME goes on from step 1 and does 1 of its steps again."),
    ],
)
def test_what_is_left_of_a_run_at_its_last_step(
    tmp_path: Path, saved: int, evaluated: bool, by: EventKind | None, state: RunState, advice: str
) -> None:
    """A signal that came after all was done changes nothing; one in the last evaluation leaves that for a resume."""
    folder = run_folder(tmp_path / "run", steps=2, saved=saved)
    if evaluated:
        folder.append_evaluation(StepMetrics(2))
        folder.write_text("report.html", "a page")
    if by is not None:
        folder.write_event(RunEvent.now("error", "no more of it", by))
    found = after(folder)
    assert (found.state, found.advice[0]) == (state, advice.replace("RESUME", f"evenkeel train --resume {folder.path}"))


@pytest.mark.parametrize(("saved", "place"), [(None, 0), (1, 1)])
def test_a_run_that_failed_is_not_told_that_it_need_only_be_started_again(tmp_path: Path, saved: int | None, place: int) -> None:
    folder = run_folder(tmp_path / "run", saved=saved)
    folder.event("error", "rollout.reward: it raised ZeroDivisionError")
    found = after(folder)
    assert found.state is RunState.FAILED and "mend" in found.advice[place].lower() and "it would end there again" in found.advice[place]


def test_what_ended_a_run_before_it_was_resumed_is_over(tmp_path: Path) -> None:
    """Stopped by a signal, resumed, and killed: it was not stopped."""
    folder = run_folder(tmp_path / "a")
    folder.write_event(RunEvent.now("warning", "asked to end (SIGTERM)", EventKind.ENDING))
    folder.write_event(RunEvent.now("info", "saved x", EventKind.SAVED))
    folder.write_event(RunEvent.now("info", "on it goes", EventKind.RESUMED))
    folder.write_event(RunEvent.now("info", "saved y", EventKind.SAVED))
    assert after(folder).state is RunState.VANISHED


def test_a_checkpoint_that_was_given_up_and_an_alarm_that_ends_nothing_are_no_end(tmp_path: Path) -> None:
    """A killed run is told from one that was stopped by what its events are, not by how they begin. Who was asked to end, and did, before
    there was a checkpoint, did not run out of memory."""
    given_up = run_folder(tmp_path / "a")
    given_up.write_event(RunEvent.now("warning", "interrupted (SIGTERM): ending with a checkpoint", EventKind.ENDING))
    given_up.event("warning", "checkpoint under way: given up (checkpoint under way: not done in 60 s)")
    found = after(given_up)
    assert found.state is RunState.STOPPED and found.reason.endswith("ending with a checkpoint. It ended without that checkpoint")
    assert found.advice[0].startswith("Start it again") and not any("memory" in text for text in found.advice)
    alarmed = run_folder(tmp_path / "b", saved=1)
    alarmed.event("alarm", "step 1: k3_kl = 0.008, 8.0 times the level of steps 3 to 22")
    alarmed.write_event(RunEvent.now("info", "checkpoint x in 0.1 s", EventKind.SAVED))
    assert after(alarmed).state is RunState.VANISHED


def test_an_event_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    written = [RunEvent.now("info", f"{kind} text", kind) for kind in EventKind]
    for event in written:
        folder.write_event(event)
    assert folder.read_events() == written
    assert folder.events_path.read_text().splitlines()[1].split()[1:] == ["info", "[ending]", "ending", "text"]


def test_a_wait_s_notice_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Whatever the names in it; a line that was cut is an event all the same."""
    folder = run_folder(tmp_path / "run")
    what = "stacks (of v3) s for node 7 <- [a] \u2028 (b)"
    written = [RunEvent.now("info", WaitNotice(what, 30, "1 (of 2) missing")), RunEvent.now("warning", WaitNotice(what, 60))]
    for event in written:
        folder.write_event(event)
    assert folder.read_events() == written and written[0].text == f"waiting 30 s for {' '.join(what.split())} (1 (of 2) missing)"
    lines = folder.events_path.read_text().splitlines()
    folder.events_path.write_text("\n".join([*lines, lines[-1][:-5]]))
    cut = folder.read_events()[-1]
    assert (cut.level, cut.notice) == ("warning", None) and cut.text.startswith('[waiting] {"what": "stacks ')
    folder.events_path.write_text(lines[-1].partition("{")[0] + "[" * 100_000)
    assert folder.read_events()[0].notice is None


NOTICES = [
    *(("batch of version 5 <- correction service", seconds, "2 of 8 groups (1 late)") for seconds in (30, 60, 90)),
    ("weight sync v5 -> rollout 1", 30, ""),
]
"""(what, seconds, detail) of those that a run has written."""


def write_notices(folder: RunFolder) -> None:
    for what, seconds, detail in NOTICES:
        folder.write_event(RunEvent.now("warning", WaitNotice(what, seconds, detail)))


def test_waits_by_what_was_waited_for_and_warnings_by_kind(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    write_notices(folder)
    for step in (3, 4):
        folder.event("warning", f"step {step}: 7 answers could not be scored")
    found = after(folder)
    assert [(wait.what, wait.seconds, wait.notices, wait.detail) for wait in found.waits] == [
        ("batch of version 5 <- correction service", 90, 3, "2 of 8 groups (1 late)"),
        ("weight sync v5 -> rollout 1", 30, 1, ""),
    ]
    assert [(trouble.count, trouble.last.text) for trouble in found.troubles] == [(2, "step 4: 7 answers could not be scored")]
    assert "It waited 90 s for batch of version 5 <- correction service: look at that part first." in found.advice
    said = CliRunner().invoke(app, ["doctor", str(folder.path)]).stdout.splitlines()
    assert "     90 s  batch of version 5 <- correction service (2 of 8 groups (1 late))" in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"step": 2, "prompt_id": "train/0/2", "outcome": "trained"}, "1 prompts stand in the ledger twice, train/0/2 among them"),
        ({"step": 2, "prompt_id": "train/0/9", "outcome": "trained"}, "the last step says 4 groups trained, the ledger has 5"),
        ({"step": 2, "prompt_id": "train/0/9", "outcome": "no usable answer"}, "the last step says 0 groups discarded, the ledger has 1"),
    ],
)
def test_books_that_don_t_balance(tmp_path: Path, line: dict[str, object], says: str) -> None:
    folder = run_folder(tmp_path / "run")
    with (folder.path / "ledger.jsonl").open("a") as ledger:
        ledger.write(json.dumps(line) + "\n" + '{"step": 2, "prom')
    found = after(folder)
    assert says in found.books.sentence and not found.books.is_balanced
    assert any("The ledger is the proof" in sentence for sentence in found.advice)


@pytest.mark.parametrize(
    ("kept", "books"),
    [
        (3, "balanced: 3 rewards all alike, 4 trained, each prompt once"),
        (2, "NOT balanced: the last step says 3 groups discarded, the ledger has 2 (2 rewards all alike, 4 trained)"),
        (0, "NOT balanced: the last step says 3 groups discarded, the ledger has 0 (4 trained)"),
    ],
)
def test_a_discarded_prompt_whose_line_is_missing_is_an_imbalance(tmp_path: Path, kept: int, books: str) -> None:
    folder = run_folder(tmp_path / "run")
    folder.append_metrics(StepMetrics(3, {"groups/trained_total": 4, "groups/discarded_total": 3}))
    lines = [{"step": 3, "prompt_id": f"train/0/{9 + k}", "outcome": "rewards all alike"} for k in range(kept)]
    with (folder.path / "ledger.jsonl").open("a") as ledger:
        ledger.writelines(json.dumps(line) + "\n" for line in lines)
    found = after(folder)
    assert (found.books.sentence, found.books.is_balanced) == (books, kept == 3)


@pytest.mark.parametrize(
    ("kept", "is_told_twice", "is_balanced", "says"),
    [
        (2, False, True, "balanced: 4 trained, each prompt once; ledger.damaged.jsonl, set aside as damaged by a resume, counted"),
        (1, False, True, "balanced from step 2 on, with 2 trained and 0 discarded; 1 of 2 trained and 0 of 0 discarded before can be read"),
        (2, True, False, "NOT balanced: 1 prompts stand in the ledger twice, train/0/2 among them (5 trained)"),
    ],
)
def test_a_ledger_that_a_resume_has_set_aside_is_no_imbalance(
    tmp_path: Path, kept: int, is_told_twice: bool, is_balanced: bool, says: str
) -> None:
    """Two groups in each of two steps; it was damaged at step 1, and lines of steps that were done again stay in it."""
    folder = run_folder(tmp_path / "run")
    path = folder.path / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    again = [line.replace("train/0/4", "train/0/6") for line in lines[2:]]
    double = [lines[0]] if is_told_twice else []
    (folder.path / "ledger.damaged.jsonl").write_text("".join([*lines[:kept], '{"ste\n', *again]))
    path.write_text("".join([*lines[2:], *(line.replace('"step": 1', '"step": 2') for line in double)]))
    found = after(folder)
    assert found.books.sentence.startswith(says) and found.books.is_balanced is is_balanced


def test_the_page_begins_with_how_it_ended_and_has_a_section_for_what_there_is(tmp_path: Path) -> None:
    text = page(after(run_folder(tmp_path / "run")))
    assert text.splitlines()[0] == f"{tmp_path / 'run'} ended, and nothing says why, after step 2 of 4 (no checkpoint)"
    assert "\nWhat to do\n" in text and "\nBooks\n" in text and "Longest waits" not in text and "Last events" not in text


def test_looking_changes_nothing_and_takes_no_lock(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", saved=2)
    folder.close()
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*") if path.is_file()}
    diagnose_run(RunFolder.view(folder.path))
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*") if path.is_file()} == before
    lock = filelock.FileLock(folder.path / ".owner.lock")
    lock.acquire(timeout=0)
    lock.release()
