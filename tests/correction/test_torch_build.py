"""What torch was built for is read as torch says it, and that there is no GPU is said without it only where that is certain."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from evenkeel.engines import machine as torch_build
from tests.driver_stand_in import stand_in_driver

CPU = {"cuda": None, "hip": None}
CUDA = {"cuda": "13.0", "hip": None}


def test_the_file_says_what_torch_says() -> None:
    found = torch_build.torch_build()
    assert found is not None and (found["__version__"], found["cuda"], found["hip"]) == (
        str(torch.__version__),
        torch.version.cuda,
        torch.version.hip,
    )
    assert torch_build.has_cuda() == (torch.version.cuda is not None)


@pytest.mark.parametrize(
    ("build", "has_driver", "is_loaded", "count"),
    [
        (CPU, True, False, 0),
        (CUDA, False, False, 0),
        (CUDA, True, False, None),
        ({"cuda": None, "hip": "6.4"}, False, False, None),
        (None, False, False, None),
        ({"cuda": None}, False, False, None),
        (CPU, False, True, None),
    ],
    ids=["for CPUs", "no driver", "a strange driver", "for AMD's GPUs", "no such file", "it says less", "torch can be asked"],
)
def test_where_torch_need_not_be_asked(
    monkeypatch: pytest.MonkeyPatch, build: dict[str, str | None] | None, has_driver: bool, is_loaded: bool, count: int | None
) -> None:
    monkeypatch.setattr(torch_build, "torch_build", lambda: build)
    monkeypatch.setattr(torch_build, "_DRIVER", "libc.so.6" if has_driver else "libnobodys_driver.so.1")
    if not is_loaded:
        monkeypatch.delitem(sys.modules, "torch")
    assert torch_build.gpus_without_torch() == count


@pytest.mark.parametrize(
    ("driver", "count"),
    [
        ({}, 8),
        ({"version": 13020}, 8),
        ({"version": 12090}, None),
        ({"init": 100}, 0),
        ({"init": 803}, None),
        ({"counts": 3}, None),
        ({"count": 0}, 0),
    ],
    ids=["as CUDA 13.0", "newer", "too old for torch's CUDA", "all hidden", "another error", "no count", "none"],
)
def test_the_driver_s_count_is_torch_s_where_torch_can_use_that_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: dict[str, int], count: int | None
) -> None:
    """Torch takes seconds to import, for this alone. Where it may fail for another reason it is asked, which can say why."""
    monkeypatch.setattr(torch_build, "torch_build", lambda: CUDA)
    monkeypatch.setattr(torch_build, "_DRIVER", str(stand_in_driver(tmp_path, **driver)))
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_build.gpus_without_torch() == count
