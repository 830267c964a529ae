"""Hosts that ssh reaches and that are this machine: an sshd for each loopback address, which gives its user a home of its own.

sshd and rsync are Debian's, put into .tools/sshd by deploy/fetch_sshd.sh. The homes come from a list of users that only these sshds see
(libnss_wrapper), so that nothing of this machine's own accounts is touched.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.e2e.launch import ROOT

SSHD = ROOT / ".tools" / "sshd"
# An empty folder that sshd wants when root starts it.
_PRIVILEGE_SEPARATION = Path("/run/sshd")
# In shell, for the key: ssh itself would look for ~ in this machine's list of users.
_HOME_BY_VARIABLE = """last=
for word; do
    shift
    case "$last $word" in "-i ~/"*) word=$HOME/${word#??};; esac
    set -- "$@" "$word"
    last=$word
done"""


@dataclass(frozen=True)
class Hosts:
    """Hosts that are up."""

    addresses: tuple[str, ...]
    homes: dict[str, Path]
    """By address."""
    user: str
    key: Path
    """That opens them."""
    programs: Path
    """A folder with an `ssh` that knows their port, and an `rsync`; for the front of PATH."""

    def processes(self) -> dict[str, list[psutil.Process]]:
        """By address: what was started by way of ssh there and lives, told by its home."""
        found: dict[str, list[psutil.Process]] = {address: [] for address in self.addresses}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                home = process.environ().get("HOME", "")
                for address, folder in self.homes.items():
                    if home == str(folder):
                        found[address].append(process)
        return found


@contextmanager
def loopback_hosts(folder: Path, addresses: Sequence[str]) -> Iterator[Hosts]:
    """Hosts at these addresses of 127.0.0.0/8 while it lasts; all that was started on them is killed at its end.

    Args:
        folder: short, for everything that they need.
    """
    port, user, key = _free_port(addresses), getpass.getuser(), folder / "key"
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    homes = {address: folder / address for address in addresses}
    hosts = Hosts(tuple(addresses), homes, user, key, _programs(folder, port))
    servers: list[subprocess.Popen[bytes]] = []
    is_made = os.getuid() == 0 and not _PRIVILEGE_SEPARATION.exists()
    if is_made:
        _PRIVILEGE_SEPARATION.mkdir()
    try:
        for address, home in homes.items():
            home.mkdir()
            servers.append(_sshd(folder, address, home, port, user, hosts.programs))
        for address, server in zip(addresses, servers, strict=True):
            _wait_for(address, port, server)
        yield hosts
    finally:
        for server in servers:
            server.terminate()
        left = [process for processes in hosts.processes().values() for process in processes]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for server in servers:
            server.wait(20)
        psutil.wait_procs(left, timeout=20)
        if is_made:
            with contextlib.suppress(OSError):
                _PRIVILEGE_SEPARATION.rmdir()


def _programs(folder: Path, port: int) -> Path:
    programs, libraries = folder / "programs", next((SSHD / "usr" / "lib").glob("*-linux-gnu"))
    programs.mkdir()
    (folder / "ssh_config").write_text(f"Host 127.*\n  Port {port}\n  LogLevel ERROR\n")
    for name, command in (
        ("ssh", f'{_HOME_BY_VARIABLE}\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"'),
        ("rsync", f'LD_LIBRARY_PATH={libraries} exec {SSHD}/usr/bin/rsync "$@"'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{command}\n")
        (programs / name).chmod(0o755)
    return programs


def _sshd(folder: Path, address: str, home: Path, port: int, user: str, programs: Path) -> subprocess.Popen[bytes]:
    libraries = next((SSHD / "usr" / "lib").glob("*-linux-gnu"))
    own = folder / f"sshd-{address}"
    own.mkdir()
    users = f"{user}:x:{os.getuid()}:{os.getgid()}::{home}:/bin/bash\nsshd:x:64999:64999::{_PRIVILEGE_SEPARATION}:/usr/sbin/nologin\n"
    (own / "passwd").write_text(users)
    (own / "config").write_text(
        f"Port {port}\nListenAddress {address}\nHostKey {folder}/host_key\nPidFile none\nAuthorizedKeysFile {folder}/key.pub\n"
        f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nPrintLastLog no\n"
        f"SetEnv PATH={programs}:/usr/local/bin:/usr/bin:/bin\n"
    )
    variables = os.environ | {
        "LD_LIBRARY_PATH": str(libraries),
        "LD_PRELOAD": str(libraries / "libnss_wrapper.so"),
        "NSS_WRAPPER_PASSWD": str(own / "passwd"),
        "NSS_WRAPPER_GROUP": "/etc/group",
    }
    with (own / "log").open("wb") as log:
        return subprocess.Popen([SSHD / "usr" / "sbin" / "sshd", "-D", "-e", "-f", own / "config"], env=variables, stderr=log)


def _free_port(addresses: Sequence[str]) -> int:
    """On all of them."""
    while True:
        with contextlib.ExitStack() as probes:
            port = 0
            with contextlib.suppress(OSError):
                for address in addresses:
                    probe = probes.enter_context(socket.socket())
                    probe.bind((address, port))
                    port = probe.getsockname()[1]
                return int(port)


def _wait_for(address: str, port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 20.0
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((address, port)) == 0:
                return
        assert server.poll() is None and time.monotonic() < until, f"no sshd at {address}:{port}"
        time.sleep(0.1)
