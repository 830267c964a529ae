"""Summary, in a few lines, of the stacks that stack_collector.py has written into a run's folder."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = "stacks"
_FRAME = re.compile(r'File "(.*?)", line (\d+) in (.+)')
# A function of the thread in which an actor runs its coroutines, or its methods.
_SERVES = " in run_forever", " in actor_method_executor"
# Innermost functions that are named.
_FRAMES = 4


def collections(run_dir: Path) -> list[Path]:
    """Files of the collections, each named by its number."""
    return [path for path in (run_dir / FOLDER).glob("*.txt") if path.stem.isdecimal()]  # int reads no "²"


def next_number(run_dir: Path) -> int:
    """Number of the next collection."""
    return 1 + max((int(path.stem) for path in collections(run_dir)), default=0)


def newest_stack_summary(run_dir: Path) -> tuple[str, ...]:
    """Lines of the last collection: what was waited for, then a line for each process. Empty: there is none."""
    path = max(collections(run_dir), key=lambda found: int(found.stem), default=None)
    return stack_summary(path.read_text(errors="replace"), path.name) if path is not None else ()


def stack_summary(text: str, name: str) -> tuple[str, ...]:
    """The place where each process stood, innermost function first: its main thread, or, of one that serves calls, the thread that does."""
    what, *parts = re.split(r"^=== ", text, flags=re.MULTILINE)
    return (f"{name} ({what.strip()}):", *map(_line, parts))


def _line(part: str) -> str:
    title, _, stacks = part.partition("\n")
    threads = stacks.strip().split("\n\n")
    shown = threads[-1]  # faulthandler writes the main thread last
    if " in main_loop" in shown:  # Ray's, of a worker process: an actor's calls may run in a thread of their own
        shown = next((thread for serves in _SERVES for thread in threads if serves in thread), shown)
    frames = [f"{Path(file).stem}:{line} {function}" for file, line, function in _FRAME.findall(shown)[:_FRAMES]]
    return f"{title}: {' < '.join(frames) or shown or 'nothing'}"
