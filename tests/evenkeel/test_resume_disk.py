"""A start and a resume read the model, what the run folder has of earlier steps and all of a checkpoint, from a disk that may be slow, or
hang."""

from __future__ import annotations

import errno
import io
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from evenkeel import training as train
from evenkeel.actors.checkpoints.reader import Reading, newest_readable
from evenkeel.actors.config import RunConfig
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.processes import disk
from evenkeel.actors.processes.disk import DiskLate
from evenkeel.actors.record.config_that_ran import config_that_ran
from evenkeel.actors.record.run_folder import Checkpoint, RunFolder
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.errors import DeadlineExceeded
from evenkeel.doctor import gather
from evenkeel.doctor.facts import NodeFacts
from evenkeel.doctor.run_doctor import diagnose_run, page
from evenkeel.learner.weights import file_sums
from evenkeel.preparation import prepare
from evenkeel.recipe import load_config
from evenkeel.resume_point import find_resume_point, run_dir_of, run_recipe
from evenkeel.rollout.config import FileTask
from evenkeel.rollout.rewards.rewards import RewardError
from evenkeel.task_config import questions
from evenkeel.training import train_run
from tests.e2e.launch import RECIPE
from tests.evenkeel.disk_clock import notice_first
from tests.evenkeel.finished_run import give_words, hasty

AGAIN = r"When that disk answers again, do the same once more\. The deadline follows from deadlines.bytes_per_s"


@pytest.fixture(autouse=True)
def without_time_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_COMPUTES_S", 0.0)


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Who opens this file by Python waits, as on a disk that hangs. Somebody has to."""
    is_asked, is_back, opens = threading.Event(), threading.Event(), io.open

    def waits(file: Any, *arguments: Any, **named: Any) -> Any:
        if str(file) == str(path):
            is_asked.set()
            is_back.wait(60.0)
        return opens(file, *arguments, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(io, "open", waits)  # pathlib's
        try:
            yield
            assert is_asked.wait(60.0)
        finally:
            is_back.set()


def assert_ends_in_a_sentence(work: Callable[[], object], what: str) -> None:
    with pytest.raises(DeadlineExceeded, match=rf"^{what}: not done in \d+ s( \(.*\))?\. {AGAIN}$") as caught:
        work()
    assert disk.is_disk_late(caught.value)


def test_a_disk_that_hangs_is_told_and_ends_the_resume_in_a_sentence(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of the newest checkpoint, which it was reading. The time is that of its bytes, or the table's."""
    find_resume_point(folder, ())  # what it imports takes seconds, too
    is_back = threading.Event()

    def sum_of(path: Path, note: Callable[[int], object]) -> Any:
        note(1000)
        is_back.wait(60.0)
        raise OSError

    monkeypatch.setattr(file_sums, "sum_of", sum_of)
    monkeypatch.setattr(disk, "_NOTICE_S", 0.2)
    what = "files of the newest checkpoint -> the run folder's disk"
    folder.write_config(hasty(config_that_ran(folder), 0.3))
    try:
        with pytest.raises(DeadlineExceeded) as caught:
            find_resume_point(folder, ())
    finally:
        is_back.set()
    read = r"step_000002: 8e-06 of \S+ GB are read"
    remedy = r"When that disk answers again, do the same once more\. The deadline follows from deadlines.bytes_per_s"
    assert re.fullmatch(rf"{re.escape(what)}: not done in 1 s \({read}\)\. {remedy}", str(caught.value)), str(caught.value)
    assert re.search(rf"^evenkeel: waiting 0 s for {re.escape(what)} \({read}\)$", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_disk_that_hangs_ends_the_look_at_the_model(folder: RunFolder, is_resumed: bool, name: str) -> None:
    """Also where a package reads the file that lets no other thread run meanwhile."""
    model = folder.checkpoints()[-1].hf
    config, resumed_from = load_config(RunConfig, RECIPE, [f"model={model}", f"run_dir={folder.path}"]), model if is_resumed else None
    with pytest.raises(RewardError):  # a look that comes as far as the reward, which isn't here: what it imports takes seconds
        prepare(config, resumed_from=resumed_from)
    which = "the run folder's disk" if is_resumed else "the disk of the model or that of the run"
    with hanging(model / name):
        look = partial(prepare, hasty(config), resumed_from=resumed_from)
        assert_ends_in_a_sentence(look, f"(config|tokenizer) of {model} -> {which}")


@pytest.mark.parametrize("name", ["metrics.jsonl", "slowest.json"])
def test_a_disk_that_hangs_ends_the_look_at_earlier_steps(
    folder: RunFolder, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = "the lines of earlier steps -> the run folder's disk"
    notice_first(monkeypatch, what)
    with hanging(folder.path / name):
        config = hasty(with_devices(run_recipe(folder, ()).config, has_gpu=False))
        run = partial(train._run_in, folder, config, None, [], None)  # type: ignore[arg-type]
        assert_ends_in_a_sentence(run, what)
    assert re.search(rf"^warning: waiting \d+ s for {what}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("where", ["the model's folder", "config.json", "a file for the nodes", "a node's file"])
def test_a_disk_that_hangs_ends_the_look_at_the_nodes(folder: RunFolder, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of its own machine in the model's folder, of one that joins a cluster in the run folder, where each node puts a file."""
    is_back, told = threading.Event(), list[str]()
    hangs: Any = lambda *_, **__: is_back.wait(60.0)  # noqa: E731
    of_ray = {"nodes": lambda: [{"Alive": True, "NodeID": "n"}], "get": lambda *_, **__: NodeFacts(name="n", reads_run_folder=True)}
    context, state = SimpleNamespace(get_node_id=lambda: "n"), SimpleNamespace(state=SimpleNamespace(available_resources_per_node=dict))
    for name, value in (of_ray | {"get_runtime_context": lambda: context, "_private": state}).items():
        monkeypatch.setattr(ray, name, value)
    monkeypatch.setattr(gather, "_task", lambda *_: SimpleNamespace(remote=lambda *_, **__: None))
    monkeypatch.setattr(train, "own_machine", hangs if where == "the model's folder" else lambda _: [])
    if where == "a file for the nodes":
        monkeypatch.setattr(Path, "write_text", hangs)
    monkeypatch.setattr(gather, "_sees_both_ways", hangs)
    joins = where in ("a file for the nodes", "a node's file")
    config = hasty(with_devices(run_recipe(folder, ["ray.address=auto"] * joins).config, has_gpu=False))
    recorder: Any = SimpleNamespace(waiting=lambda notice: told.append(str(notice)))
    view: Any = SimpleNamespace(compare_with=lambda _: None)
    what = {
        "the model's folder": "facts of this machine, and the model's folder",
        "config.json": "the model's config",
        "a file for the nodes": "a file for the nodes to read",
        "a node's file": "a file that a node has written",
    }[where]
    which = "the run folder's disk" if joins else "the disk of the model or that of the run"
    notice_first(monkeypatch, what)
    try:
        with hanging(config.model / "config.json") if where == "config.json" else nullcontext():
            look = partial(train._look_at_nodes, config, folder, recorder, view, config.model)
            assert_ends_in_a_sentence(look, f"{what} -> {which}")
    finally:
        is_back.set()
    assert any(re.fullmatch(rf"waiting \d+ s for {what} -> {which}", said) for said in told)


@pytest.mark.parametrize("name", ["evaluations.jsonl", "metrics.jsonl"])
def test_a_disk_that_hangs_ends_the_resume_of_a_complete_run(folder: RunFolder, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it looks whether it is complete, or as it writes the report that is missing."""
    folder.write_config(hasty(give_words(folder, "steps=2"), 0.7))
    folder.append_evaluation(StepMetrics(2))
    folder.close()
    with ExitStack() as later:
        monkeypatch.setattr(train, "check_surroundings", lambda _: later.enter_context(hanging(folder.path / name)))
        assert_ends_in_a_sentence(lambda: train_run(None, [], folder.path), "the run's evaluations and report -> the run folder's disk")


def test_a_checkpoint_has_the_time_of_its_bytes() -> None:
    """480 GB at 100 MB/s, and three times as long, as for one that is written; a small one, what the table has."""
    reading, deadlines = Reading(), RunConfig.model_fields["deadlines"].get_default(call_default_factory=True)
    reading.begins(Checkpoint(10, Path("checkpoints/step_000010")))
    assert (reading.limit_s(deadlines), str(reading)) == (deadlines.disk_s, "step_000010")
    reading.has_files({"files": {"a": {"bytes": 479 * 10**9}, "b": {"bytes": 10**9}}})
    reading.add(12 * 10**9)
    assert (reading.limit_s(deadlines), str(reading)) == (14400.0, "step_000010: 12 of 480 GB are read")
    began = reading.began
    reading.begins(Checkpoint(5, Path("checkpoints/step_000005")))
    assert (str(reading), reading.began >= began) == ("step_000005", True), "the older one, when this one is damaged, has its own"


def test_a_disk_that_hangs_ends_the_command_lines_look_at_the_settings(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is imported, and with `--retries` in the process that starts the others."""
    monkeypatch.setattr(disk, "DeadlinesConfig", lambda: SimpleNamespace(disk_s=0.3))
    with hanging(folder.recipe_path):
        assert_ends_in_a_sentence(lambda: run_dir_of(None, [], folder.path), "the run's settings -> the run folder's disk")


def test_questions_and_a_recipe_that_hang_are_told_and_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their disk is not the run's: each says which it is, and the questions' error says what to raise if the hub is only slow."""
    rows = tmp_path / "questions.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(40)))
    task = FileTask(kind="file", path=rows)
    notice_first(monkeypatch, "the questions")
    said = f"the questions of the task ({rows}) -> their disk, or the hub: not done in"
    with hanging(rows), pytest.raises(DiskLate, match=rf"^{re.escape(said)} \d s.*raise deadlines.start_s"):
        questions(task, 0.3)
    assert questions(task, 0.3).name
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: none\n")
    monkeypatch.setattr(disk, "DeadlinesConfig", lambda: SimpleNamespace(disk_s=0.3))
    notice_first(monkeypatch, "the recipe")
    with hanging(recipe), pytest.raises(DiskLate, match=re.escape(f"the recipe {recipe} -> its disk: not done in")):
        run_dir_of(recipe, (), None)


def test_a_checkpoint_that_the_disk_does_not_give_now_is_waited_for(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going on from the older one would do steps again for an error that may pass; the sentence says how to, if somebody wants it."""
    newest, opened = folder.checkpoints()[-1], Path.open

    def fails(path: Path, *arguments: Any, **named: Any) -> Any:
        if path == newest.hf / "model.safetensors":
            raise OSError(errno.ESTALE, "Stale file handle")
        return opened(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(OSError, match="Stale file handle") as caught:
        find_resume_point(folder, ())
    assert caught.value.filename == f"{newest.hf}/model.safetensors" and "before it, move it away" in caught.value.__notes__[0]
    monkeypatch.undo()
    point = find_resume_point(folder, ()).point
    assert point is not None and point.checkpoint == newest


@pytest.mark.parametrize("reader", ["stat", "the checksum", "who uses it"])
@pytest.mark.parametrize("name", ["hf/config.json", "hf/model.safetensors", "state/controller.json", "state/groups.safetensors"])
@pytest.mark.parametrize("number", [errno.EUCLEAN, errno.ESTALE])
def test_what_a_disk_refuses_is_told_from_damage(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, number: int, name: str, reader: str
) -> None:
    """By its error, whoever reads the file: for damage the older checkpoint is taken; what may pass is no reason to."""
    path, opens, stats, asked = folder.path / "checkpoints" / "step_000002" / name, io.open, Path.stat, list[str]()

    def refuse(at: Any, after: int) -> None:
        if str(at) == str(path):
            asked.append(name)
            if len(asked) > after:
                raise OSError(number, "refused")

    def opened(file: Any, *arguments: Any, **named: Any) -> Any:
        refuse(file, int(reader == "who uses it"))
        return opens(file, *arguments, **named)

    def looked_at(at: Path, **named: Any) -> Any:
        refuse(at, 0)
        return stats(at, **named)

    monkeypatch.setattr(*((Path, "stat", looked_at) if reader == "stat" else (io, "open", opened)))
    if number == errno.EUCLEAN:
        point = newest_readable(folder)
        assert point.checkpoint.step == 1 and len(point.damaged) == 1
    else:
        with pytest.raises(OSError, match="refused") as caught:
            newest_readable(folder)
        assert caught.value.errno == number and "step_000002" in caught.value.filename
        assert "That is no damage of" in caught.value.__notes__[0]
        assert re.search("step_000002 can't be read now, which is no damage", page(diagnose_run(folder)))
        assert len(folder.checkpoints()) == 2


def test_checkpoints_that_can_t_be_listed_are_not_none(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would begin anew."""

    def refuses(at: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(at))

    monkeypatch.setattr(os, "scandir", refuses)
    monkeypatch.setattr(os, "listdir", refuses)
    with pytest.raises(PermissionError, match="checkpoints"):
        find_resume_point(folder, ())
