"""Code that the benchmarks share: sides that take turns, ratios of their times, and sides that run in processes of their own.

A peer is another project, in a virtual environment of its own; a worker file here is run by that environment's Python:

    VERL = Peer("verl", "verl_worker.py", (("verl==0.9.1",),))
    arguments = VERL.parse(options(__doc__))                          # with --verl FOLDER and --make-verl FOLDER
    with VERL.start(arguments.verl) as verl:
        seconds = verl({"batch": ...})                                # what the worker's function answered, see `serve`

Workers import this file too: it needs nothing but Python's own library.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
NANO_RECIPE = ROOT / "recipes" / "nano_spell_backward.yaml"
EVENKEEL = (sys.executable, "-m", "evenkeel")


def options(text: str | None) -> argparse.ArgumentParser:
    """A parser whose --help is a benchmark's docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


# -- turns and ratios ----------------------------------------------------------------------------------------------------


def in_turns(sides: Mapping[str, Callable[[int], T]], turns: int, *, warm_up: int = 0, rotate: bool = True) -> dict[str, list[T]]:
    """What each side measured in each turn, so that a busy machine hits all of them.

    Args:
        sides: called with the number of the turn.
        warm_up: turns before the first that counts: for caches, compilation and an optimizer's state.
        rotate: every turn begins with another side.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(warm_up + turns):
        first = turn % len(names) if rotate else 0
        for name in names[first:] + names[:first]:
            found[name].append(sides[name](turn))
    return {name: values[warm_up:] for name, values in found.items()}


def seconds_of(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class TimeRatio:
    """Median and quartiles of the ratios of single turns."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> TimeRatio:
        return cls(*statistics.quantiles([a / b for a, b in zip(above, below, strict=True)], n=4))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


# -- evenkeel in a process of its own ------------------------------------------------------------------------------------


def evenkeel(*words: object) -> str:
    """What a command of evenkeel prints; one that fails ends the benchmark with it."""
    done = subprocess.run([*EVENKEEL, *map(str, words)], cwd=ROOT, stdout=PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"evenkeel {words[0]} failed:\n{done.stdout[-3000:]}")
    return done.stdout


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of a run, one for each step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def scratch(keep: Path | None) -> Iterator[Path]:
    """The folder that is to be kept, made if it isn't there; otherwise one that is gone afterwards."""
    with tempfile.TemporaryDirectory() as made:
        folder = keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def put_between(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- /NAME -->` in a page of docs. Raises: ValueError if it has no such marks."""
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, opened, rest = page.read_text().partition(first)
    _, closed, after = rest.partition(last)
    if not opened or not closed:
        raise ValueError(f"{page} has no {first} ... {last} to be written between")
    page.write_text(f"{before}{first}\n{text}\n{last}{after}")


# -- another project in an environment of its own ------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """Another project that a benchmark compares with."""

    name: str
    worker: str
    """File of this folder that the environment's Python runs."""
    installs: tuple[tuple[str, ...], ...]
    """Arguments of `pip install`, one call after the other."""

    def parse(self, parser: argparse.ArgumentParser) -> argparse.Namespace:
        """The arguments, with --NAME; given --make-NAME, the environment is made, and the program ends."""
        parser.add_argument(f"--{self.name}", type=Path, metavar="FOLDER", help=f"virtual environment that has {self.name}")
        parser.add_argument(f"--make-{self.name}", type=Path, metavar="FOLDER", help="make that environment, and stop")
        arguments = parser.parse_args()
        folder = getattr(arguments, f"make_{self.name}")
        if folder is not None:
            venv.create(folder, with_pip=True)
            for words in self.installs:
                pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                subprocess.run([*pip, *words], check=True)
            parser.exit()
        return arguments

    @contextmanager
    def start(self, folder: Path, **variables: str) -> Iterator[Callable[[Any], Any]]:
        """Its worker, with these environment variables besides ours: called with a question, it answers.

        A worker that has ended ends the benchmark with what it said last.
        """
        command, environment = [folder / "bin" / "python", ROOT / "benchmarks" / self.worker], {**os.environ, **variables}
        with (
            tempfile.TemporaryFile("w+") as said,
            subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=said, text=True, env=environment) as process,
        ):
            assert process.stdin is not None and process.stdout is not None
            questions, answers = process.stdin, process.stdout

            def ask(question: Any) -> Any:
                with suppress(BrokenPipeError):
                    questions.write(json.dumps(question) + "\n")
                    questions.flush()
                line = answers.readline()
                if not line:
                    said.seek(0)
                    sys.exit(f"{self.name} failed; if a package is missing, make its environment anew:\n{said.read()[-3000:]}")
                return json.loads(line)

            yield ask


def serve(answer: Callable[[Any], Any]) -> None:
    """The worker's side: answers one question after the other. What else is printed goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for question in sys.stdin:
        print(json.dumps(answer(json.loads(question))), file=answers, flush=True)
