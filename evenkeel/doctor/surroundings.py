"""Whether a run can work in what surrounds it on a machine: variables of the environment, the loopback interface, temporary files."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping

from evenkeel.actors.cluster.address import check_ray
from evenkeel.actors.config import RunConfig
from evenkeel.correction.errors import ConfigError
from evenkeel.doctor.facts import Complaint, Nodes
from evenkeel.rollout.engine.temporary_files import check_tmpdir

_OPTIMIZE, _HUB, _TMPDIR = "PYTHONOPTIMIZE", "SGLANG_USE_MODELSCOPE", "TMPDIR"
_CONNECT_S = 5.0


def check_surroundings(config: RunConfig) -> None:
    """What stands in the way of a start, before anything is started. What matters on the nodes of a cluster is asked there.

    Raises: ConfigError; NoClusterError as check_ray.
    """
    private = config.ray.address is None
    here = variables_here() | (config.ray.env if private else {})
    for error in _obstacles(here if private else {_OPTIMIZE: here[_OPTIMIZE]}, loopback_obstacle() if private else ""):
        raise error
    check_ray(config.ray)


def check_surroundings_of_engine() -> None:
    """The same for an engine in this process, without Ray. Raises: ConfigError."""
    for error in _obstacles(variables_here(), loopback_obstacle()):
        raise error


def variables_here() -> dict[str, str]:
    """What is asked of a node: variables of this process, those that it can do without left out."""
    here = {_OPTIMIZE: str(sys.flags.optimize), _TMPDIR: tempfile.gettempdir()}
    return here | {name: os.environ[name] for name in (_HUB,) if name in os.environ}


def loopback_obstacle() -> str:
    """Why no process of this machine reaches another at 127.0.0.1; empty: they do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), _CONNECT_S):
            return ""
    except OSError as error:
        return str(error)


def surroundings_let_it_work(nodes: Nodes, config: RunConfig) -> Iterator[Complaint]:
    """A rule of the second layer (on_nodes.py)."""
    for node in nodes:
        for error in _obstacles({**node.variables, **config.ray.env}, node.loopback_obstacle):
            yield Complaint.refusal(ConfigError(f"{node.name}: {error.reason}", remedy=error.remedy))


def _obstacles(variables: Mapping[str, str], loopback: str) -> Iterator[ConfigError]:
    if loopback:
        reason = f"the loopback interface doesn't work: nothing reaches 127.0.0.1 ({loopback}), and there a run's processes find each other"
        yield ConfigError(reason, remedy="bring it up (ip link set lo up), or start the container with a network of its own")
    level = variables.get(_OPTIMIZE, "")
    if level.isdigit() and int(level) > 1:
        reason = f"{_OPTIMIZE} = {level}: Python leaves docstrings out, of which transformers makes classes"
        yield ConfigError(reason, remedy="unset it, and start Python without -OO")
    if variables.get(_HUB, "").lower() in ("1", "true", "yes", "y", "t", "on"):
        reason = f"{_HUB} = {variables[_HUB]}: SGLang would read models by another library, and evenkeel gives it folders"
        yield ConfigError(reason, remedy="unset it")
    if _TMPDIR in variables:
        try:
            check_tmpdir(variables[_TMPDIR])
        except ConfigError as error:
            yield error
