"""`make train` and `make gpu`: which installation, on which device, and what is said on a machine with a GPU. Nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEVICES = 'echo "$(basename "$0") $* CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-unset}" >>calls\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The Makefile, and programs that write down how they are called."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-gpu.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("evenkeel", "pip", "python"):
        write_program(programs / name, DEVICES)
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make(folder: Path, *targets: str, has_gpu: bool = False) -> tuple[str, list[str]]:
    """(output, calls)"""
    write_program(folder / "smi" / "nvidia-smi", "exit 0" if has_gpu else "exit 9")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "MAKE"))}
    environment["PATH"] = f"{folder / 'smi'}:{environment['PATH']}"
    (folder / "calls").write_text("")
    done = subprocess.run(["make", *targets], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, (folder / "calls").read_text().splitlines()


def train_call(calls: list[str]) -> str:
    return next(call for call in calls if call.startswith("evenkeel train"))


def test_the_quick_start_hides_a_gpu_and_says_how_to_use_it(folder: Path) -> None:
    output, calls = make(folder, "train", has_gpu=True)
    assert "There is a GPU here, but this quick start runs on the CPU. For the GPU: make gpu, then evenkeel train recipes/qwen3_" in output
    assert train_call(calls).endswith("CUDA_VISIBLE_DEVICES="), "hidden: set, and empty"
    assert "init-model" in calls[-2] and calls[-2].endswith("CUDA_VISIBLE_DEVICES=")


def test_without_a_gpu_nothing_is_said_of_one(folder: Path) -> None:
    output, calls = make(folder, "train")
    assert "GPU" not in output and train_call(calls)


def test_the_gpu_installation_is_one_of_its_own_and_uses_the_gpu(folder: Path) -> None:
    make(folder, "train", has_gpu=True)
    output, calls = make(folder, "gpu")
    (install,) = [call for call in calls if call.startswith("pip install")]
    assert "-c constraints-gpu.txt -e .[gpu,dev]" in install and "--no-deps" not in install and "evenkeel doctor RECIPE" in output
    output, calls = make(folder, "train", has_gpu=True)
    assert train_call(calls).endswith("CUDA_VISIBLE_DEVICES=unset") and "quick start" not in output
    assert not any(call.startswith("pip") for call in calls), "the plain installation doesn't come over it"


def test_a_newer_list_of_packages_installs_the_same_kind_again(folder: Path) -> None:
    make(folder, "gpu")
    os.utime(folder / "constraints-gpu.txt", (2e9, 2e9))
    _, calls = make(folder, "train")
    assert ["-c constraints-gpu.txt" in call for call in calls if call.startswith("pip")] == [True]


def test_the_suite_hides_gpus_and_what_only_a_gpu_computes_has_a_target_of_its_own(folder: Path) -> None:
    """Other tests compare bits and start several ranks, which NCCL would not connect on one GPU. All that skip without a GPU are named."""
    for targets in (["train"], ["gpu"]):  # the plain installation's torch sees no GPU
        make(folder, *targets)
        for target in ("test", "test-slow"):
            _, calls = make(folder, target, has_gpu=True)
            assert calls[-1].startswith("python -m pytest")
            assert calls[-1].endswith("CUDA_VISIBLE_DEVICES=" if targets == ["gpu"] else "CUDA_VISIBLE_DEVICES=unset"), target
    _, calls = make(folder, "test-gpu", has_gpu=True)
    assert calls[-1].endswith("CUDA_VISIBLE_DEVICES=unset")
    named = calls[-1].split("-m slow ")[1].split(" CUDA")[0].split()
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    asking = {str(path.relative_to(ROOT)) for path in tests if "skipif(not torch.cuda.is_available()" in path.read_text()}
    assert len(asking) >= 3 and [one for one in asking if not one.startswith(tuple(named))] == []
