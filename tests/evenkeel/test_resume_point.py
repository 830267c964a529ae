"""What a resume goes on from: of damaged checkpoints the newest that is whole; settings that it takes, tells, or refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel import training as train
from evenkeel.actors.checkpoints.reader import ResumePoint, take_back
from evenkeel.actors.checkpoints.state import OtherVersionError, open_ledger
from evenkeel.actors.config import RunConfig
from evenkeel.actors.driver.recovery import Rollbacks
from evenkeel.actors.json_lines import JsonLines, last_step
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.metric_views import TensorBoardView, open_views
from evenkeel.actors.record.run_folder import CHECKPOINT_FORMAT, RunFolder
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.doctor.run_doctor import EVALUATION, REPORT, left_after_training
from evenkeel.learner.weights.file_sums import seal
from evenkeel.recipe import load_config
from evenkeel.resume_point import find_resume_point, with_absolute_paths
from evenkeel.rollout.tasks.mixture import Mixture
from evenkeel.training import train_run
from tests.actors.cases import prompt
from tests.e2e.launch import RECIPE
from tests.evenkeel.finished_run import give_words, keep_in_checkpoint, resumed, state
from tests.failures.measured import Measured
from tests.learner.test_file_sums import flip


def asks(texts: Callable[[int], str] = lambda position: prompt(position).text) -> Any:
    """A task of these questions."""
    of_one = SimpleNamespace(name="task", fingerprint="0f", train_prompt=lambda position: replace(prompt(position), text=texts(position)))
    return Mixture({"": of_one})  # type: ignore[dict-item]


def resume(folder: RunFolder, *overrides: str, task: Any = None) -> tuple[RunConfig, ResumePoint, list[tuple[str, str]]]:
    found = find_resume_point(folder, overrides)
    assert found.point is not None
    config = with_devices(found.recipe.config, has_gpu=False)
    point, said = train._made_ready(folder, found.recipe, config, found.point, task or asks(), is_new=False)
    assert point is not None
    return config, point, said


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def scramble(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def add(path: Path) -> None:
    shutil.copy(path, path.with_name("more.safetensors"))


DAMAGES: Sequence[tuple[str, Callable[[Path], None]]] = [
    ("hf/model.safetensors", cut),
    ("hf/model.safetensors", zero),
    ("hf/config.json", cut),
    ("hf/config.json", Path.unlink),
    ("hf/tokenizer.json", cut),
    ("manifest.json", cut),
    ("manifest.json", flip),
    ("manifest.json", Path.unlink),
    ("state/controller.json", cut),
    ("state/controller.json", flip),
    ("state/controller.json", scramble),
    ("state/controller.json", Path.unlink),
    ("state/groups.safetensors", cut),
    ("state/groups.safetensors", flip),
    ("state/groups.safetensors", Path.unlink),
    ("hf/model.safetensors", flip),
    ("hf/model.safetensors", add),
    ("hf/tokenizer.json", flip),
    ("state/learner/rank-0.safetensors", flip),
    ("state/learner/random-0.safetensors", flip),
    ("state/learner/manifest.json", cut),
    ("state/learner/manifest.json", zero),
    ("state/learner/rank-0.safetensors", cut),
    ("state/learner/rank-0.safetensors", Path.unlink),
    ("state/learner/random-0.safetensors", zero),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=[f"{name}-{damage.__name__}" for name, damage in DAMAGES])
def test_a_damaged_checkpoint_is_named_and_the_older_one_taken(folder: RunFolder, name: str, damage: Callable[[Path], None]) -> None:
    newest = folder.path / "checkpoints" / "step_000002"
    damage(newest / name)
    _, point, said = resume(folder)
    assert (point.checkpoint.step, point.state.book) == (1, state(1).book)
    (aside, aside_reason), (level, loss) = [entry for entry in said if entry[0] == "warning"]
    assert "checkpoint of step 2 can't be read and is set aside as step_000002.damaged" in aside_reason and aside == level == "warning"
    named = {"manifest.json": str(newest), "add": str(newest / "hf/more.safetensors")}
    assert named.get(name, named.get(damage.__name__, str(newest / name))) in aside_reason
    assert "all after step 1 is done again, up to step 2 at least; 1 lines of it went to rewound.jsonl" in loss
    # The damaged one counts for nothing any more, so that no pruning spares it in place of a good one; and its lines are taken back.
    assert [checkpoint.step for checkpoint in folder.checkpoints()] == [1]
    assert (folder.path / "checkpoints" / "step_000002.damaged").is_dir()
    assert [metrics.step for metrics in folder.read_metrics()] == [1]
    follows = "a resume names the file, sets the checkpoint aside and takes the older one"
    Measured("newest checkpoint truncated, or with a flipped bit", follows, None, "the steps since the older one", "any file of it").write()


def test_no_checkpoint_that_can_be_read_is_one_sentence(folder: RunFolder) -> None:
    for checkpoint in folder.checkpoints():
        cut(checkpoint.state / "controller.json")
    with pytest.raises(DataError) as caught:
        find_resume_point(folder, ())
    said = str(caught.value)
    assert "none of its checkpoints can be read (step_000002, step_000001)" in said and "\n" not in said
    assert f"{folder.path}/checkpoints/step_000002/state/controller.json: damaged" in said
    assert len(folder.checkpoints()) == 2, "nothing is changed by a refusal"


@pytest.mark.parametrize(
    ("found", "which"), [(CHECKPOINT_FORMAT - 1, "an earlier"), (CHECKPOINT_FORMAT + 1, "a later"), (None, "an earlier")]
)
def test_the_manifest_says_of_what_format_a_checkpoint_is(folder: RunFolder, found: int | None, which: str) -> None:
    newest = folder.checkpoints()[-1]
    seal(newest.path, {"format": found, "step": 2})
    told = rf"written by {which} version of evenkeel .its format is {found}, this version's {CHECKPOINT_FORMAT}"
    with pytest.raises(OtherVersionError, match=told):
        find_resume_point(folder, ())


def test_a_foreign_file_is_told_and_not_read(folder: RunFolder) -> None:
    (folder.checkpoints()[-1].hf / "notes.txt").write_text("good one")
    _, point, said = resume(folder)
    assert point.checkpoint.step == 2
    ((level, text),) = said
    assert level == "warning" and "step_000002 holds files that it was not written with and that are not read: hf/notes.txt" in text


def test_a_whole_folder_needs_no_warning(folder: RunFolder) -> None:
    _, point, said = resume(folder)
    assert (point.checkpoint.step, said) == (2, [])


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.7])
def test_a_cut_recipe_is_refused(folder: RunFolder, kept: float) -> None:
    """Cut between two keys it is valid YAML, whose missing keys would be defaults."""
    path = folder.recipe_path
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: int(kept * len(lines))]))
    with pytest.raises(ConfigError, match=rf"{path}: damaged, it doesn't end with the line `\.\.\.`"):
        find_resume_point(folder, ())


NO_YAML = [b"", bytes(300), b"steps: [", b"\xff\xfe\x00", b"- a\n- b\n", b"word"]


@pytest.mark.parametrize("content", NO_YAML)
def test_a_recipe_that_is_none_is_refused(folder: RunFolder, content: bytes) -> None:
    for damaged in (content, content + b"\n...\n"):
        folder.recipe_path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=str(folder.recipe_path)):
            find_resume_point(folder, ())


@pytest.mark.parametrize("content", NO_YAML)
def test_a_damaged_config_yaml_is_written_anew(folder: RunFolder, content: bytes) -> None:
    """It says what ran; recipe and checkpoint have all that a resume needs."""
    keep_in_checkpoint(folder, give_words(folder))
    path = folder.path / "config.yaml"
    before = path.read_text()
    path.write_bytes(content)
    _, point, said = resume(folder)
    assert (point.checkpoint.step, said, path.read_text()) == (2, [], before)


def test_settings_that_differ_are_told_in_one_line(folder: RunFolder) -> None:
    _, _, said = resume(folder, "steps=12", "learner.learning_rate=5e-4")
    assert said == [("info", "settings other than the run's own so far: steps 9 -> 12; learner.learning_rate 0.001 -> 0.0005")]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model=/elsewhere/model", "another model would be ignored"),
        ("run_dir=/elsewhere", "goes on in its own folder"),
        ("rollout.task.seed=5", "the run's own questions"),
        ("rollout.task.dataset=chain_sum", "the run's own questions"),
        ("steps=1", "has done 2: nothing is left. Add steps=102"),
        ("max_staleness=0", "ran with 1"),
    ],
)
def test_settings_that_would_be_silently_wrong_are_refused(folder: RunFolder, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        find_resume_point(folder, [override])
    assert override.partition("=")[0] in str(caught.value) or "steps" in words
    assert len(folder.read_metrics()) == 2


class BegunError(Exception):
    """A run is prepared, to be started."""


@pytest.mark.parametrize("lacks", ["nothing", REPORT, EVALUATION])
def test_at_the_last_step_a_resume_does_what_is_left(
    folder: RunFolder, lacks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that was killed in the last evaluation, or in the report: whoever tries it again gets both. Of a run that has them nothing
    is started, and its exit code is that of a run that is done."""

    def prepare(config: RunConfig, **_: Any) -> Any:
        raise BegunError

    monkeypatch.setattr(train, "prepare", prepare)
    give_words(folder, "steps=2")
    if lacks != EVALUATION:
        folder.append_evaluation(StepMetrics(2))
    if lacks == "nothing":
        folder.write_text("report.html", "as it was")
    assert left_after_training(folder, 2) == {"nothing": (), REPORT: (REPORT,), EVALUATION: (EVALUATION, REPORT)}[lacks]
    folder.close()
    if lacks == EVALUATION:
        with pytest.raises(BegunError):
            train_run(None, [], folder.path)
        return
    summary = train_run(None, [], folder.path)
    assert (summary.exit_code, summary.steps, summary.stopped_early) == (0, 2, False)
    said = f"{folder.path} is complete: all of its 2 steps are made, saved and evaluated"
    assert f"{said}. Add steps=102 to train on" in capsys.readouterr().out and folder.read_events()[-1].text == said
    assert left_after_training(folder, 2) == () and (folder.report_path.read_text() == "as it was") == (lacks == "nothing")
    RunFolder.open(folder.path).close()  # it was given back


@pytest.mark.skipif(not Path(sys.executable).with_name("evenkeel").exists(), reason="evenkeel isn't installed beside this Python")
def test_the_last_line_opens_the_page_in_a_shell_that_does_not_know_evenkeel(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the one in which `make train` was typed."""
    give_words(folder, "steps=2")
    folder.append_evaluation(StepMetrics(2))
    folder.write_text("report.html", "as it was")
    folder.close()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    train_run(None, [], folder.path)
    label, _, command = capsys.readouterr().out.splitlines()[-1].partition(":")
    with subprocess.Popen(["sh", "-c", f"exec {command}"], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        name, _, address = shell.stdout.readline().partition(": ")
        shell.terminate()
    assert (label, name) == ("to look", "run") and address.startswith("http://127.0.0.1:")


def test_the_same_model_by_another_way_is_no_other_model(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(folder.read_config()["model"])
    monkeypatch.chdir(model.parent)
    assert resumed(folder, [f"model={model.name}"]).notes == ()


SPOILING = [
    ("rollout.sampling.temperature=0.7", "rollout.sampling.temperature (1.0 -> 0.7)"),
    ("rollout.sampling.samples_per_group=7", "rollout.sampling.samples_per_group (4 -> 7)"),
    ("rollout.sampling.max_tokens=9", "rollout.sampling.max_tokens (48 -> 9)"),
    ("rollout.reward.deadline_s=3", "rollout.reward.deadline_s (10.0 -> 3.0)"),
    ("rollout.reward.memory_gib=1", "rollout.reward.memory_gib (4.0 -> 1.0)"),
]


@pytest.mark.parametrize(("override", "named"), SPOILING, ids=[override for override, _ in SPOILING])
def test_what_finished_groups_do_not_survive_is_refused_by_name(folder: RunFolder, override: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed(folder, [override])
    said = str(caught.value)
    assert named in said and "1 finished group of" in said and "--discard-groups" in said and "\n" not in said
    point = resumed(folder, [override], discard_groups=True)
    assert point.state.book.finished == () and len(point.state.book.in_flight) == 2


def test_groups_sampled_at_another_temperature_are_sampled_again(folder: RunFolder) -> None:
    """A batch has one temperature, so their ratios would be wrong; their prompts stay, and the counts."""
    before = state(2).book
    assert (len(before.in_flight), len(before.finished)) == (1, 1)
    found = resumed(folder, ["rollout.sampling.temperature=0.7"], discard_groups=True)
    point, said = take_back(folder, found, asks())
    book = point.state.book
    assert [ticket.group_id for ticket in book.in_flight] == [2, 3] and book.finished == ()
    assert {ticket.prompt.prompt_id for ticket in book.in_flight} == {"train/0/2", "train/0/3"}
    assert book.so_far == () != before.so_far, "what there is of others is of that temperature, too"
    assert replace(book, in_flight=before.in_flight, finished=before.finished, so_far=before.so_far) == before
    assert said[1] == ("info", "1 finished and 1 begun groups of the checkpoint are sampled again, because of rollout.sampling.temperature")


def test_a_resume_that_died_before_its_first_checkpoint_spoils_nothing(folder: RunFolder) -> None:
    """It has written its settings into the folder; the next one has the same words, or none, and the groups are the old ones."""
    keep_in_checkpoint(folder, give_words(folder))
    give_words(folder, "rollout.sampling.temperature=0.7")
    with pytest.raises(ConfigError, match=r"rollout.sampling.temperature \(1.0 -> 0.7\): 1 finished group of"):
        resumed(folder, ())
    point = resumed(folder, (), discard_groups=True)
    assert point.state.book.finished == () and len(point.state.book.in_flight) == 2


OF_ENGINES = [
    *("deadlines.heartbeat_s=99", "weight_group_backend=gloo"),
    *("threads=2", "prefix_cache=false", "log_level=info"),
]
SPARING = ["workers=2", "slots=5", "reward.processes=3", "overlong.kind=mask", *(f"engine.{one}" for one in OF_ENGINES)]


@pytest.mark.parametrize("setting", SPARING)
def test_groups_stay_where_neither_answers_nor_scores_change(folder: RunFolder, setting: str) -> None:
    """They are trained as they are; what is cut is masked or penalised as they are packed."""
    _, point, _ = resume(folder, f"rollout.{setting}")
    assert point.state.book == state(2).book


def test_other_data_than_the_runs_are_refused(folder: RunFolder) -> None:
    with pytest.raises(DataError, match=r"its question 3 is train/0/3 'another', but the run asked train/0/3 'question 3' there"):
        resume(folder, task=asks(lambda position: "another" if position == 3 else prompt(position).text))
    with pytest.raises(DataError, match=r"fingerprint of its questions is 1f, and was 0f: these are other data.*start a new run from"):
        others = asks()
        others.tasks[""].fingerprint = "1f"
        resume(folder, task=others)
    assert len(folder.read_metrics()) == 2, "nothing is taken back by a refusal"


def test_the_reference_policy_has_to_be_there(folder: RunFolder, finished: Path, tmp_path: Path) -> None:
    """With a KL term alone; and where it has been moved to can be said."""
    for path in (folder.recipe_path, folder.path / "config.yaml"):
        path.write_text(path.read_text().replace(str(finished.with_name("model")), str(tmp_path / "gone")))
    find_resume_point(folder, ())
    find_resume_point(folder, ["correction.kl.coefficient=0.1", "correction.kl.anchor=behavior"])
    with pytest.raises(DataError, match=r"gone: no such folder.*reference policy.*model=FOLDER"):
        find_resume_point(folder, ["correction.kl.coefficient=0.1"])
    model = finished.with_name("model")
    assert find_resume_point(folder, ["correction.kl.coefficient=0.1", f"model={model}"]).recipe.config.model == model


def test_metrics_that_were_cut_are_told(folder: RunFolder) -> None:
    zero(folder.metrics_path)
    _, _, said = resume(RunFolder(folder.path))
    assert said == [("warning", f"{folder.metrics_path} is damaged: 2 of 2 steps have no line in it, and no place in the report")]


def test_a_damaged_line_among_good_ones_is_told_at_each_resume_and_left_where_it_is(folder: RunFolder) -> None:
    before = b'{"step": 1, "time/step_s": 1.5{"step": 2}\n' + folder.metrics_path.read_bytes().splitlines(keepends=True)[1]
    folder.metrics_path.write_bytes(before)
    for _ in range(2):
        said = resume(folder)[2]
        assert said == [("warning", f"{folder.metrics_path} is damaged: 1 of 2 steps have no line in it, and no place in the report")]
        assert folder.metrics_path.read_bytes() == before


def test_a_resume_keeps_no_numbers_of_earlier_steps(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of ten million prompts has a gigabyte of them: whatever a resume wants of these lines is the number of a step."""
    monkeypatch.setattr(StepMetrics, "of_record", lambda record: pytest.fail(f"the numbers of step {record['step']} were parsed"))
    config, _, said = resume(folder)
    (view,) = open_views(folder, config.metrics, print)
    assert isinstance(view, TensorBoardView) and view._purge == 3 and said == []


def test_a_return_to_a_checkpoint_in_the_running_driver_reads_no_earlier_lines(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run waits for it, and its own lines need no check."""
    point = find_resume_point(folder, ()).point
    folder.append_metrics(StepMetrics(3))
    monkeypatch.setattr(JsonLines, "steps", lambda _: pytest.fail("all lines are read"))
    monkeypatch.setattr(JsonLines, "each", lambda *_: pytest.fail("all lines are read"))
    found, said = Rollbacks(folder, asks())._take_back(folder.path / "model", point)
    assert (found.step, said, last_step(folder.metrics_path)) == (2, [], 2)


def test_a_damaged_ledger_is_told_and_no_obstacle(folder: RunFolder) -> None:
    path = folder.path / "ledger.jsonl"
    _, point, _ = resume(folder)
    told: list[tuple[str, str]] = []
    mark = open_ledger(path, point.state, lambda *event: told.append(event))._mark
    assert (mark.lines, mark.aside) == (2, 0) and told == []
    before = b"\x00\xff{garbage\n" + path.read_bytes().splitlines(keepends=True)[1]
    path.write_bytes(before)
    ledger = open_ledger(path, point.state, lambda *event: told.append(event))
    ((level, text),) = told
    assert level == "warning" and f"{path} is damaged: it has " in text and "set aside as ledger.damaged.jsonl" in text
    assert path.with_name("ledger.damaged.jsonl").read_bytes() == before and not path.exists()
    assert (ledger._mark.lines, ledger._mark.aside) == (0, 2)


def test_paths_are_those_of_where_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume may be asked for in another folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local_set").mkdir()
    rows = ["rollout.task.kind=file", "rollout.task.path=rows.jsonl", "rollout.task.held_out_path=held.jsonl"]
    config = with_absolute_paths(load_config(RunConfig, RECIPE, ["model=models/m", *rows]))
    task: Any = config.rollout.task
    assert (config.model, task.path, task.held_out_path) == (tmp_path / "models/m", tmp_path / "rows.jsonl", tmp_path / "held.jsonl")
    for name, expected in (("local_set", str(tmp_path / "local_set")), ("org/on_the_hub", "org/on_the_hub")):
        hub = ["model=m", "rollout.task.kind=huggingface", f"rollout.task.path={name}"]
        found: Any = with_absolute_paths(load_config(RunConfig, RECIPE, hub)).rollout.task
        assert found.path == expected


def test_a_reward_s_module_stays_where_the_run_found_it_or_is_where_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a resume that finds it elsewhere is the same run: no group is sampled again for that."""
    began, goes_on = tmp_path / "began", tmp_path / "goes_on"
    began.mkdir()
    goes_on.mkdir()
    (began / "mine.py").touch()
    monkeypatch.chdir(began)
    run = with_absolute_paths(load_config(RunConfig, RECIPE, ["rollout.reward={kind: function, path: 'mine:score'}"]))
    monkeypatch.chdir(goes_on)

    def folder() -> Path:
        reward: Any = with_absolute_paths(run).rollout.reward
        return reward.folder

    assert folder() == began
    (goes_on / "mine.py").touch()
    assert folder() == began, "as the run had it, where both have one"
    (began / "mine.py").unlink()
    assert folder() == goes_on
