"""Where a run's Ray is to be, checked before anything of Ray is imported or started."""

from __future__ import annotations

import socket

from actors.config import RayConfig
from correction.errors import ConfigError, EngineError

_LONGEST_TEMP_DIR = 40
"""Characters. Ray appends "/session_" with date, time and process id (44 at most) and "/sockets/plasma_store" (21); 107 are allowed."""
_CONNECT_S = 10.0


class NoClusterError(ConfigError, EngineError):
    """Nothing answers at ray.address: a wrong address, or a head that has to be started again."""


def check_ray(settings: RayConfig) -> None:
    """Check what can be checked without starting anything. Raises: ConfigError if nothing listens at the address, or a path is too long."""
    if settings.address is not None:
        host, _, port = settings.address.removeprefix("ray://").rpartition(":")
        if settings.address != "auto" and not (host and port.isdigit()):
            raise ConfigError(
                f"ray.address = {settings.address!r}: it is neither HOST:PORT nor auto, which is the cluster that this machine is part of. "
                "Leave it empty for a private cluster"
            )
        try:
            check_listening(settings.address)
        except OSError as error:
            raise NoClusterError(
                f"ray.address = {settings.address!r}: no Ray cluster answers there ({error}). Start one (deploy/README.md), "
                f"or leave ray.address empty for a private one"
            ) from error
        return
    temp_dir = str(settings.temp_dir.resolve()) if settings.temp_dir else ""
    if len(temp_dir) > _LONGEST_TEMP_DIR:
        raise ConfigError(
            f"ray.temp_dir = {temp_dir}: {len(temp_dir)} characters, but Ray's sockets lie below it and the path of a socket has to "
            f"stay short. Choose a path of {_LONGEST_TEMP_DIR} characters, or shorter"
        )


def check_listening(address: str) -> None:
    """Ray itself would look for a cluster that isn't there for minutes. Raises: OSError if nothing listens at host:port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S):
            pass
