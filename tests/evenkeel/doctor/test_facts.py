"""Facts of a machine: its GPUs as the driver has them and as torch does, its files, the run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from evenkeel.doctor import gather
from evenkeel.doctor.facts import GpuFact
from evenkeel.doctor.gather import PortListener, gpus_of_driver, nodes_of_cluster, this_node
from evenkeel.doctor.on_nodes import on_nodes
from evenkeel.rollout.engine_settings.engine_capabilities import TESTED_SGLANG
from tests.actors.known_models import QWEN3_8B, save_config
from tests.evenkeel.doctor.test_doctor import DENSE, H100, NO_FOLDER, eight


def test_what_nvidia_smi_says_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in on the path: columns have commas between them, a name could have one, too. What is free of a card that is divided says
    nothing of its parts, whoever has hidden the others, and in which variable."""
    smi = tmp_path / "nvidia-smi"
    lines = (
        "0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0, Disabled",
        "1, GPU-ab22, Strange, Inc. GPU, 1024, [N/A], 12.0, [N/A]",
        "2, GPU-ac33, NVIDIA GB10, [N/A], [N/A], 12.1, [N/A]",
        "3, GPU-ad44, NVIDIA H100 80GB HBM3, 81559, 2000, 9.0, Enabled",
    )
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus_of_driver() == [
        GpuFact("NVIDIA H100 80GB HBM3", 81_559 << 20, 81_000 << 20, "sm_90", 0, "GPU-aa11"),
        GpuFact("Strange, Inc. GPU", 1024 << 20, None, "sm_120", 1, "GPU-ab22"),
        GpuFact("NVIDIA GB10", 0, None, "sm_121", 2, "GPU-ac33"),
        GpuFact("NVIDIA H100 80GB HBM3", 81_559 << 20, None, "sm_90", 3, "GPU-ad44"),
    ]
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert gpus_of_driver() == []


@pytest.mark.parametrize(
    ("visible", "count", "numbers"),
    [
        (None, 4, [0, 1, 2, 3]),
        ("2,3", 2, [2, 3]),
        ("3, 1", 2, [3, 1]),
        ("GPU-c", 1, [2]),
        ("MIG-5", 1, [0]),
        ("", 0, []),
    ],
)
def test_a_card_that_is_hidden_is_not_taken_for_one_that_torch_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, count: int, numbers: list[int]
) -> None:
    """The first is a display's: with "2,3" neither its memory nor who holds it says anything about the run. A MIG part is on some card."""
    import torch

    card = GpuFact("H100", H100.memory, H100.memory, "sm_90")
    cards = [replace(card, number=i, uuid=f"GPU-{name}7", bytes=(i + 1) << 30) for i, name in enumerate("abcd")]
    monkeypatch.setattr(gather, "gpus_of_driver", lambda: cards)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(gather, "visible_gpus", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = this_node(str(tmp_path))
    assert [gpu.number for gpu in here.gpus] == numbers
    assert here.gpu_bytes == tuple(gpu.bytes for gpu in (here.gpus if visible else cards))
    model = f"model={save_config(tmp_path, QWEN3_8B)}"
    assert gather.paper_facts(eight(model)).gpus == tuple(sorted(here.gpu_bytes, reverse=True))
    held = replace(here, gpus=tuple(replace(gpu, free=0) for gpu in here.gpus), offered_gpus=8.0, free_gpus=8.0)
    told = [found.sentence for found in on_nodes([held], eight(), DENSE) if "another process holds the rest" in found.sentence]
    assert [f"GPU {number} (" in text for number, text in zip(numbers, told, strict=True)] == [True] * len(numbers)


def test_facts_of_this_machine(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    sign.write_text("token")
    answer = tmp_path / "answer"
    here = this_node(str(save_config(tmp_path / "m", QWEN3_8B)), sign=str(sign), token="token", answer=str(answer))
    assert len(here.versions["evenkeel's own files"]) == 12
    assert not here.model_obstacle and here.reads_run_folder and here.versions["torch"] and here.shared_memory > 0
    assert here.has_plugin and here.versions["sglang"].partition("+")[0] == TESTED_SGLANG
    assert gather._sees_both_ways(here, str(answer), "token") and not gather._sees_both_ways(here, str(tmp_path / "elsewhere"), "token")
    other = this_node(str(tmp_path), sign=str(sign), token="another's", answer=str(tmp_path / "not-written"))
    assert other.model_obstacle == NO_FOLDER and not other.reads_run_folder and not (tmp_path / "not-written").exists()
    read_only = this_node(str(tmp_path), sign=str(sign), token="token", answer=str(tmp_path / "no-folder" / "answer"))
    assert not read_only.reads_run_folder, "it reads there, and can't write"


@dataclass
class QuietRay:
    """Ray as far as the doctor asks it, of three nodes; the driver is on the second. Tasks run here. An answer takes half a second, silence
    the whole wait."""

    silent: dict[str, Exception | None]
    """Nodes that don't answer; None: never, else so."""
    dropped: set[str] = field(default_factory=set)
    """Nodes whose attempt to reach the listener takes the whole wait."""
    now: float = 1000.0
    closed: list[str] = field(default_factory=list)

    def nodes(self) -> list[dict[str, Any]]:
        has = {"GPU": 4.0, "CPU": 8.0, "rollout": 4.0}
        return [{"NodeID": one * 56, "Alive": True, "NodeManagerAddress": f"10.0.0.{one}", "Resources": has} for one in "123"]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "2" * 56)

    def remote(self, kind: Callable[..., Any]) -> Any:
        def on(scheduling_strategy: Any, **_: Any) -> Any:
            return SimpleNamespace(remote=self._called(kind, scheduling_strategy.node_id[0]))

        return SimpleNamespace(options=on)

    def _called(self, kind: Callable[..., Any], node: str) -> Callable[..., Any]:
        if kind is PortListener:
            opened = (node, lambda: (f"10.0.0.{node}", 40_123))
            return lambda: SimpleNamespace(node=node, open=SimpleNamespace(remote=lambda: opened))
        if kind is this_node:
            return lambda *args, **facts: (node, lambda: this_node(*args, **facts))
        return lambda address: (node, lambda: self._reached(node, address))

    def _reached(self, node: str, address: tuple[str, int]) -> str:
        if node in self.dropped:
            self.now += 60.0
            raise ray.exceptions.GetTimeoutError
        return f"{node} came to {address[0]}"

    def get(self, call: tuple[str, Callable[[], Any]], timeout: float) -> Any:
        node, value = call
        if node not in self.silent:
            self.now += min(timeout, 0.5)
            return value()
        if (error := self.silent[node]) is not None:
            raise error
        self.now += timeout
        raise ray.exceptions.GetTimeoutError

    def kill(self, listener: Any) -> None:
        self.closed.append(listener.node)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> QuietRay:
    own = QuietRay({})
    for name in ("nodes", "remote", "get", "kill", "get_runtime_context"):
        monkeypatch.setattr(ray, name, getattr(own, name))
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", dict)
    monkeypatch.setattr(gather, "time", SimpleNamespace(monotonic=lambda: own.now))
    return own


@pytest.mark.parametrize("silent", ["", "1", "2", "3", "123"])
def test_nodes_that_never_answer_are_named_after_15_s_in_all(quiet: QuietRay, tmp_path: Path, silent: str) -> None:
    """The first is that of the listener. What the others have told is known; of a silent one nothing is made up."""
    quiet.silent = dict.fromkeys(silent)
    model = save_config(tmp_path / "m", QWEN3_8B)
    config = eight("ray.address=auto", f"model={model}")
    found = nodes_of_cluster(config, tmp_path)
    assert quiet.now <= 1000.0 + 15.0 and quiet.closed == ["1"]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert [(node.name, node.silence) for node in found] == [(f"10.0.0.{n}", "no answer in 15 s" if n in silent else "") for n in "123"]
    assert all(node.reads_run_folder and node.offered_gpus == 4.0 for node in found)
    assert [node.is_drivers for node in found] == [False, True, False], "told by Ray, also where nobody answers"
    told = ["", "2 came to 10.0.0.1", "3 came to 10.0.0.1"]
    unreached = [told[int(n) - 1] * ("1" not in silent) for n in "123" if n not in silent]
    assert [node.why_unreachable for node in found if not node.silence] == unreached
    unmade = ["" if n == "1" or "1" not in silent else "no listener could be started there in time" for n in "123" if n not in silent]
    assert [node.way_not_known for node in found if not node.silence] == unmade
    of_silent = [one for one in on_nodes(found, config, DENSE) for n in silent if f"10.0.0.{n}" in one.sentence]
    assert [one.severity for one in of_silent] == ["warn"] * len(silent)
    said = [one.sentence for one in of_silent]
    assert all(f"10.0.0.{n} doesn't answer a small task (no answer in 15 s)" in one for n, one in zip(silent, said, strict=True))


@pytest.mark.parametrize("within_s", [15.0, 60.0])
def test_a_way_that_was_not_tried_to_its_end_is_not_known(quiet: QuietRay, tmp_path: Path, within_s: float) -> None:
    """A firewall that drops packets lets an attempt end after the limit: that is no open port."""
    quiet.dropped = {"2"}
    config = eight("ray.address=auto", f"model={save_config(tmp_path / 'm', QWEN3_8B)}")
    found = nodes_of_cluster(config, tmp_path, within_s=within_s)
    assert [(node.why_unreachable, node.way_not_known) for node in found] == [
        ("", ""),
        ("", f"no answer in {within_s:g} s"),
        ("3 came to 10.0.0.1", ""),
    ]
    (told,) = [one for one in on_nodes(found, config, DENSE) if "isn't known whether" in one.sentence]
    assert told.severity == "warn" and "10.0.0.2 can reach a free port" in told.sentence and f"in {within_s:g} s" in told.sentence


class Wordless(ray.exceptions.RayError):
    def __str__(self) -> str:
        return ""


def test_a_node_whose_task_fails_without_a_word_is_told_by_the_error_s_name(quiet: QuietRay, tmp_path: Path) -> None:
    quiet.silent = {"2": Wordless()}
    found = nodes_of_cluster(eight("ray.address=auto", f"model={save_config(tmp_path / 'm', QWEN3_8B)}"), tmp_path)
    assert [node.silence for node in found] == ["", "Wordless", ""]


def test_a_node_whose_task_fails_is_a_finding_too(quiet: QuietRay, tmp_path: Path) -> None:
    quiet.silent = {"2": ray.exceptions.RaySystemError("a trace\nModuleNotFoundError: No module named 'actors'")}
    config = eight("ray.address=auto", f"model={save_config(tmp_path / 'm', QWEN3_8B)}")
    found = [one for one in on_nodes(nodes_of_cluster(config, tmp_path), config, DENSE) if "10.0.0.2" in one.sentence]
    assert [one.severity for one in found] == ["fail"] and "No module named 'actors'" in found[0].sentence
    assert "same Python" in found[0].setting
