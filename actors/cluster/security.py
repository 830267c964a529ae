"""Who may reach a run's Ray: this machine alone if it is private, and who has the token if it is joined (docs/security.md)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token

from actors.config import RayConfig
from correction.engines.environment import environment
from correction.errors import ConfigError, EngineError

_ASKED_S = 60.0
"""Longest wait for a task that finds out whether the joined cluster asks for a token."""
_TOKEN = "RAY_AUTH_TOKEN"


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """Within it, ray.init starts a cluster that listens on 127.0.0.1 alone.

    Ray does so by itself on a Mac, where it supports no clusters of several machines; the variable that turns them on there turns them
    off here. Left alone, its control service, daemon and every worker listen on all interfaces of a laptop.
    """
    enabled, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled


def have_token() -> None:
    """Where Ray could neither read its owner's token nor write a new one, as where HOME is / and the user isn't root: a token of this
    process's, which what it starts inherits."""
    if not any(name in os.environ for name in (_TOKEN, f"{_TOKEN}_PATH", "RAY_AUTH_MODE")):
        token = _token_file()
        there = next(path for path in (token, *token.parents) if os.path.exists(path))
        if not os.access(there, os.R_OK if there == token else os.W_OK | os.X_OK):
            os.environ[_TOKEN] = generate_new_authentication_token()


def protect_token() -> None:
    """Let nobody else on this machine read the token by which Ray knows its owner; Ray itself leaves that to the umask."""
    with contextlib.suppress(OSError):  # there is none: authentication is off, or the token is elsewhere
        _token_file().chmod(0o600)


def _token_file() -> Path:
    """Where Ray keeps the token if RAY_AUTH_TOKEN_PATH doesn't say otherwise."""
    return Path(os.path.expanduser("~")) / ".ray" / "auth_token"


def require_authentication(settings: RayConfig) -> None:
    """Ask the cluster that was joined whether it lets everybody in.

    Raises: ConfigError if it does, unless ray.allow_unauthenticated says that this is known.
    """
    if settings.allow_unauthenticated:
        return
    try:
        asks_for_token = ray.get(ray.remote(num_cpus=0)(_asks_for_token).remote(), timeout=_ASKED_S)
    except ray.exceptions.RayError as error:
        raise EngineError(f"ray.address = {settings.address}: joined, but the first task failed there: {type(error).__name__}") from error
    if not asks_for_token:
        raise ConfigError(
            f"ray.address = {settings.address}: that cluster doesn't ask for a token, so whoever reaches it can run code as you. "
            "Start it with RAY_AUTH_MODE=token on every node (deploy/README.md), or, if its network is closed, "
            "set ray.allow_unauthenticated=true"
        )


def _asks_for_token() -> bool:
    """Whether this worker's cluster asks for a token. Ray's workers get RAY_AUTH_MODE from the daemon of their node."""
    return os.environ.get("RAY_AUTH_MODE", "disabled").lower() == "token"
