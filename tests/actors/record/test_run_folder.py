"""One owner at a time, whole files, and a resume that takes back what came after its checkpoint without losing it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.errors import ConfigError
from evenkeel.learner.weights.file_sums import read_manifest_of_files, verify
from tests.failures.measured import REAL, Measured

ROOT = Path(__file__).parents[3]
HOLD = """
import os, sys, time
from pathlib import Path
from evenkeel.actors.record.run_folder import RunFolder
folder = RunFolder.create(Path(sys.argv[1]), "held")
folder.write_text("config.yaml", "name: held\\n")
if sys.argv[2] == "fork" and os.fork() > 0:
    time.sleep(60)    # the owner; its child, which is past the fork, speaks
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_checkpoint_or_the_folder_of_all_runs_leads_to_the_run(tmp_path: Path) -> None:
    """What `--resume .../step_60` and `--resume runs` mean."""
    step = tmp_path / "runs" / "one" / "checkpoints" / "step_000060"
    step.mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.yaml").write_text("name: one\n")
    for path, said in ((step, f"name that, {tmp_path / 'runs' / 'one'}; a resume goes on from"), (tmp_path / "runs", "in it: one.")):
        with pytest.raises(ConfigError, match=r"not a run folder: it has no config\.yaml") as refused:
            RunFolder.view(path)
        assert said in str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run", "x")
    folder.write_text("config.yaml", "name: x\nsteps: 10\n")
    return folder


def steps_of(folder: RunFolder) -> list[int]:
    return [metrics.step for metrics in folder.read_metrics()]


def test_a_folder_of_its_own_for_every_run(tmp_path: Path) -> None:
    first, second = (RunFolder.create(None, "nano chain/sum", root=tmp_path) for _ in range(2))
    assert first.path != second.path and first.path.parent == tmp_path
    assert first.path.name.startswith("nano-chain-sum-2")


def test_a_second_owner_is_told_who_has_it(folder: RunFolder) -> None:
    for take in (lambda: RunFolder.create(folder.path, "y"), lambda: RunFolder.open(folder.path)):
        with pytest.raises(ConfigError) as caught:
            take()
        message = str(caught.value)
        assert message.startswith(f"run_dir = {folder.path}: in use by process {os.getpid()} on ") and "\n" not in message
    RunFolder.view(folder.path)  # readers need no lock
    for damaged in ("[1]", "[" * 100_000):
        (folder.path / ".owner.json").write_text(damaged)
        with pytest.raises(ConfigError, match="in use by another process"):
            RunFolder.open(folder.path)
    folder.close()
    RunFolder.open(folder.path).close()


def test_who_only_looks_for_an_owner_does_not_stand_in_its_way(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """`evenkeel doctor` has the lock for an instant; an attempt of --retries that begins just then would not be tried again."""
    flock, times = fcntl.flock, iter(range(10))

    def held_at_first(file: int, how: int) -> None:
        if next(times) == 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        flock(file, how)

    folder.close()
    monkeypatch.setattr("fcntl.flock", held_at_first)
    RunFolder.open(folder.path).close()


@pytest.mark.parametrize(("name", "words"), [(".owner.lock", "can't be locked"), (".owner.json", "can't be written to")])
def test_a_folder_that_takes_no_file_of_its_owner_is_said_and_stays_free(folder: RunFolder, name: str, words: str) -> None:
    folder.close()
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).mkdir()
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"^run_dir = {folder.path}: {words}: .*Is a directory"):
            RunFolder.open(folder.path)


def test_a_configuration_of_brackets_alone_is_said(folder: RunFolder) -> None:
    (folder.path / "config.yaml").write_text("[" * sys.getrecursionlimit())
    with pytest.raises(ConfigError, match=r"config\.yaml: not valid YAML"):
        folder.read_config()


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an NFS server's that has no lock service."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ConfigError, match=r"run: can't be locked: .*No locks available\. Choose another run_dir"):
        RunFolder.create(tmp_path / "run", "x")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["fcntl.flock", "pathlib.Path.write_text"])
def test_what_may_pass_is_no_wrong_setting(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Such as a disk that is full for a while: --retries tries again after an OSError, and never after a ConfigError."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    folder.close()
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            RunFolder.open(folder.path)
    assert caught.value.errno == number and not isinstance(caught.value, ConfigError)
    RunFolder.open(folder.path).close()  # the lock was given back


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS], ids=errno.errorcode.get)
def test_what_stays_refused_is_a_wrong_setting(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    folder.close()
    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    with pytest.raises(ConfigError, match="can't be written to"):
        RunFolder.open(folder.path)


@pytest.mark.parametrize("children", ["fork", "alone"])
def test_a_killed_owner_leaves_the_folder_free(tmp_path: Path, children: str) -> None:
    """kill -9: nothing of ours runs any more, and a forked child that lives on must not keep the lock."""
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run"), children], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    with pytest.raises(ConfigError, match=f"in use by process {owner.pid}"):
        RunFolder.open(tmp_path / "run")
    follows = "it is refused, in a sentence that names the first one's process"
    Measured("a second process that would train in a run's folder", follows, None, "nothing", REAL).write()
    owner.kill()
    owner.wait()
    try:
        RunFolder.open(tmp_path / "run").close()
    finally:
        if children == "fork":
            os.kill(child, signal.SIGKILL)


def test_a_new_run_does_not_mix_with_what_is_there(folder: RunFolder, tmp_path: Path) -> None:
    folder.append_metrics(StepMetrics(1))
    folder.close()
    with pytest.raises(ConfigError, match=rf"holds a run already.*--resume {folder.path}"):
        RunFolder.create(folder.path, "x")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds other files \(chapter.tex"):
        RunFolder.create(tmp_path / "thesis", "x")
    RunFolder.open(folder.path).close()  # the refusal has given the lock back


def test_what_a_failed_start_has_left_is_cleared_but_for_its_events(folder: RunFolder) -> None:
    """Killed while it wrote its first file, or any later: the same."""
    folder.event("error", "Ray did not start")
    (folder.path / "tensorboard" / "events.out").write_text("")
    (folder.path / "checkpoints" / "step_000001.partial").mkdir()
    (folder.path / f".{os.getpid()}.config.yaml").write_text("name: x")
    source = folder.path.parent / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    folder.keep_model_files(source)  # before any engine is started from them
    folder.close()
    with RunFolder.create(folder.path, "x") as again:
        assert again.is_reused
        present = sorted(path.name for path in again.path.rglob("*") if not path.name.startswith(".owner"))
        assert present == ["checkpoints", "events.log", "tensorboard", "trajectories"]
        assert [event.text for event in again.read_events()] == ["Ray did not start"]
    (folder.path / "trajectories").rmdir()  # killed in between: the folders are made one by one
    with RunFolder.create(folder.path, "x") as again:
        assert (again.path / "trajectories").is_dir()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/step_000001/hf/x", "trajectories/step_000001.txt", "evaluations.jsonl"])
def test_what_has_a_number_is_no_failed_start(folder: RunFolder, name: str) -> None:
    folder.write_text(name, "{}\n")
    folder.close()
    with pytest.raises(ConfigError, match="holds a run already"):
        RunFolder.create(folder.path, "x")
    assert (folder.path / name).exists()


@pytest.mark.parametrize("name", ["config.yaml", "events.log", "checkpoints/notes.txt"])
def test_files_of_somebody_else_are_never_cleared(tmp_path: Path, name: str) -> None:
    """Under names that a run uses, too; nor after an earlier refusal, which has left a lock in the folder."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    for _ in range(2):
        with pytest.raises(ConfigError, match="holds"):
            RunFolder.create(tmp_path, "x")
    assert (tmp_path / name).read_text() == "mine"


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="doesn't exist"):
        RunFolder.view(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        RunFolder.open(tmp_path)


def test_a_torn_line_is_overlooked_by_readers_and_cut_by_the_next_owner(folder: RunFolder) -> None:
    for step in (1, 2):
        folder.append_metrics(StepMetrics(step, {"reward/mean": 0.5}))
    folder.close()
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 3, "reward/me')  # a crash in the middle of a write
    assert steps_of(RunFolder.view(folder.path)) == [1, 2]
    with RunFolder.open(folder.path) as again:
        again.append_metrics(StepMetrics(3))
        assert steps_of(again) == [1, 2, 3]
        assert [json.loads(line)["step"] for line in again.metrics_path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["step", "held_out"])
def test_half_a_surrogate_pair_is_written_as_its_escape(folder: RunFolder, kind: str) -> None:
    """As a scorer has it in its error that quotes the JSON of an answer. UTF-8 has no bytes for it."""
    path = folder.write_trajectories(3, "reward:   no such key: \ud83d, and \U0001f600\n", kind)
    assert path.read_text(encoding="utf-8") == "reward:   no such key: \\ud83d, and \U0001f600\n"


def test_rewind_moves_later_lines_and_loses_none(folder: RunFolder) -> None:
    for step in range(1, 8):
        folder.append_metrics(StepMetrics(step))
    for step in (0, 5, 7):
        folder.append_evaluation(StepMetrics(step, {"held_out/accuracy": 0.5}))
    assert folder.rewind(5) == 3  # steps 6 and 7, and the evaluation after 7
    assert steps_of(folder) == [1, 2, 3, 4, 5] and [m.step for m in folder.read_evaluations()] == [0, 5]
    moved = [json.loads(line) for line in (folder.path / "rewound.jsonl").read_text().splitlines()]
    assert [line["step"] for line in moved] == [6, 7, 7]
    assert folder.rewind(5) == 0


def test_files_are_replaced_whole(folder: RunFolder) -> None:
    folder.write_text("report.html", "old")
    with pytest.raises(RuntimeError):
        folder.write_file("report.html", lambda path: (path.write_text("ne"), (_ for _ in ()).throw(RuntimeError("disk"))))
    assert (folder.path / "report.html").read_text() == "old"
    assert [path.name for path in folder.path.iterdir() if "report" in path.name] == ["report.html"]


WRITES: dict[str, Callable[[RunFolder], object]] = {
    "samples": lambda folder: folder.write_trajectories(3, "an answer"),
    "report": lambda folder: folder.write_text("report.html", "a page"),
    "checkpoint": lambda folder: write_checkpoint(folder, 3),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_folder_that_was_removed_does_not_come_back_in_part(folder: RunFolder, what: str) -> None:
    shutil.rmtree(folder.path)
    with pytest.raises(FileNotFoundError, match="the run folder is gone") as caught:
        WRITES[what](folder)
    assert caught.value.filename == str(folder.path) and not folder.path.exists()


def test_events_come_back_as_they_were(folder: RunFolder) -> None:
    folder.event("warning", "reward raised\nValueError: no number")
    folder.event("info", "engines up")
    assert [(event.level, event.text) for event in folder.read_events()] == [
        ("warning", "reward raised ValueError: no number"),
        ("info", "engines up"),
    ]
    with pytest.raises(ValueError, match="use one of info, watch, warning, alarm, error"):
        folder.event("loud", "x")


def write_checkpoint(folder: RunFolder, step: int) -> None:
    with folder.checkpoint(step) as checkpoint:
        (checkpoint.hf / "model.safetensors").write_text(str(step))
        (checkpoint.state / "counters.json").write_text("{}")


def test_the_latest_complete_checkpoint_counts(folder: RunFolder) -> None:
    assert folder.checkpoints() == []
    for step in (50, 100, 150):
        write_checkpoint(folder, step)
    with pytest.raises(OSError, match="no space"), folder.checkpoint(200) as checkpoint:
        (checkpoint.hf / "model.safetensors").write_text("half")
        raise OSError("no space")
    latest = folder.checkpoints()[-1]
    assert (latest.step, latest.path.name, (latest.hf / "model.safetensors").read_text()) == (150, "step_000150", "150")
    assert [c.step for c in folder.prune_checkpoints(2)] == [50] and [c.step for c in folder.checkpoints()] == [100, 150]
    assert folder.prune_checkpoints(0) and [c.step for c in folder.checkpoints()] == [150]  # the last one is never removed


def test_the_best_checkpoint_stays(folder: RunFolder) -> None:
    """By held-out accuracy, the later of equals, among steps that have a checkpoint; it goes when a better one has come."""
    assert folder.best_checkpoint() is None
    accuracies = {10: 0.9, 20: 0.7, 30: 0.7, 40: 0.2, 50: 0.1}
    kept = {}
    for step, accuracy in accuracies.items():
        if step != 10:
            write_checkpoint(folder, step)
        folder.append_evaluation(StepMetrics(step, {"held_out/wilson_low": accuracy}))
        folder.prune_checkpoints(1)
        kept[step] = [checkpoint.step for checkpoint in folder.checkpoints()]
    assert kept == {10: [], 20: [20], 30: [30], 40: [30, 40], 50: [30, 50]}
    write_checkpoint(folder, 60)
    folder.append_evaluation(StepMetrics(60, {"held_out/wilson_low": 0.8}))
    assert [checkpoint.step for checkpoint in folder.prune_checkpoints(1)] == [30, 50]


def test_a_checkpoint_that_a_crash_left_half_written_is_cleared(folder: RunFolder) -> None:
    write_checkpoint(folder, 50)
    (folder.path / "checkpoints" / "step_000100.partial" / "hf").mkdir(parents=True)
    folder.close()
    with RunFolder.open(folder.path) as again:
        assert again.checkpoints()[-1].step == 50
        assert [path.name for path in (again.path / "checkpoints").iterdir()] == ["step_000050"]


def test_who_writes_late_to_a_checkpoint_that_was_given_up_does_no_harm(folder: RunFolder) -> None:
    """A rank behind a network that is cut may still be at it when the resumed run writes the same step to the same shared disk."""
    with pytest.raises(KeyboardInterrupt), folder.checkpoint(50) as given_up:
        raise KeyboardInterrupt
    with folder.checkpoint(50) as checkpoint:
        given_up.hf.mkdir(parents=True)
        for place, text in ((checkpoint, "new"), (given_up, "old")):
            (place.hf / "model.safetensors").write_text(text)
    assert (folder.checkpoints()[-1].hf / "model.safetensors").read_text() == "new"
    write_checkpoint(folder, 60)
    assert [path.name for path in sorted((folder.path / "checkpoints").iterdir())] == ["step_000050", "step_000060"]


def test_a_resumed_run_may_write_a_step_again(folder: RunFolder) -> None:
    write_checkpoint(folder, 50)
    with folder.checkpoint(50) as checkpoint:
        (checkpoint.hf / "model.safetensors").write_text("again")
    assert (folder.checkpoints()[-1].hf / "model.safetensors").read_text() == "again"
    assert len(list((folder.path / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("next_one", ["a resume", "the same process"])
def test_a_checkpoint_that_was_to_be_replaced_outlives_what_comes_between(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, next_one: str
) -> None:
    """A kill, or a disk's error, when the old one has its place no longer, and the new one has it not yet."""
    write_checkpoint(folder, 50)
    rename = Path.rename

    def broken_off(path: Path, target: Path) -> Path:
        if target.name == "step_000050":
            raise OSError(errno.EIO, "I/O error")
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="I/O error"):
        patch.setattr(Path, "rename", broken_off)
        write_checkpoint(folder, 50)
    assert folder.checkpoints() == []
    if next_one == "a resume":
        folder.close()
        folder = RunFolder.open(folder.path)
    else:
        write_checkpoint(folder, 60)
    first = folder.checkpoints()[0]
    assert (first.step, (first.hf / "model.safetensors").read_text()) == (50, "50")
    assert verify(first.path, read_manifest_of_files(first.path)) == []
    assert [path.name for path in (folder.path / "checkpoints").glob("*.partial")] == []


def test_samples_as_text_do_not_pile_up(tmp_path: Path) -> None:
    """A run of any length keeps those of its newest thousand steps, and a hundredth of the others."""
    with RunFolder.create(tmp_path / "run", "x") as folder:
        for step in range(1, 1251):
            folder.write_trajectories(step, "an answer")
        folder.write_trajectories(1250, "a held-out answer", "held_out")
        kept = [int(path.stem.removeprefix("step_")) for path in folder.trajectory_files()]
    assert kept == [100, 200, *range(251, 1251)]


def test_an_event_that_can_not_be_written_is_on_the_error_output_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk, which may be what there is to say; and it is no error of whoever says it."""
    with RunFolder.create(tmp_path / "run", "x") as folder:
        folder.events_path.symlink_to("/dev/full")
        folder.event("warning", "the disk is\nfull")
        told = capsys.readouterr().err
        assert told.startswith(f"{folder.events_path} can't be written ([Errno 28] No space left on device")
        assert told.endswith(" warning the disk is full\n")
        folder.events_path.unlink()
        folder.event("info", "there is room")
        assert [event.text for event in folder.read_events()] == ["there is room"]
