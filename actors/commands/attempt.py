"""The child process of `evenkeel train --retries`: the same command line. It shuts down in order when its parent is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from actors.processes import driver_heartbeat, interrupts
from correction.errors import ConfigError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # with a checkpoint
        if parent == 1 or os.getppid() != parent:
            sys.exit(128 + signal.SIGTERM)
    interrupts.is_attempt = True
    driver_heartbeat.inherit()
    from actors.cluster.address import NoClusterError
    from actors.commands.cli import main as command_line
    from actors.commands.retries import NOT_AGAIN
    from actors.processes.output import put

    try:
        command_line()
    except SystemExit as end:
        if isinstance(end.__context__, ConfigError):
            put(f"{end.code}\n", sys.stderr)
            sys.exit(interrupts.NO_CLUSTER if isinstance(end.__context__, NoClusterError) else NOT_AGAIN)
        raise


if __name__ == "__main__":
    main()
