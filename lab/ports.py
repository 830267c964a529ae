"""A port for what a test or a measurement starts."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody listens on, by now. Args: host: an address of this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
