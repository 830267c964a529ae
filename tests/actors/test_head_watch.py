"""The head of a joined cluster is gone while the main thread stands in a call that doesn't come back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from actors.config import RayConfig
from actors.head_watch import _LIMIT, ends_with_the_head

ROOT = Path(__file__).parents[2]
LIMIT_S = 2
STANDS = f"""
import socket, time, types
from pathlib import Path
import ray
from actors.config import RayConfig
from actors.head_watch import ends_with_the_head
head = socket.create_server(("127.0.0.1", 0))
address = "127.0.0.1:%d" % head.getsockname()[1]
ray.get_runtime_context = lambda: types.SimpleNamespace(gcs_address=address)
with ends_with_the_head(RayConfig(address=address), Path("runs/one"), lambda text: print(text, flush=True)):
    time.sleep({2 * LIMIT_S})
    print(address, flush=True)
    head.close()
    time.sleep(120)
"""


def test_a_head_that_is_gone_ends_the_process_with_a_sentence() -> None:
    """Whatever the main thread does; as long as something listens there, nothing happens."""
    variables = os.environ | {_LIMIT: str(LIMIT_S), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", STANDS], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    address, told = done.stdout.splitlines()
    assert done.returncode == 1 and done.stderr == f"evenkeel: {told}\n", "in the run's events, and on the terminal"
    assert told.startswith(f"the head of the Ray cluster at {address} is gone") and "evenkeel train --resume runs/one" in told


def test_a_private_ray_has_no_head_to_look_after() -> None:
    before = threading.active_count()
    with ends_with_the_head(RayConfig(), Path("runs/one"), print):
        assert threading.active_count() == before
