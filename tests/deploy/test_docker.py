"""The Dockerfiles: pinned, in order, of files and commands that exist; and the steps of the one for CPUs in a bare root.

The bare root is Debian 12 with its own Python 3.11 in the place of the image python:3.11-slim-bookworm, made by debootstrap; wheels come
from where pip finds them on this machine. What that can't show: the base images themselves, and anything of a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FILES = ("Dockerfile", "Dockerfile.cpu")
INSTRUCTIONS = {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}


def steps(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined, comments left out."""
    lines = [line for line in (ROOT / "deploy" / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def arguments(name: str, instruction: str) -> list[str]:
    return [text for kind, text in steps(name) if kind == instruction]


@pytest.mark.parametrize("name", FILES)
def test_instructions_are_in_order(name: str) -> None:
    kinds = [kind for kind, _ in steps(name)]
    assert set(kinds) <= INSTRUCTIONS and kinds[0] == "FROM" and kinds.count("FROM") == 1 and kinds[-1] == "CMD"
    install = next(i for i, (kind, text) in enumerate(steps(name)) if kind == "RUN" and "make " in text and "apt-get" not in text)
    assert kinds.index("COPY") < install, "what is installed has to be there"


@pytest.mark.parametrize(("name", "base"), [("Dockerfile", r"nvidia/cuda:13\.\d+\.\d+-\S+"), ("Dockerfile.cpu", r"python:3\.11\.\d+-\S+")])
def test_the_base_is_pinned_to_what_the_packages_are_made_for(name: str, base: str) -> None:
    (image,) = arguments(name, "FROM")
    assert re.fullmatch(base, image), "to the patch level; torch 2.13 has CUDA 13"
    assert "transformer-engine-cu13" in (ROOT / "constraints-gpu.txt").read_text()
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.11,<3.13"


@pytest.mark.parametrize("name", FILES)
def test_shell_steps_are_shell_and_leave_no_lists_of_packages(name: str) -> None:
    for command in arguments(name, "RUN"):
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0, command
        if "apt-get" in command:
            assert command.startswith("apt-get update && apt-get install -y --no-install-recommends ")
            assert command.endswith("&& rm -rf /var/lib/apt/lists/*")


@pytest.mark.parametrize(("name", "target"), [("Dockerfile", "gpu"), ("Dockerfile.cpu", ".venv/installed")])
def test_what_is_installed_is_what_the_makefile_installs(name: str, target: str) -> None:
    command = arguments(name, "RUN")[-1]
    assert command.split()[:2] == ["make", target]
    planned = subprocess.run([*command.split(), "--dry-run", "--always-make"], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = "-c constraints-gpu.txt -e '.[gpu,dev]'" if target == "gpu" else "-c constraints.txt --no-deps sglang"
    assert wanted in planned.stdout and f"test -x .venv/bin/python || python3{'.12' * (target == 'gpu')} -m venv .venv" in planned.stdout


def test_the_image_has_what_nccl_loads_for_infiniband() -> None:
    """NCCL opens these libraries while it runs; where they are missing it takes TCP, at a tenth of the speed or less."""
    (packages, _) = arguments("Dockerfile", "RUN")
    assert {"libibverbs1", "ibverbs-providers"} <= set(packages.split())


def pins(name: str) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_both_installations_pin_what_sglang_and_this_project_name() -> None:
    """A version may differ between them only where SGLang, which a CPU gets without its dependencies, wants its own."""
    of_sglang = {one.name: str(one.specifier) for one in map(Requirement, requires("sglang") or ()) if one.marker is None}
    on_gpus, on_cpus = pins("constraints-gpu.txt"), pins("constraints.txt")
    for name, version in on_gpus.items():
        wanted = of_sglang.get(name, "")
        assert not wanted.startswith("==") or wanted == f"=={version}", f"constraints-gpu.txt: {name}; sglang wants {wanted}"
        assert on_cpus.get(name) in (None, version) or wanted == f"=={version}", f"{name}: {version} on GPUs, {on_cpus[name]} on CPUs"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for one in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["gpu"]]):
        assert one.name not in on_gpus or on_gpus[one.name] in one.specifier, f"constraints-gpu.txt: {one.name}; pyproject.toml has {one}"


def test_what_is_large_or_private_stays_outside() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"**/.git", "**/.venv", "models", "runs"} <= set(ignored)
    packages = {"evenkeel", "actors", "rollout", "learner", "engines", "correction"}
    packages |= {"recipes", "deploy", "docs", "tests", "Makefile", "pyproject.toml"}
    assert packages & set(ignored) == set() and all((ROOT / package).exists() for package in packages)


# --- executed --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Debian of its own, in a folder; skipped where that can't be made."""
    if os.getuid() != 0:
        pytest.skip("a bare root needs root")
    folder = tmp_path_factory.mktemp("docker")
    fetched = subprocess.run(["apt-get", "download", "debootstrap"], cwd=folder, capture_output=True, text=True, check=False)
    if fetched.returncode != 0:
        pytest.skip(f"no debootstrap to be had: {fetched.stderr.strip().splitlines()[-1]}")
    subprocess.run(["dpkg", "-x", *(str(path) for path in folder.glob("*.deb")), str(folder / "tool")], check=True)
    root = folder / "root"
    made = subprocess.run(
        ["sh", str(folder / "tool/usr/sbin/debootstrap"), "--variant=minbase", "--include=ca-certificates,python3,python3-venv,python3-dev",
         "bookworm", str(root), "http://deb.debian.org/debian"],
        env=os.environ | {"DEBOOTSTRAP_DIR": str(folder / "tool/usr/share/debootstrap")},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip(f"debootstrap: {made.stdout[-300:]}")
    yield root
    shutil.rmtree(root, ignore_errors=True)


def inside(root: Path, command: str, folder: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A shell command in the root, which has its own /proc, an empty environment, and of this machine /sys, /dev, the network and pip's
    settings.

    An index that a Dockerfile names would take the place of this machine's, which has the same wheels, and may be out of reach here.
    """
    binds = "".join(f"mkdir -p {root}{path} && mount --bind {path} {root}{path} && " for path in _where_pip_looks())
    kernel = f"mount -t proc proc {root}/proc && mount --rbind /sys {root}/sys && mount --rbind /dev {root}/dev"  # as in a container
    program = f'{kernel} && {binds}exec chroot {root} /bin/sh -c "$1"'
    shown = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"} | variables
    shown.pop("PIP_EXTRA_INDEX_URL", None)
    assigned = " ".join(f"{name}='{value}'" for name, value in shown.items())
    script = f"export {assigned} && mkdir -p {folder} && cd {folder} && {command}"
    words = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", program, "sh", script]
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800, check=False)


def _where_pip_looks() -> list[str]:
    return [path for path in ("/opt/wheels", "/opt/pypi", "/opt/pypi-more") if Path(path).is_dir()]


def copy_tree(target: Path) -> None:
    """COPY . . of a clean checkout."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def build(name: str, root: Path) -> tuple[str, dict[str, str]]:
    """Execute the steps after FROM. Returns: the working folder and the environment of a container."""
    folder, variables = "/", {}
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    for path in ("/etc/pip.conf", "/root/.config/pip/pip.conf"):
        if Path(path).is_file():
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path[1:])
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs/ca-certificates.crt")
    for kind, text in steps(name)[1:]:
        if kind == "ENV":
            variables |= {key: value.replace("$PATH", "/usr/local/bin:/usr/bin:/bin") for key, value in re.findall(r"(\w+)=(\S+)", text)}
        elif kind == "WORKDIR":
            folder = text
            (root / folder[1:]).mkdir(parents=True, exist_ok=True)
        elif kind == "COPY":
            assert text == ". ."
            copy_tree(root / folder[1:])
        elif kind == "RUN":
            done = inside(root, text, folder, variables)
            assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}"
    return folder, variables


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_steps_for_cpus_make_a_machine_that_runs_evenkeel(bare_root: Path) -> None:
    """The engines can be imported and started there: what compiles and what links is in the image."""
    folder, variables = build("Dockerfile.cpu", bare_root)
    told = inside(bare_root, "evenkeel capabilities", folder, variables)
    assert told.returncode == 0 and '"sglang' in told.stdout, told.stdout[-4000:]
    made = inside(bare_root, "evenkeel init-model tests/e2e/small.yaml model=/tmp/m && evenkeel diff-engines /tmp/m", folder, variables)
    assert made.returncode == 0 and "all the same bits" in made.stdout, made.stdout[-4000:]
