"""evenkeel-correction, the distribution of the mathematics alone: built from the same folder, installed under a name of its own.

What it computes is compared with what `correction` computes here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from evenkeel import correction
from evenkeel.correction import CorrectionConfig, correct, diagnose, policy_loss, settle
from tests.correction.fixtures import random_batch
from tests.test_bare_import import bare_environment

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "distribution"
TENSORS = ("token_ids", "offsets", "loss_mask", "behavior_logprobs", "advantages", "weight_versions", "group_ids", "proximal_logprobs",
           "at_sampling_logprobs", "reference_logprobs", "turn_ids", "topk_ids", "topk_logprobs")  # fmt: skip
ENVIRONMENTS = {"oldest": ("torch==2.4.0", "pydantic==2.7.0", "numpy<2"), "newest": ("torch", "pydantic")}
"""What the oldest and the newest supported environment are made of; numpy because torch 2.4 says much without it."""


def project(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())["project"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by setuptools from a copy, so that nothing is left in the repository."""
    folder = tmp_path_factory.mktemp("distribution")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder / "source", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / done.stdout.splitlines()[-1]


@cache
def question() -> tuple[dict[str, Any], dict[str, Any]]:
    """(what distribution_check.py is asked, what `correction` answers): gradient and diagnostics of every preset."""
    batch, target = random_batch(11, topk=3)
    listed = batch.topk_logprobs + 0.1
    tensors = {name: getattr(batch, name).tolist() for name in TENSORS}
    asked = {"tensors": tensors | {"target_logprobs": target.tolist(), "target_topk_logprobs": listed.tolist()}}
    batch = replace(batch, learner_version=5)
    target.requires_grad_()
    expected = {}
    for preset in correction.PRESETS:
        config = CorrectionConfig(preset=preset)
        corrected = settle(correct(batch, config), target, config)
        trained = policy_loss(corrected, target, config, target_topk_logprobs=listed)
        (gradient,) = torch.autograd.grad(trained.loss, target)
        numbers = diagnose(batch, corrected, target, decided=trained.decided, detailed=True)
        expected[preset] = {"gradient": gradient.tolist(), "numbers": numbers}
    return asked, expected


def check_same(said: str) -> dict[str, Any]:
    _, expected = question()
    answer = json.loads(said.splitlines()[-1])
    assert sorted(answer["names"]) == sorted(correction.__all__)
    assert set(answer["found"]) == set(expected)
    for preset, numbers in expected.items():
        assert answer["found"][preset]["gradient"] == pytest.approx(numbers["gradient"], rel=1e-6, abs=1e-12), preset
        assert answer["found"][preset]["numbers"] == pytest.approx(numbers["numbers"], rel=1e-6, abs=1e-9), preset
    return answer


def test_the_wheel_has_the_mathematics_and_no_other_name(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in files}
    assert tops == {"evenkeel_correction", f"evenkeel_correction-{project(SOURCE / 'pyproject.toml')['version']}.dist-info"}
    ours = {str(path.relative_to(ROOT / "correction")) for path in (ROOT / "correction").rglob("*.py")}
    assert {name.partition("/")[2] for name in files if name.endswith(".py")} == ours
    assert any(name.endswith("licenses/LICENSE") for name in files)
    assert "evenkeel_correction/py.typed" in files, "type checkers would ignore its annotations"


def test_it_is_of_evenkeels_version_and_asks_for_what_evenkeel_has() -> None:
    """Its bounds hold the versions of the main distribution; and it needs torch and pydantic alone."""
    own, main = project(SOURCE / "pyproject.toml"), project(ROOT / "pyproject.toml")
    assert own["version"] == main["version"] == correction.__version__
    needs = {requirement.name: requirement for requirement in map(Requirement, own["dependencies"])}
    assert set(needs) == {"torch", "pydantic"}
    assert torch.__version__.split("+")[0] in needs["torch"].specifier
    for name, specifier in (("torch", "2.4.0"), ("pydantic", "2.7.0")):
        assert f"{name}=={specifier}" in ENVIRONMENTS["oldest"] and specifier in needs[name].specifier


def test_installed_alone_it_computes_what_correction_computes(wheel: Path, tmp_path: Path) -> None:
    """In an environment with torch, pydantic and the wheel: no package `evenkeel`, no engine."""
    bare_environment(tmp_path)
    shutil.rmtree(tmp_path / "evenkeel")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        + (ROOT / "tests" / "distribution_check.py").read_text().partition("from __future__ import annotations\n")[2]
    )
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-E", "-P", "-c", program]
    done = subprocess.run(command, input=json.dumps(question()[0]), capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = check_same(done.stdout)
    assert not {"evenkeel", "ray", "sglang", "megatron", "transformers"} & set(answer["tops"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("age", ENVIRONMENTS)
def test_the_oldest_and_the_newest_torch(age: str, wheel: Path, tmp_path: Path) -> None:
    """Installed by pip. EVENKEEL_ENVIRONMENTS=FOLDER keeps the environments (5 GB each where torch comes with CUDA) for the next time."""
    folder = Path(os.environ.get("EVENKEEL_ENVIRONMENTS", tmp_path)) / age
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([*pip, *ENVIRONMENTS[age]], check=True)
    subprocess.run([*pip, "--no-deps", "--force-reinstall", wheel], check=True)
    command = [python, "-P", ROOT / "tests" / "distribution_check.py"]
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    asked = json.dumps(question()[0])
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = check_same(done.stdout)
    if age == "oldest":
        assert answer["versions"][0].startswith("2.4.") and answer["versions"][1].startswith("2.7.")
