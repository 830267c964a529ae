"""The address of a run's Ray, checked before anything of Ray is started."""

from __future__ import annotations

import logging
import os
import socket

from evenkeel.actors.config import RayConfig
from evenkeel.correction.errors import ConfigError, EngineError

# Bytes. Ray appends "/session_" with date, time and process id (44 at most) and "/sockets/plasma_store" (21); 107 are allowed.
_LONGEST_TEMP_DIR = 40
_CONNECT_S = 10.0
_NAMED = " (from RAY_ADDRESS)"


class NoClusterError(ConfigError, EngineError):
    """Nothing answers at ray.address: a wrong address, or a head that has to be started again."""


def check_ray(settings: RayConfig) -> None:
    """Check what can be checked without starting anything. Raises: ConfigError; NoClusterError, which is one, if no cluster answers."""
    if settings.address is not None:
        host, _, port = settings.address.removeprefix("ray://").rpartition(":")
        if settings.address != "auto" and not (host and port.isdigit()):
            raise ConfigError(
                f"ray.address = {settings.address!r}: it is neither HOST:PORT nor auto, which is the cluster that this machine is part of. "
                "Leave it empty for a private cluster"
            )
        _check_answers(settings.address)
        return
    given = "ray.temp_dir" if settings.temp_dir else next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "")
    folder = str(settings.temp_dir.resolve()) if settings.temp_dir else os.path.join(os.environ.get(given, ""), "ray")
    if (size := len(os.fsencode(folder))) > _LONGEST_TEMP_DIR:
        where = f"{given} = {folder}" if settings.temp_dir else f"{given} = {os.environ[given]}: Ray's folder is {folder}"
        raise ConfigError(
            f"{where}: {size} bytes, but Ray's sockets lie below it and the path of a socket has to stay short",
            remedy=f"set ray.temp_dir to a path of {_LONGEST_TEMP_DIR} bytes or less, such as /tmp/ray",
        )


def _check_answers(address: str) -> None:
    """Check that something listens where Ray will look for the cluster, which it finds by itself for `auto`: it would look for 40 s.

    Raises: NoClusterError if nothing listens, or `auto` finds nothing.
    """
    place = whence = ""
    try:
        place, whence = (address, "") if "://" in address else _where_ray_looks(address)
        _check_listening(place)
    except (OSError, UnicodeError) as error:
        found = f"no Ray cluster answers at {place}{whence}: {error}" if place else "Ray finds no cluster that this machine is part of"
        remedy = "Set it to HOST:PORT of a cluster's head, start one (deploy/README.md), or leave it empty for a private one"
        raise NoClusterError(f"ray.address = {address!r}: {found}. {remedy}") from error
    except ValueError:  # an address of no form that Ray knows, which Ray says itself
        return


def _where_ray_looks(address: str) -> tuple[str, str]:
    """(host:port, where `auto` has it from, in words). To Ray 127.0.0.1 is the machine's own address, at which private Rays don't listen:
    one of another run is not joined by accident. Raises: ValueError; ConnectionError if `auto` finds nothing.
    """
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else ""
    if "://" in named:
        return named, _NAMED
    from ray._private import services

    logging.getLogger("ray").setLevel(logging.ERROR)  # with several Rays to choose from it would warn on the terminal
    services.find_gcs_addresses.cache_clear()  # type: ignore[attr-defined]
    place = services.canonicalize_bootstrap_address(address) or ""
    if address != "auto":
        return place, ""
    if named not in ("", "auto"):
        return place, _NAMED
    return place, " (as `ray start` noted on this machine)" if services.find_bootstrap_address(None) == place else ""


def _check_listening(address: str) -> None:
    """Raises: OSError if nothing listens at host:port. Of other forms nothing is checked."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):  # [::1]:6379 is an address of IPv6
            pass
