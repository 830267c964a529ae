"""`evenkeel.correction` alone: every module of it is imported where nothing but torch, pydantic and what those need can be found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.test_layers import module_name

ROOT = Path(__file__).parents[1]


def needed_by(*names: str) -> set[str]:
    """Installed distributions that the named ones need, without extras, themselves included."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            requirements = [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:  # only for another platform
            continue
        found.add(name)
        waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def bare_environment(folder: Path) -> None:
    """A folder for sys.path with links to what torch and pydantic need, and to the package under test."""
    for name in needed_by("torch", "pydantic"):
        own = distribution(name)
        tops = {Path(file).parts[0] for file in own.files or () if not str(file).startswith("..")}
        for top in tops - {"__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(own.locate_file(top))))
    (folder / "evenkeel").mkdir()
    (folder / "evenkeel" / "correction").symlink_to(ROOT / "correction")


def run_bare(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    # -S: no site-packages; -E and -P: no other way in.
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); sys.dont_write_bytecode = True\n{code}"
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-S", "-E", "-P", "-c", program], capture_output=True, text=True, env=environment, check=False)


def test_every_module_of_correction_imports_with_torch_and_pydantic_alone(tmp_path: Path) -> None:
    bare_environment(tmp_path)
    modules = [module_name(path) for path in sorted((ROOT / "correction").rglob("*.py"))]
    code = f"""
import importlib, json
for name in {modules!r}:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""
    done = run_bare(tmp_path, code)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "evenkeel.correction" in loaded
    assert not loaded & {"ray", "sglang", "megatron", "transformers", "scipy", "evenkeel.engines", "evenkeel.actors"}


def test_the_environment_is_bare(tmp_path: Path) -> None:
    """Otherwise the test above says nothing."""
    bare_environment(tmp_path)
    for name in ("ray", "omegaconf", "evenkeel.actors"):
        assert "ModuleNotFoundError" in run_bare(tmp_path, f"import {name}").stderr
