"""What surrounds a run on a machine: variables, the loopback interface, the folder for temporary files."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from evenkeel.actors.config import RunConfig
from evenkeel.correction.errors import ConfigError
from evenkeel.doctor import surroundings
from evenkeel.doctor.surroundings import check_surroundings, surroundings_let_it_work
from evenkeel.recipe import load_config
from tests.evenkeel.doctor.test_doctor import node

RECIPE = Path(__file__).parents[3] / "recipes" / "nano_spell_backward.yaml"
DEEP = "/net/people/somebody/slurm_job/1355700/tmp.t0016"


def config(*overrides: str) -> RunConfig:
    return load_config(RunConfig, RECIPE, overrides)


@pytest.mark.parametrize(
    ("variables", "overrides", "said"),
    [
        ({}, (), ""),
        ({"SGLANG_USE_MODELSCOPE": "True"}, (), "SGLANG_USE_MODELSCOPE = True: "),
        ({"SGLANG_USE_MODELSCOPE": "false"}, (), ""),
        ({"SGLANG_USE_MODELSCOPE": "1"}, ("ray.env.SGLANG_USE_MODELSCOPE='0'",), ""),
        ({}, ("ray.env.PYTHONOPTIMIZE='2'",), "PYTHONOPTIMIZE = 2: Python leaves docstrings out"),
        ({"RAY_TMPDIR": DEEP}, (), f"RAY_TMPDIR = {DEEP}: Ray's folder is {DEEP}/ray: 52 bytes, but Ray's sockets lie below it"),
        ({"RAY_TMPDIR": DEEP}, ("ray.temp_dir=/tmp/r",), ""),
        ({"TMPDIR": DEEP}, ("ray.temp_dir=/tmp/r",), ""),
        ({"TMPDIR": f"{DEEP}/xyz"}, ("ray.temp_dir=/tmp/r",), f"TMPDIR = {DEEP}/xyz: 52 bytes. Sockets of an engine lie below it"),
        ({"TMPDIR": f"{DEEP}/xyz"}, ("ray.temp_dir=/tmp/r", "ray.env.TMPDIR=/tmp"), ""),
    ],
)  # fmt: skip
def test_a_start_names_what_it_can_t_work_with(
    variables: dict[str, str], overrides: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """52 bytes: Ray's folder adds a session of 44 and a socket of 21, and the kernel allows 107. An engine's sockets add 57."""
    for name in ("SGLANG_USE_MODELSCOPE", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", variables.get("TMPDIR", "/tmp"))
    if not said:
        check_surroundings(config(*overrides))
        return
    with pytest.raises(ConfigError) as caught:
        check_surroundings(config(*overrides))
    assert str(caught.value).startswith(said) and caught.value.remedy


def test_without_a_loopback_interface_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError(101, "Network is unreachable")

    assert surroundings.loopback_obstacle() == ""
    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(ConfigError, match=r"nothing reaches 127\.0\.0\.1 \(\[Errno 101\] Network is unreachable\).*ip link set lo up"):
        check_surroundings(config())


def test_on_a_cluster_it_is_the_nodes_surroundings_that_count() -> None:
    nodes = [node(), node(name="b", variables={"PYTHONOPTIMIZE": "2"}, loopback_obstacle="refused")]
    found = [one.sentence for one in surroundings_let_it_work(nodes, config("ray.address=auto"))]
    assert len(found) == 2 and all(sentence.startswith("b: ") for sentence in found)
