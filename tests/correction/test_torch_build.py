"""What torch was built for is read as torch says it, and that there is no GPU is said without it only where that is certain."""

from __future__ import annotations

import sys

import pytest
import torch

from correction.engines import torch_build

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
    ("build", "has_driver", "is_loaded", "certain"),
    [
        (CPU, True, False, True),
        (CUDA, False, False, True),
        (CUDA, True, False, False),
        ({"cuda": None, "hip": "6.4"}, False, False, False),
        (None, False, False, False),
        ({"cuda": None}, False, False, False),
        (CPU, False, True, False),
    ],
    ids=["for CPUs", "no driver", "a driver", "for AMD's GPUs", "no such file", "it says less", "torch can be asked"],
)
def test_where_torch_need_not_be_asked(
    monkeypatch: pytest.MonkeyPatch, build: dict[str, str | None] | None, has_driver: bool, is_loaded: bool, certain: bool
) -> None:
    monkeypatch.setattr(torch_build, "torch_build", lambda: build)
    monkeypatch.setattr(torch_build, "_DRIVER", "libc.so.6" if has_driver else "libnobodys_driver.so.1")
    if not is_loaded:
        monkeypatch.delitem(sys.modules, "torch")
    assert torch_build.sees_no_gpu() is certain
