"""A start that failed: said once, and its folder can be started and resumed. Ray's start is what fails here; nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.cli import main
from evenkeel.correction.errors import DeadlineExceeded, EngineError
from evenkeel.doctor.run_doctor import RunState, diagnose_run
from evenkeel.recipe import load_config
from tests.e2e.launch import RECIPE

REASON = "Ray did not start"


class BrokenCluster:
    def __init__(self, config: Any) -> None:
        pass

    def __enter__(self) -> None:
        raise EngineError(REASON)

    def __exit__(self, *error: object) -> None:
        raise AssertionError("never entered")


@pytest.fixture
def recipe(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(RECIPE.parent)
    monkeypatch.setattr("evenkeel.training.Cluster", BrokenCluster)
    path = tmp_path / "recipe.yaml"
    text = RECIPE.read_text().replace("set-by-the-test", str(model)) + f"run_dir: {tmp_path / 'run'}\n"
    path.write_text(text.replace('{kind: function, path: "e2e_reward:vowels", processes: 1}', "{kind: reasoning_gym}"))
    return path


def fails(*words: str) -> str:
    """The last words of a command that ends with an error."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr("sys.argv", ["evenkeel", *words])
        main()
    return str(caught.value.code)


def test_a_failed_start_can_be_started_again_and_resumed(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command gets as far as the first did, and says what it found; none sends to another."""
    run = tmp_path / "run"
    assert fails("train", str(recipe)) == f"evenkeel: {REASON}"
    assert "used anew" not in capsys.readouterr().out
    assert fails("train", str(recipe), "steps=7") == f"evenkeel: {REASON}"
    assert f"{run} held what a start that failed had left, without a step or a checkpoint: it is used anew" in capsys.readouterr().out
    assert fails("train", "--resume", str(run)) == f"evenkeel: {REASON}"
    assert f"{run} has no checkpoint: starting from step 0 with its recipe.yaml" in capsys.readouterr().out
    assert RunFolder.view(run).read_config()["steps"] == 7
    errors = [event.text for event in RunFolder.view(run).read_events() if event.level == "error"]
    assert errors == [REASON] * 3, "the events of all three are kept"


def test_a_run_without_a_checkpoint_is_resumed_from_step_0(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has numbers, so a new run in its folder is refused; resuming it begins again, and loses no line."""
    run = tmp_path / "run"
    fails("train", str(recipe))
    with RunFolder.open(run) as folder:
        folder.append_evaluation(StepMetrics(0, {"held_out/accuracy": 0.5}))
        folder.append_metrics(StepMetrics(1, {"reward/mean": 0.5}))
    assert f"holds a run already, and a new run would mix with it. Go on with it (--resume {run})" in fails("train", str(recipe))
    capsys.readouterr()
    assert fails("train", "--resume", str(run)) == f"evenkeel: {REASON}"
    assert "starting from step 0 with its recipe.yaml; 2 lines of the steps before went to rewound.jsonl" in capsys.readouterr().out
    assert len((run / "rewound.jsonl").read_text().splitlines()) == 2 and RunFolder.view(run).read_metrics() == []


def test_an_error_is_printed_once(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By whoever ends the command; the run's own view leaves it to that."""
    said = fails("train", str(recipe))
    printed = capsys.readouterr()
    assert (printed.out + printed.err + said).count(REASON) == 1


def test_an_error_after_a_checkpoint_names_the_command_that_goes_on(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    fails("train", str(recipe))

    class BreaksLater(BrokenCluster):
        def __enter__(self) -> None:
            with RunFolder.view(run).checkpoint(3):
                pass
            raise EngineError(REASON)

    monkeypatch.setattr("evenkeel.training.Cluster", BreaksLater)
    assert fails("train", "--resume", str(run)) == f"evenkeel: {REASON}\nto go on: evenkeel train --resume {run}"


def test_a_wait_that_ends_a_run_is_among_those_that_the_doctor_names(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it has given notice."""
    what = "start of Ray <- this machine"
    said = f"{what}: not done in 75 s; the deadline is set under deadlines"

    class Late(BrokenCluster):
        def __enter__(self) -> None:
            raise DeadlineExceeded(f"{what}: not done in 75 s", what=what, seconds=75.2, setting="deadlines")

    monkeypatch.setattr("evenkeel.training.Cluster", Late)
    assert fails("train", str(recipe)) == f"evenkeel: {said}"
    found = diagnose_run(RunFolder.view(tmp_path / "run"))
    assert [(wait.what, wait.seconds) for wait in found.waits] == [(what, 75)]
    assert found.state is RunState.FAILED and found.reason == said
    assert f"It waited 75 s for {what}: look at that part first." in found.advice


def test_an_address_is_tried_before_a_folder_is_made(recipe: Path, tmp_path: Path) -> None:
    assert "no Ray cluster answers at" in fails("train", str(recipe), "ray.address=127.0.0.1:1")
    assert not (tmp_path / "run").exists()


def test_the_log_of_a_run_is_its_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also on the terminal, where a line past the live panel would tear it: nothing goes to standard error."""
    import logging

    from evenkeel.actors.carriers import WaitNotice
    from evenkeel.actors.config import RunConfig
    from evenkeel.actors.record.recorder import Recorder
    from evenkeel.actors.record.terminal import TerminalView
    from evenkeel.actors.settings.resolve import with_devices
    from evenkeel.training import _log_as_events

    folder = RunFolder.create(tmp_path / "run", "x")
    recorder = Recorder(with_devices(load_config(RunConfig, RECIPE, []), has_gpu=False), folder, TerminalView(1, "x"))
    log = logging.getLogger("evenkeel.sync")
    with _log_as_events(recorder):
        log.info("%s is up", "an engine")
        log.warning(WaitNotice("an engine", 300))
    recorder.close()
    assert [(event.level, event.text, event.notice) for event in folder.read_events()] == [
        ("info", "an engine is up", None),
        ("warning", "waiting 300 s for an engine", WaitNotice("an engine", 300)),
    ]
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["x", "an engine is up", "warning: waiting 300 s for an engine"] and printed.err == ""
