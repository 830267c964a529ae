"""The child process of `evenkeel train --retries`: the same command line. It shuts down in order when its parent is gone."""

from __future__ import annotations

import os
import signal
import sys
import traceback

from evenkeel.actors.processes import driver_heartbeat, interrupts
from evenkeel.correction.errors import ConfigError, DataError, EvenkeelError
from evenkeel.rollout.parent_death import signal_at_parents_death


def main() -> None:
    if sys.platform == "linux":
        parent = os.getppid()
        signal_at_parents_death(signal.SIGTERM)  # with a checkpoint
        if parent == 1 or os.getppid() != parent:
            sys.exit(128 + signal.SIGTERM)
    interrupts.is_attempt = True
    driver_heartbeat.inherit()
    from evenkeel.actors.processes.output import put
    from evenkeel.cli import main as command_line

    try:
        command_line()
    except SystemExit as end:
        if (code := _code_for_parent(end.__context__)) is None:
            raise
        put(f"{end.code}\n", sys.stderr)
        sys.exit(code)
    except OSError as error:  # one that names no file
        if (code := _code_for_parent(error)) is None:
            raise
        traceback.print_exc()
        sys.exit(code)


def _code_for_parent(error: BaseException | None) -> int | None:
    """None: that of the command line."""
    from evenkeel.actors.cluster.address import NoClusterError
    from evenkeel.actors.processes.disk_at_start import DiskLate
    from evenkeel.retries import AWAY, NOT_AGAIN

    if isinstance(error, ConfigError):
        return interrupts.NO_CLUSTER if isinstance(error, NoClusterError) else NOT_AGAIN
    # Data or a model that is not there or can't be read, a disk that hangs or refuses; not the other deadlines, which are OSErrors, too. In
    # training the same errors come of what the run does: a DataError of a batch, or of three failed checkpoints.
    is_away = isinstance(error, DataError | DiskLate) or (isinstance(error, OSError) and not isinstance(error, EvenkeelError))
    return AWAY if is_away and not interrupts.has_trained else None


if __name__ == "__main__":
    main()
