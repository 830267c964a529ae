"""Facts of a machine: its GPUs as the driver has them and as torch does, its files, the run folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.doctor import gather
from actors.doctor.driver_gpus import gpus_of_driver
from actors.doctor.facts import GpuFact
from actors.doctor.gather import this_node
from actors.doctor.node_rules import on_nodes
from tests.actors.doctor.test_doctor import DENSE, H100, NO_FOLDER, eight
from tests.actors.known_models import QWEN3_8B, save_config


def test_what_nvidia_smi_says_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in on the path: columns have commas between them, a name could have one, too."""
    smi = tmp_path / "nvidia-smi"
    lines = ("0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0", "1, GPU-ab22, Strange, Inc. GPU, 1024, [N/A], 12.0")
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus_of_driver() == [
        GpuFact("NVIDIA H100 80GB HBM3", 81_559 << 20, 81_000 << 20, "sm_90", 0, "GPU-aa11"),
        GpuFact("Strange, Inc. GPU", 1024 << 20, 0, "sm_120", 1, "GPU-ab22"),
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


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    sign = tmp_path / "sign"
    sign.write_text("token")
    answer = tmp_path / "answer"
    here = this_node(str(save_config(tmp_path / "m", QWEN3_8B)), sign=str(sign), token="token", answer=str(answer))
    assert len(here.versions["evenkeel's own files"]) == 12 and here.nccl["NCCL_DEBUG"] == "WARN"
    assert not here.model_obstacle and here.reads_run_folder and here.versions["torch"] and here.shared_memory > 0
    assert gather._sees_both_ways(here, str(answer), "token") and not gather._sees_both_ways(here, str(tmp_path / "elsewhere"), "token")
    other = this_node(str(tmp_path), sign=str(sign), token="another's", answer=str(tmp_path / "not-written"))
    assert other.model_obstacle == NO_FOLDER and not other.reads_run_folder and not (tmp_path / "not-written").exists()
    read_only = this_node(str(tmp_path), sign=str(sign), token="token", answer=str(tmp_path / "no-folder" / "answer"))
    assert not read_only.reads_run_folder, "it reads there, and can't write"
