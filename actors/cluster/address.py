"""Where a run's Ray is to be, checked before anything of Ray is imported or started."""

from __future__ import annotations

import logging
import os
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


def check_joinable(address: str) -> None:
    """Check that something listens where Ray will look for the cluster, which it finds by itself for `auto`; it would look for 40 s.

    To Ray 127.0.0.1 is the machine's own address, at which private Rays don't listen: one of another run is not joined by accident.
    What isn't HOST:PORT is left to Ray. Raises: NoClusterError if nothing listens, or `auto` finds nothing.
    """
    named = os.environ.get("RAY_ADDRESS") if address == "auto" else None
    if "://" in (named or address):
        return
    from ray._private import services

    logging.getLogger("ray").setLevel(logging.ERROR)  # with several Rays to choose from it would warn on the terminal
    services.find_gcs_addresses.cache_clear()  # type: ignore[attr-defined]
    place = None
    try:
        place = services.canonicalize_bootstrap_address(address)
        check_listening(place or "")
    except ValueError:  # of no form that Ray knows, which it says itself
        return
    except OSError as error:
        if place is None:
            reason = "Ray finds no cluster that this machine is part of"
        else:
            is_noted = address == "auto" and services.find_bootstrap_address(None) == place
            whence = " (from RAY_ADDRESS)" if named else " (as `ray start` noted on this machine)" if is_noted else ""
            reason = f"no Ray cluster answers at {place}{whence}: {error}"
        remedy = "Set it to HOST:PORT of a cluster's head, start one (deploy/README.md), or leave it empty for a private one"
        raise NoClusterError(f"ray.address = {address!r}: {reason}. {remedy}") from error


def check_listening(address: str) -> None:
    """Ray itself would look for a cluster that isn't there for minutes. Raises: OSError if nothing listens at host:port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):  # [::1]:6379 is an address of IPv6
            pass
