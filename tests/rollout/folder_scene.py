"""Task folders on a disk, and sandboxes of bubblewrap, Debian's from .tools/bubblewrap where none is installed."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from evenkeel.rollout.config import FoldersTask
from evenkeel.rollout.task_folders.sandbox import Ran, Sandbox, opened

_KEPT = Path(__file__).parents[2] / ".tools" / "bubblewrap" / "usr" / "bin"
needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None and not _KEPT.is_dir(), reason="no bubblewrap: run deploy/fetch_bubblewrap.sh (Debian's package)"
)
FILES = {
    "task.toml": '[verifier]\ntimeout_sec = 20\n[environment]\nmemory_mb = 256\nstorage_mb = 64\nenv = { GREETING = "hello" }\n',
    "instruction.md": "<!-- canary GUID 1 -->\n\nWrite the first word of notes.txt to answer.txt.\n",
    "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY notes.txt .\n",
    "environment/notes.txt": "heron pike\n",
    "tests/test.sh": '#!/bin/bash\n[ "$(cat answer.txt)" = heron ] && right=1\necho ${right:-0} > /logs/verifier/reward.txt\n',
    "solution/solve.sh": "#!/bin/bash\ncut -d' ' -f1 notes.txt > answer.txt\n",
}


@pytest.fixture
def bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("bwrap") is None:
        monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{_KEPT}")


def write_folder(path: Path, **changes: str | None) -> Path:
    """A task folder. Args: changes: texts of other files by their names, with "__" for a slash; None: the file is left out."""
    for name, text in (FILES | {name.replace("__", "/"): text for name, text in changes.items()}).items():
        if text is not None:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
    return path


def in_sandbox(path: Path, work: Callable[[Sandbox], Awaitable[Any]], within_s: float = math.inf, **settings: Any) -> Any:
    """What a coroutine makes of a folder's sandbox."""

    async def run() -> Any:
        sandbox = await opened({"folder": str(path), "sandbox": FoldersTask(path=path.parent, **settings).sandbox}, within_s=within_s)
        try:
            return await work(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(run())


def ran(path: Path, *commands: str, **settings: Any) -> list[Ran]:
    async def work(sandbox: Sandbox) -> list[Ran]:
        return [await sandbox.run(command) for command in commands]

    return in_sandbox(path, work, **settings)  # type: ignore[no-any-return]
