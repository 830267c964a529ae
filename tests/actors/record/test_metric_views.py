"""Trackers that metrics.views names, by their real packages: Weights & Biases offline, MLflow with a file; and a function of one's own."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from evenkeel.actors.config import MetricsConfig
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.metric_views import TrackerView, check_views, open_views
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.correction.errors import ConfigError

KEY = "0123456789abcdef" * 3
OWN = """
class Shown:
    def __init__(self, run):
        self.lines = run.folder / "own.txt"
        self.say(f"{run.name} {run.id} {run.config}")
    def say(self, text):
        with self.lines.open("a") as file:
            print(text, file=file)
    def write(self, step, numbers):
        self.say(f"{step} {numbers}")
    def close(self):
        self.say("closed")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """Of a run with a name that no tracker takes for an id."""
    with RunFolder.create(tmp_path / "lr=1e-5: 50% #2", "x") as folder:
        folder.write_text("config.yaml", f"name: x\nlearner: {{learning_rate: 0.5}}\nray: {{env: {{MY_KEY: {KEY}}}}}\n")
        yield folder


def shown(folder: RunFolder, view: str, *steps: tuple[int, dict[str, float]]) -> list[str]:
    """What a run, or a part of it, tells of its one view, which is given these steps."""
    told = list[str]()
    (one,) = open_views(folder, MetricsConfig(views=(view,)), told.append)
    assert isinstance(one, TrackerView)
    for step, numbers in steps:
        one.write(StepMetrics(step, numbers))
    one.close(within_s=200.0)
    return told


def kept_id(folder: RunFolder) -> str:
    (kept,) = re.findall(r"^([0-9a-f]{16})\n$", (folder.path / "tracker_id").read_text())
    return str(kept)


def holders_of_the_key(folder: RunFolder) -> list[str]:
    return [path.name for path in folder.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def of_wandb(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings, and numbers line by line, of what Weights & Biases keeps of a run that is offline: records in LevelDB's format of a log
    (blocks of 32 KiB; a record or a part of one begins with a checksum, its size, and which part it is) after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole, settings, lines = file.read_bytes(), 7, b"", {}, []
    while at + 7 <= len(content):
        size, part = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        if part in (1, 4):  # whole, or the last part
            record, whole = Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "run":
                settings = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                lines.append({name: value for name, value in items.items() if not name.startswith("_")})
    return settings, lines


def test_weights_and_biases_offline_has_each_step_and_no_key(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of an earlier step among them. What a resume adds is the same run's: its files have one id."""
    import wandb

    for name, value in {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    assert shown(folder, "wandb", (1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5}), (1, {"held_out/accuracy": 0.75})) == []
    assert shown(folder, "wandb", (3, {"reward/mean": 1.0})) == []
    wandb.teardown()  # its service writes the last lines as it ends
    files = sorted((folder.path / "wandb").glob(f"offline-run-*/run-{kept_id(folder)}.wandb"))
    (settings, lines), (_, later) = map(of_wandb, files)
    assert lines == [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.5}, {"step": 1, "held_out/accuracy": 0.75}]
    assert later == [{"step": 3, "reward/mean": 1.0}]
    assert settings["learner"] == {"learning_rate": 0.5} and settings["ray"] == {"env": ["MY_KEY"]}
    assert holders_of_the_key(folder) == ["config.yaml"], "where the run itself has ray.env"


def test_mlflow_goes_on_with_the_run_after_a_resume(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In mlflow.db of the run's folder, unless MLFLOW_TRACKING_URI says otherwise. MLflow takes no + in a name."""
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert shown(folder, "mlflow", (1, {"reward/mean": 0.25, "staleness/tokens/8+": 4.0}), (1, {"held_out/accuracy": 0.75})) == []
    assert shown(folder, "mlflow", (2, {"reward/mean": 0.5})) == []
    client = MlflowClient(f"sqlite:///{folder.path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert run.data.metrics == {"reward/mean": 0.5, "staleness/tokens/8_": 4.0, "held_out/accuracy": 0.75}
    assert run.data.params == {"name": "x", "learner.learning_rate": "0.5", "ray.env": "['MY_KEY']"}
    assert (run.info.run_name, run.info.status) == (folder.path.name, "FINISHED")
    assert holders_of_the_key(folder) == ["config.yaml"]


def test_a_function_of_ones_own_shows_a_run(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies where the run is started; what is not finite it is not given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_view.py").write_text(OWN)
    check_views(["my_own_view:Shown"])
    assert shown(folder, "my_own_view:Shown", (1, {"reward/mean": 0.25, "learner/loss": float("nan")})) == []
    first, *rest = (folder.path / "own.txt").read_text().splitlines()
    assert first.startswith(f"{folder.path.name} {kept_id(folder)} {{'name': 'x', 'learner'") and KEY not in first
    assert rest == ["1 {'reward/mean': 0.25}", "closed"]


@pytest.mark.parametrize(
    ("views", "said"),
    [
        (["wandd"], "views has 'wandd', which is no view. Did you mean wandb?"),
        (["my_views.py"], "which is no view. Take one of tensorboard, wandb, mlflow, or MODULE:FUNCTION of your own"),
    ],
)
def test_a_mistyped_view_is_refused_before_a_run(views: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        MetricsConfig(views=tuple(views))


def test_views_whose_package_or_function_is_not_there_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenkeel.actors.record.metric_views.find_spec", lambda _: None)  # as if nothing were installed
    with pytest.raises(
        ConfigError, match=re.escape("metrics.views has mlflow: its package is not installed. Install it with `pip install")
    ):
        check_views(["tensorboard", "mlflow"])
    with pytest.raises(ConfigError, match=r"metrics\.views = json:lods: json has no lods; did you mean loads\?"):
        check_views(["json:lods"])


def test_tensorboard_can_be_left_out(folder: RunFolder) -> None:
    views: Mapping[tuple[str, ...], int] = {(): 0, ("tensorboard",): 1}
    assert {names: len(open_views(folder, MetricsConfig(views=names), print)) for names in views} == views
    assert MetricsConfig().views == ("tensorboard",) and not (folder.path / "tracker_id").exists()
