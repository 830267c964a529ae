"""What is installed has one name at top level: from a wheel, from one of the sdist, from a checkout beside an empty folder `evenkeel`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("actors", "correction", "engines", "learner", "rollout")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and an sdist of a copy, and a wheel of the unpacked sdist."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    wanted = ("pyproject.toml", "README.md", "LICENSE", "evenkeel", *PACKAGES)
    for name in wanted:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    sdist = folder / _build(source, "sdist", folder)
    with tarfile.open(sdist) as file:
        file.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    (folder / "again").mkdir()
    again = folder / "again" / _build(unpacked, "wheel", folder / "again")
    return {"wheel": folder / _build(source, "wheel", folder), "of the sdist": again}


def _build(source: Path, kind: str, folder: Path) -> str:
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("kind", ["wheel", "of the sdist"])
def test_a_wheel_has_one_name_and_all_files(kind: str, built: dict[str, Path], tmp_path: Path) -> None:
    names = zipfile.ZipFile(built[kind]).namelist()
    assert {name.split("/")[0] for name in names} == {"evenkeel", "evenkeel-0.1.0.dist-info"}
    sources = [path for package in PACKAGES for ending in ("*.py", "*.c") for path in (ROOT / package).rglob(ending)]
    ours = {f"evenkeel/{path.relative_to(ROOT)}" for path in sources}
    ours |= {str(path.relative_to(ROOT)) for path in (ROOT / "evenkeel").rglob("*.py")}
    others = {"evenkeel/py.typed", "evenkeel/correction/py.typed"}
    others |= {str(path.relative_to(ROOT)) for path in (ROOT / "evenkeel" / "dashboard" / "page").iterdir()}
    assert {name for name in names if "dist-info" not in name} == ours | others
    zipfile.ZipFile(built[kind]).extractall(tmp_path / "site")
    (tmp_path / "work" / "evenkeel").mkdir(parents=True)  # an empty folder of that name is none of ours
    said = _said([sys.executable, "-m", "evenkeel", "presets", "icepop"], tmp_path / "work", tmp_path / "site")
    assert "icepop" in said


def test_a_checkout_is_found_beside_an_empty_folder_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "evenkeel").mkdir()
    code = "import evenkeel.actors.config as one; print(one.__name__, one.__file__)"
    assert _said([sys.executable, "-c", code], tmp_path, ROOT) == f"evenkeel.actors.config {ROOT}/evenkeel/actors/config.py\n"


def _said(command: list[str], folder: Path, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
