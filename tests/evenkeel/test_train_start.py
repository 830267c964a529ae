"""What a run asks of the nodes against what is there: shown before anything is started, and stopped at if it can't work."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from evenkeel import training as train
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.record.terminal import TerminalView
from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.doctor.facts import NodeFacts
from evenkeel.rollout.engine_settings.engine_capabilities import TESTED_SGLANG
from tests.actors.known_models import QWEN3_8B, save_config
from tests.evenkeel.doctor.test_doctor import eight

VERSIONS = {"sglang": TESTED_SGLANG, "sglang-kernel": "1"}
HAS = {"offered_gpus": 4.0, "free_gpus": 3.0, "cpus": 64.0, "free_cpus": 60.0, "rollout_units": 4.0, "versions": VERSIONS}


@pytest.mark.parametrize("sees", [True, False])
def test_nodes_are_looked_at_before_the_controller_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: bool) -> None:
    """Of two nodes one can't read the run folder: the run stops there, with the table on the terminal and the same in events.log."""
    order, screen = list[str](), io.StringIO()
    config = eight("ray.address=auto", f"model={save_config(tmp_path / 'm', QWEN3_8B)}")

    def nodes(_: object, folder: Path | None, *, within_s: float, by_disk: object) -> list[NodeFacts]:
        order.append(f"nodes were shown {folder}")
        assert within_s == 60.0, "packages that a node reads for the first time take longer than the doctor waits"
        return [NodeFacts(name="10.0.0.1", **HAS), NodeFacts(name="10.0.0.2", **HAS | {"reads_run_folder": sees})]

    def runs(*_: object, **__: object) -> Any:
        order.append("the controller ran")
        raise DataError("and has come to its end")

    monkeypatch.setattr(train, "nodes_of_cluster", nodes)
    monkeypatch.setattr(train, "run_controller", runs)
    monkeypatch.setattr(train, "Controller", lambda *_, **__: None)
    cluster = SimpleNamespace(own_daemons={}, head_address=None, log_folder="logs")
    monkeypatch.setattr(train, "Cluster", lambda _: contextlib.nullcontext(cluster))
    for name in ("ends_with_own_ray", "ends_with_the_head"):
        monkeypatch.setattr(train, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(train, "register_stack_dump", lambda: None)
    monkeypatch.setattr(train, "HALF_OVER", SimpleNamespace(set=lambda _: None))
    monkeypatch.setattr(train, "TerminalView", partial(TerminalView, console=Console(file=screen, width=120)))
    with RunFolder.create(tmp_path / "run", "x") as folder:
        error, said = (DataError, "its end") if sees else (ConfigError, r"the run folder isn't the same on 10\.0\.0\.2: .*Set run_dir")
        with pytest.raises(error, match=said):
            train._run_in(folder, config, None, [], None)  # type: ignore[arg-type]
        events = [event.text for event in folder.read_events()]
    assert order == [f"nodes were shown {folder.path}", "the controller ran"][: 1 + sees]
    assert "GPUs: 8 asked (4 ranks x 1, 4 workers x 1), 8 there, 6 free" in "; ".join(events)
    lines = [line.strip().split(maxsplit=4) for line in screen.getvalue().splitlines()]
    assert ["resource", "asked", "there", "free", "for"] in lines
    assert ["GPU", "8", "8", "6", "4 ranks x 1, 4 workers x 1"] in lines
    assert ["CPU", "8", "128", "120", "4 ranks, 4 workers"] in lines
