"""The Python interface: a recipe read, a run trained, a model evaluated, a run's folder read as tables.

A run is a process of its own, as on the command line, so all of this works in a notebook (whose event loop runs), from any thread, several
times in one process, and beside a Ray that was started there: signals, the garbage collector and that Ray stay as they are.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from evenkeel.actors.config import RunConfig
from evenkeel.actors.record.run_folder import RunFolder, fresh_path
from evenkeel.correction.errors import EvenkeelError
from evenkeel.recipe import load_config
from evenkeel.rollout.module_path import checkout

if TYPE_CHECKING:
    import pandas as pd

_ENDED_BY_ALARM = 3
# The command line, ended as by SIGTERM (a run: with a checkpoint) if this process dies, as a notebook's kernel does at a restart.
_CHILD = """
import signal, sys
from evenkeel.rollout.parent_death import signal_at_parents_death
signal_at_parents_death(signal.SIGTERM)
sys.argv[0] = "evenkeel"
from evenkeel.cli import main
main()
"""


class RunFailed(EvenkeelError):
    """A run or an evaluation has ended with an error: the sentence that the command line ends with, and `folder` where there is one."""

    def __init__(self, text: str, folder: Path | None = None) -> None:
        super().__init__(text)
        self.folder = folder


@dataclass(frozen=True, slots=True)
class Run:
    """A run, read from its folder: finished, interrupted or still training. Each property reads the folder when it is asked."""

    folder: Path

    @property
    def metrics(self) -> pd.DataFrame:
        """A row a step (the index), a column a number of docs/metrics.md; NaN where a step doesn't have it."""
        return _table(self.folder / "metrics.jsonl")

    @property
    def evaluations(self) -> pd.DataFrame:
        """A row an evaluation on held-out questions; the index is the step after which it was made."""
        return _table(self.folder / "evaluations.jsonl")

    @property
    def checkpoints(self) -> list[Path]:
        """Hugging Face folders of the checkpoints that are kept, oldest first."""
        return [one.hf for one in RunFolder.view(self.folder).checkpoints()]

    @property
    def model(self) -> Path:
        """The newest of them. Raises: RunFailed if there is none."""
        if not (found := self.checkpoints):
            raise RunFailed(f"{self.folder} has no checkpoint yet", self.folder)
        return found[-1]

    @property
    def config(self) -> dict[str, Any]:
        """The settings that it ran with (config.yaml)."""
        found: dict[str, Any] = RunFolder.view(self.folder).read_config()
        return found

    @property
    def report(self) -> Path:
        """report.html, which a run writes when it ends; `evenkeel report FOLDER` writes it at any time."""
        return self.folder / "report.html"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Accuracy of a model on the held-out questions of a task."""

    accuracy: float
    """NaN if no answer could be scored."""
    interval: tuple[float, float]
    """95% Wilson; its unit is the question."""
    numbers: dict[str, float]
    """All numbers of the evaluation, by the names of docs/metrics.md (held_out/...)."""


def load_recipe(recipe: str | Path, **settings: Any) -> RunConfig:
    """The settings of a recipe, checked, as `evenkeel config RECIPE` prints them.

    Args:
        recipe: a YAML file.
        settings: over the recipe's: `steps=10`, `correction={"preset": "icepop"}`, or by dotted key, `**{"rollout.workers": 2}`.
    Raises: ConfigError, with file, line and key.
    """
    return load_config(RunConfig, Path(recipe), list(_words(settings)))


def train(recipe: str | Path | RunConfig, *, retries: int = 0, quiet: bool = False, **settings: Any) -> Run:
    """Train as `evenkeel train RECIPE` does, and wait until the run has ended; progress is printed, a line a step.

    Ctrl-C (in a notebook: interrupt the kernel) finishes the current step and writes a checkpoint.

    Args:
        recipe: a YAML file, or what load_recipe has made of one.
        retries: how often to restart the run's process if it dies or hangs.
        quiet: print nothing.
        settings: as load_recipe's; `run_dir` says where the run goes. A Ray that this process is connected to is not used, unless
            `**{"ray.address": ...}` names it.
    Raises: ConfigError as load_recipe; RunFailed, with the run's last sentence.
    """
    with _recipe_file(recipe) as file:
        words = list(_words(settings))
        config = load_config(RunConfig, file, words)
        folder = config.run_dir or fresh_path(Path("runs"), config.name)
        command = ["train", str(file), *words, f"run_dir={folder.absolute()}", *(["--retries", str(retries)] if retries else [])]
        _run(command, folder, quiet)
    return Run(folder.absolute())


def resume(run: Run | str | Path, *, retries: int = 0, quiet: bool = False, **settings: Any) -> Run:
    """Go on from a run's newest checkpoint, as `evenkeel train --resume FOLDER` does. Args, Raises: as train."""
    folder = run.folder if isinstance(run, Run) else Path(run)
    _run(["train", "--resume", str(folder), *_words(settings), *(["--retries", str(retries)] if retries else [])], folder, quiet)
    return Run(folder.absolute())


def evaluate(model: Run | str | Path, task: str | Path = "", *, problems: int = 512, quiet: bool = False, **settings: Any) -> HeldOut:
    """Ask a model the held-out questions of a task, as `evenkeel eval MODEL --task TASK` does.

    Args:
        model: a run (its best checkpoint), a Hugging Face folder, or a name of the hub.
        task: a recipe, or the name of a reasoning-gym data set; left out for a run: its own.
        problems: how many questions.
        settings: as load_recipe's, such as `evaluation={"temperature": 0}`.
    Raises: RunFailed.
    """
    given = model.folder if isinstance(model, Run) else model
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "held_out.json"
        words = ["--task", str(task)] if task else []
        _run(["eval", str(given), *words, "--problems", str(problems), "--json", str(file), *_words(settings)], None, quiet)
        numbers = {name: math.nan if value is None else value for name, value in json.loads(file.read_text()).items()}
    accuracy, low, high = (numbers[f"held_out/{name}"] for name in ("accuracy", "wilson_low", "wilson_high"))
    return HeldOut(accuracy, (low, high), numbers)


def read_run(folder: str | Path) -> Run:
    """A run's folder, to be read. Raises: ConfigError if it is none."""
    return Run(RunFolder.view(Path(folder)).path.absolute())


def _words(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """KEY=VALUE of the command line; what is nested gets dotted keys."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _words(value, f"{prefix}{key}.")
        else:
            text = str(value) if isinstance(value, (str, os.PathLike)) else json.dumps(value, default=str)
            yield f"{prefix}{key}={text}"


@contextmanager
def _recipe_file(recipe: str | Path | RunConfig) -> Iterator[Path]:
    if not isinstance(recipe, RunConfig):
        yield Path(recipe)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True), sort_keys=False))
        yield file


def _run(words: list[str], folder: Path | None, quiet: bool) -> None:
    """The command line in a process of its own, its output printed here. Raises: RunFailed."""
    path = os.pathsep.join([*checkout(), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _CHILD, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # a terminal's Ctrl-C reaches it once, through us
    )
    assert process.stdout is not None and process.stderr is not None
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    reader.start()
    while True:
        try:
            for line in process.stdout:
                if not quiet:
                    print(line, end="", flush=True)
            code = process.wait()
            break
        except KeyboardInterrupt:  # once: the step is finished and saved; twice: the run ends at once, as on a terminal
            process.send_signal(signal.SIGINT)
        except BaseException:
            process.kill()
            raise
    reader.join()
    if code not in (0, _ENDED_BY_ALARM):
        sentence = "".join(said).rpartition("evenkeel: ")[2].strip()
        raise RunFailed(sentence or f"`evenkeel {words[0]}` has ended with exit status {code}", folder)


def _table(file: Path) -> pd.DataFrame:
    import pandas as pd  # half a second, for a run's numbers alone

    lines = file.read_text().splitlines() if file.exists() else []
    found = pd.DataFrame([json.loads(line) for line in lines if line.endswith("}")])  # the last line may be half written
    return found.set_index("step") if len(found) else found
