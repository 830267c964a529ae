"""A run folder some of whose files are damaged, cut, or somebody else's: what reads it goes on without them, or says so in a sentence."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from evenkeel.actors.carriers import ScatterSample
from evenkeel.actors.config import RunConfig
from evenkeel.actors.json_lines import last_step
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import RunEvent, RunFolder
from evenkeel.actors.record.stack_collector import StackCollector
from evenkeel.correction.errors import ConfigError
from evenkeel.dashboard.columns import StepColumns
from evenkeel.dashboard.facts import clipped_rows, summary_rows, worker_rows
from evenkeel.dashboard.frozen import write_report
from evenkeel.doctor.run_doctor import diagnose_run, left_after_training, page
from evenkeel.recipe import load_config
from evenkeel.resume_point import run_recipe
from tests.evenkeel.dashboard.made_runs import read_report
from tests.evenkeel.doctor.test_run_doctor import RECIPE, run_folder

LINES = [
    *((name, f'{{"step": {step}}}') for name in ("metrics.jsonl", "evaluations.jsonl") for step in ("null", '"x"', "1e999")),
    *((name, '{"step": 1e999, "prompt_id": "a", "outcome": "b", "tokens": [5]}') for name in ("ledger.jsonl", "answer_lengths.jsonl")),
    ("monitor.jsonl", '{"step": null, "name": "k3_kl", "state": "ok", "value": 1, "growth": 1, "message": ""}'),
    ("metrics.jsonl", '{"step": 2, "non_finite": [1]}'),
    ("metrics.jsonl", f'{{"step": 2, "reward/mean": 1{"0" * 400}}}'),
    ("metrics.jsonl", '{"step": 2, "groups/trained_total": 1e999}'),
    ("metrics.jsonl", '{"step": 2, "time/elapsed_s": 1e999}'),
    ("metrics.jsonl", '{"step": 2, "worker/tokens/0": 1, "worker/tokens/1": 1}'),
    ("metrics.jsonl", '{"step": 2, "staleness/tokens/x": 1, "staleness/tokens/0": 1}'),
    ("evaluations.jsonl", '{"step": 2, "held_out/accuracy": 0.5, "held_out/pass_at/4": 0.5}'),
    ("evaluations.jsonl", '{"step": 2, "held_out/accuracy": 0.5, "held_out/pass_at/x": 1, "held_out/pass_at_low/x": 1}'),
    *(("clipped_tokens.jsonl", f'{{"step": 2, "positive": {counts}}}') for counts in ('[[1, "x"]]', "[[-1, 1]]", "5", "[[1e999, 1]]")),
    ("answer_lengths.jsonl", '{"step": 2, "tokens": [1e999]}'),
    ("events.log", '2026 warning [waiting] {"what": 1, "seconds": "x"}'),
    ("events.log", '2026 warning [waiting] {"what": [1], "seconds": 5}'),
    ("events.log", '2026 warning [waiting] {"what": "a", "seconds": null}'),
    ("events.log", f"2026 warning waiting {'9' * 5000} s for a batch"),
    ("stacks/²3.txt", "a wait"),
    ("slowest.json", '[{"reward_s": "x", "generate_s": 1, "response_tokens": 1, "prompt_id": "a", "worker": "0", "unscored": 0}]'),
]
"""(file, what stands at its end)."""


@pytest.mark.parametrize(("name", "line"), LINES, ids=[f"{name} {line}"[:70] for name, line in LINES])
def test_a_foreign_line_is_left_out_by_all_that_read_the_folder(tmp_path: Path, name: str, line: str) -> None:
    """doctor, report, a resume, its parent with --retries, and a run that goes on."""
    folder = run_folder(tmp_path / "run", steps=2, saved=2)
    folder.append_evaluation(StepMetrics(0, {"held_out/accuracy": 0.5, "held_out/wilson_low": 0.4}))
    path = folder.path / name
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    folder.read_answer_lengths(first_step=0)
    folder.prune_checkpoints(1)
    StackCollector(folder, print)
    assert folder.read_monitor_events() == []
    assert "the evaluation after training" in " ".join(left_after_training(folder, 2)) or name == "evaluations.jsonl"
    steps = StepColumns(folder.read_metrics())
    summary_rows(steps, folder.read_evaluations(), folder.read_config())
    worker_rows(steps)
    assert clipped_rows(folder) == folder.read_slowest() == [] and folder.checkpoints()[-1].step == 2
    assert last_step(folder.path / "ledger.jsonl") == 2
    folder.close()
    assert ", after step 2 of 2 (newest checkpoint: step 2)" in page(diagnose_run(RunFolder.view(folder.path))).splitlines()[0]
    with RunFolder.open(folder.path) as again:
        again.rewind(2)
        assert {metrics.step for metrics in again.read_metrics()} == {1, 2}


def test_a_foreign_sample_is_not_on_the_page(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    for name in ("step_x", "step_²", "step_000001"):
        (folder.path / f"trajectories/{name}.txt").write_text("an answer")
    assert [path.name for path in folder.trajectory_files()] == ["step_000001.txt"]


def scatter(path: Path, **other: object) -> bytes:
    arrays = {"behavior_logprobs": [-1.0], "proximal_logprobs": [-1.0], "staleness": [0], "step": [1]} | other
    np.savez_compressed(path, **{name: np.array(values) for name, values in arrays.items()})
    return path.read_bytes()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "noise": lambda _: bytes(range(256)),
    "overwritten": lambda content: content[:60] + b"\0" * 20 + content[80:],
}


def test_what_a_report_would_show_and_isn_t_there_yet_is_no_damage(tmp_path: Path) -> None:
    found = read_report(write_report(run_folder(tmp_path / "run")))
    assert found["overview"]["left_out"] == found["correction"]["left_out"] == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_report_goes_without_a_part_that_can_t_be_read(tmp_path: Path, damage: str) -> None:
    folder = run_folder(tmp_path / "run")
    folder.scatter_path.write_bytes(DAMAGES[damage](scatter(tmp_path / "good.npz")))
    (folder.path / "model").mkdir()
    (folder.path / "model/tokenizer.json").write_bytes(DAMAGES[damage](b'{"model": {}, "version": "1.0"}' * 5))
    folder.append_clipped_tokens(1, {"positive": [(3, 5)], "negative": []})
    found = read_report(write_report(folder))
    for view, name in (("correction", "scatter.npz"), ("overview", "model/tokenizer.json")):
        (told,) = found[view]["left_out"]
        assert told.startswith(f"{folder.path / name} can't be read, and what the page would have of it is left out: ")
    assert found["overview"]["clipped"] == [["positive advantage", "3 5"]] and found["correction"]["scatter"] is None


@pytest.mark.parametrize("other", [{"step": [1.5]}, {"staleness": [0, 1]}, {"behavior_logprobs": ["a"]}, {"step": 3}], ids=str)
def test_arrays_of_other_types_or_lengths_are_no_scatter(tmp_path: Path, other: dict[str, object]) -> None:
    scatter(tmp_path / "scatter.npz", **other)
    with pytest.raises(ValueError, match="its arrays have the types"):
        ScatterSample.load(tmp_path / "scatter.npz")


CONFIGS = [
    *(f"name: x\nsteps: {steps}\n" for steps in ("null", "abc", "[1]", ".inf", ".nan", "2026-01-01", "{}")),
    "a: b: c\n",
    "a: [1\nb: 2\n",
    "a: \0",
    "a: 2026-99-99\nb: c: d",
    '!!int ""',
    '!!timestamp "x"',
    "steps: !!bool x",
]


@pytest.mark.parametrize("content", CONFIGS)
def test_a_damaged_configuration_is_refused_in_one_sentence(tmp_path: Path, content: str) -> None:
    folder = run_folder(tmp_path / "run")
    (folder.path / "config.yaml").write_text(content)
    for read in (diagnose_run, write_report):
        with pytest.raises(ConfigError, match=r"config\.yaml: (not valid YAML|steps = )") as caught:
            read(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_configuration_that_the_disk_doesn_t_give_now_is_no_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """An attempt of --retries is tried again after an OSError, and never after a ConfigError."""
    folder = run_folder(tmp_path / "run")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))  # as reading does, which names no file

    monkeypatch.setattr("io.open", fail)
    config = folder.path / "config.yaml"
    for read, path in (
        (folder.read_config, config),
        (lambda: run_recipe(folder, ()), folder.recipe_path),
        (lambda: load_config(RunConfig, RECIPE), RECIPE),
    ):
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            read()
        assert caught.value.filename == str(path)


def test_a_notice_is_read_with_its_types_alone() -> None:
    good = RunEvent.parse('2026 warning [waiting] {"what": "a batch", "seconds": 30}')
    assert good is not None and good.notice is not None and good.notice.seconds == 30
    for foreign in ('"what": 1, "seconds": 30', '"what": "a", "seconds": 3.5', '"what": "a", "seconds": 3, "detail": null'):
        found = RunEvent.parse(f"2026 warning [waiting] {{{foreign}}}")
        assert found is not None and found.notice is None and foreign in found.text


def test_a_configuration_that_is_a_list_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("- steps\n- 9\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: holds a list, not the settings of a run"):
        RunFolder(tmp_path).read_config()
