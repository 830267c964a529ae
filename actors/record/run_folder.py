"""The folder of a run: what is where.

    recipe.yaml                     the recipe as given, settings of the command line merged in
    config.yaml                     the configuration that runs: plain values
    metrics.jsonl                   one line a step                      evaluations.jsonl    one line a held-out evaluation
    monitor.jsonl                   one line an event of the early warning: step, name (the symptom), state, value, growth, message
    clipped_tokens.jsonl            one line a step that clipped any: [token id, how often] of the most frequent ones, by advantage
    answer_lengths.jsonl            one line a step: tokens of one answer of each trained group
    timeline.jsonl                  one line a span: what each process did when (timeline.py); bounded
    ledger.jsonl                    one line a prompt that has left the book (actors/groups/ledger.py)
    rewound.jsonl                   lines of the .jsonl files before the ledger that a resume took back (nothing of them is deleted)
    events.log                      what happened: time, level, [what it says of the run's end], text (RunEvent)
    tensorboard/                    event files                          tracker_id, wandb/, mlflow.db    with such metrics.views
    trajectories/step_000010.txt    samples as text                      trajectories/held_out_000010.txt
    tokens/step_000010.npz          trajectories token by token (TokenSample)    tokens/held_out_000010.npz
    slowest.json                    the prompts whose rewards took longest (SlowPrompt)
    stacks/                         where each process stood when a wait was half over (stack_collector.py)
    skipped_batches/                batches whose loss or gradient was not finite: a few (skipped_batches.py)
    scatter.npz                     pi_prox against mu (ScatterSample in actors/carriers.py)
    checkpoints/step_000050/        hf/ (Hugging Face), state/ (for a resume), manifest.json; step_....damaged: checkpoints/reader.py
    model/                          config and tokenizer of the model, for engines that start while it runs
    report.html

One process writes to it and holds a lock that the kernel releases when that process ends, however it ends. Readers need no lock.
Files are replaced whole (written to a temporary file, then renamed), or grow by whole lines; the last line may be torn after a crash, which
readers overlook and the next owner repairs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import filelock
import yaml
from pydantic import BaseModel

from evenkeel.actors.carriers import EventLevel, WaitNotice
from evenkeel.actors.json_lines import JsonLines, append_whole, step_of
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.processes.output import put
from evenkeel.actors.record.skipped_batches import KEPT, SkippedBatch
from evenkeel.actors.record.timeline import LaneSpan, append_spans, read_timeline
from evenkeel.correction.early_warning.monitor import Event, State
from evenkeel.correction.errors import ConfigError, DataError, require_utf8
from evenkeel.learner.weights.file_sums import flush_to_disk, seal

SampleKind = Literal["step", "held_out"]
"""What samples are of, a training batch or an evaluation: their files' names begin so."""
KEPT_SAMPLES = 1000  # steps whose samples are all kept as text
KEPT_TOKENS = 200  # steps whose samples are all kept token by token
SLOWEST_FILE = "slowest.json"
CHECKPOINT_FORMAT = 7
"""Stands in a checkpoint's manifest; another one is refused."""
# Errors of reading a damaged YAML file. A scalar or a list makes no dict; PyYAML raises several for a tag that doesn't fit.
_NO_YAML = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
FOLDERS = ("tensorboard", "trajectories", "checkpoints")
TRACKER_ID = "tracker_id"
# What a run writes before its first evaluation, step or checkpoint.
_BEFORE_NUMBERS = {*FOLDERS, "model", "recipe.yaml", "config.yaml", "events.log", "ledger.jsonl", "timeline.jsonl"}
_BEFORE_NUMBERS |= {"wandb", "mlflow.db", TRACKER_ID}
# A file that was being written, see write_file.
_PARTIAL = re.compile(r"\.\d+\.")
# How long an owner waits for the folder's lock: whoever only looks whether the folder is in use holds it for an instant.
_GLANCE_S = 0.3
# Refusals that a later attempt would meet again: rights, kinds of files, a file system without locks. A full disk may have room then.
_STAYS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_CHECKPOINT = re.compile(r"step_(\d{6,})$")
# Suffix of a whole checkpoint in whose place the same step's next one is about to come.
_REPLACED = ".replaced.partial"


_LEVELS: dict[str, EventLevel] = {level: level for level in get_args(EventLevel)}
LEVEL_OF_STATE: dict[State, EventLevel] = {State.OK: "info", State.WATCH: "watch", State.ALARM: "alarm"}
"""Levels of the early warning's events."""


class EventKind(StrEnum):
    """What an event says of the run's end. Most say nothing of it; a line has the kind of the others in brackets, before the text."""

    NONE = ""
    ENDING = "ending"
    """A signal or an alarm has asked for the end; the run has not ended yet."""
    SAVED = "saved"
    """A checkpoint is whole."""
    STOPPED = "stopped"
    """A signal has ended the run at once."""
    RESUMED = "resumed"
    """The run goes on from a checkpoint: what events before say of its end is over."""


# Stands before a notice, which a line has as JSON, in the place of a text.
_WAIT = "[waiting] "
_KIND = re.compile(rf"\[({'|'.join(kind for kind in EventKind if kind)})\] ")


@dataclass(frozen=True, slots=True)
class RunEvent:
    """What happened, and when."""

    time: str
    """ISO 8601, local time, to the second."""
    level: EventLevel
    text: str
    kind: EventKind = EventKind.NONE
    notice: WaitNotice | None = None
    """Notice of a wait; None: the event is of something else."""

    @classmethod
    def now(cls, level: EventLevel, message: str | WaitNotice, kind: EventKind = EventKind.NONE) -> RunEvent:
        if level not in _LEVELS:
            raise ValueError(f"event level {level!r}: use one of {', '.join(_LEVELS)}")
        time = datetime.now().isoformat(timespec="seconds")
        if isinstance(message, WaitNotice):
            return cls._of_wait(time, level, message)
        return cls(time, level, " ".join(message.split()), kind)

    @classmethod
    def _of_wait(cls, time: str, level: EventLevel, notice: WaitNotice) -> RunEvent:
        return cls(time, level, " ".join(str(notice).split()), notice=notice)

    @classmethod
    def parse(cls, line: str) -> RunEvent | None:
        """What `line` has written; None for anything else."""
        parts = line.split(None, 2)
        if len(parts) != 3 or (level := _LEVELS.get(parts[1])) is None:
            return None
        time, text = parts[0], parts[2]
        if found := _KIND.match(text):
            return cls(time, level, text[found.end() :], EventKind(found[1]))
        if text.startswith(_WAIT):
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # a line that was cut, or is no notice
                notice = WaitNotice(**json.loads(text.removeprefix(_WAIT)))
                if (type(notice.what), type(notice.seconds), type(notice.detail)) == (str, int, str):
                    return cls._of_wait(time, level, notice)
        return cls(time, level, text)

    @property
    def line(self) -> str:
        """A line of events.log, with its end."""
        kind = f"[{self.kind}] " if self.kind else ""
        said = f"{kind}{self.text}" if self.notice is None else f"{_WAIT}{json.dumps(asdict(self.notice))}"
        return f"{self.time} {self.level:7} {said}\n"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint."""

    step: int
    path: Path

    @property
    def hf(self) -> Path:
        """Folder that transformers loads."""
        return self.path / "hf"

    @property
    def state(self) -> Path:
        """Folder with optimizer, counters and whatever else a resume needs."""
        return self.path / "state"


@dataclass(frozen=True, slots=True, order=True)
class SlowPrompt:
    """A group whose scoring took long."""

    reward_s: float
    """Seconds from its last answer to its last reward, waiting for a scoring process included."""
    generate_s: float
    response_tokens: int
    prompt_id: str
    worker: str
    unscored: int
    """Answers without a reward."""


class RunFolder:
    """Made by `create` (a new run), `open` (resume: takes the lock) or `view` (reading only)."""

    def __init__(self, path: Path, lock: filelock.BaseFileLock | None = None) -> None:
        self.path = path
        self.metrics_path, self.evaluations_path = path / "metrics.jsonl", path / "evaluations.jsonl"
        self.events_path, self.monitor_path, self._clipped_path = path / "events.log", path / "monitor.jsonl", path / "clipped_tokens.jsonl"
        self._lengths_path, self.timeline_path = path / "answer_lengths.jsonl", path / "timeline.jsonl"
        self.recipe_path = path / "recipe.yaml"
        self.tensorboard_path, self.model_path = path / "tensorboard", path / "model"
        self.scatter_path, self.report_path = path / "scatter.npz", path / "report.html"
        self._lock = lock
        self.is_reused = False
        """The folder held what a failed start had left."""

    @classmethod
    def create(cls, path: Path | None, name: str, *, root: Path = Path("runs")) -> RunFolder:
        """Make and own the folder of a new run. What a start that failed has left is cleared away; its events.log stays.

        Args:
            path: the folder; None takes root/NAME-DATE-TIME.
            name: of the run.
        Raises: ConfigError if another process owns the folder, or it holds something already.
        """
        path = fresh_path(root, name) if path is None else Path(path)
        was_ours = (path / ".owner.json").is_file()
        lock = own(path)
        try:
            present = _refuse_others(path, was_ours=was_ours)
        except ConfigError:
            if not was_ours:
                (path / ".owner.json").unlink()
            lock.release()
            raise
        if is_reused := bool(present):
            clear(path, present)
        for name_of_folder in FOLDERS:
            (path / name_of_folder).mkdir()
        folder = cls(path, lock)
        folder.is_reused = is_reused
        return folder

    @staticmethod
    def check_free(path: Path) -> None:
        """Make nothing. Raises: ConfigError as `create` for a path that no new run can have."""
        if path.exists() and not path.is_dir():
            raise _not_made(path, os.strerror(errno.EEXIST))
        if path.is_dir():
            _refuse_others(path, was_ours=(path / ".owner.json").is_file())

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Own the folder of an earlier run, to go on with it: torn lines and half-written checkpoints are cleared away.

        Raises: ConfigError if it is no run folder or another process owns it.
        """
        folder = cls.view(path)
        folder._lock = own(folder.path)
        for lines in (*folder._lines_by_step, JsonLines(folder.timeline_path)):
            lines.repair()
        for leftover in folder.path.glob(f".*.{folder.timeline_path.name}"):  # of a kill while it lost its older half
            leftover.unlink(missing_ok=True)
        folder.clear_partial_checkpoints()
        return folder

    @classmethod
    def view(cls, path: Path) -> RunFolder:
        """The folder for reading, while it runs or afterwards. Raises: ConfigError if it is no run folder."""
        path = Path(path)
        if not (path / "config.yaml").is_file():
            reason = "has no config.yaml" if path.is_dir() else "is a file" if path.exists() else "doesn't exist"
            remedy = "Name one that `evenkeel train` wrote, such as runs/NAME-DATE-TIME"
            above = next((one for one in path.absolute().parents[:3] if (one / "config.yaml").is_file()), None)
            within = sorted(one.parent.name for one in path.glob("*/config.yaml"))
            if above is not None:
                remedy = f"It is within a run's folder: name that, {above}; a resume goes on from the newest checkpoint there"
            elif within:
                remedy = f"Name one of those in it: {', '.join(within[-8:])}"
            raise ConfigError(f"{path}: not a run folder: it {reason}. {remedy}.")
        return cls(path)

    def close(self) -> None:
        """Release the lock, so that another process may own the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _lines_by_step(self) -> tuple[JsonLines, ...]:
        """Files whose lines belong to a step."""
        paths = self.metrics_path, self.evaluations_path, self.monitor_path, self._clipped_path, self._lengths_path
        return tuple(JsonLines(path) for path in paths)

    # Configuration, numbers, events, samples.

    def write_recipe(self, given: Mapping[str, Any]) -> None:
        """Keep the recipe of the run, which a resume resolves anew. Its last line says that it is whole."""
        self.write_text("recipe.yaml", yaml.safe_dump(dict(given), sort_keys=False, allow_unicode=True, explicit_end=True))

    def check_recipe(self) -> None:
        """Raises: ConfigError if there is no recipe, or only a part of one: what it lacks would silently be a default; OSError."""
        path, anew = self.recipe_path, f"start a new run from its weights: model={self.path / 'checkpoints'}/step_.../hf"
        try:
            text = _bytes_of(path).decode(errors="replace")
        except FileNotFoundError as error:
            raise ConfigError(f"{path} is missing: without it no resume knows what the run was given; {anew}") from error
        if text.split()[-1:] != ["..."]:
            raise ConfigError(f"{path}: damaged, it doesn't end with the line `...`. Put back a whole copy, or {anew}")

    def write_config(self, config: BaseModel) -> None:
        """Keep the configuration that runs: plain values, all of it."""
        self.write_text("config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))

    def read_config(self) -> dict[str, Any]:
        """The resolved configuration as plain data; `steps` is whole. Raises: ConfigError if it is damaged; OSError, which may pass."""
        path = self.path / "config.yaml"
        try:
            content = yaml.safe_load(_bytes_of(path).decode()) or {}
        except _NO_YAML as error:
            raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: holds a {type(content).__name__}, not the settings of a run as KEY: VALUE")
        try:
            return content | ({"steps": int(content["steps"])} if "steps" in content else {})
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"{path}: steps = {content['steps']}: not a number of steps") from error

    def keep_model_files(self, source: Path) -> None:
        """Keep config and tokenizer of a model folder, which may be moved or removed while the run goes on."""
        from evenkeel.learner.hf.folder import side_files  # it imports torch, which not every user of a run folder needs

        for name, content in side_files(source).items():
            self.write_file(f"model/{name}", partial(Path.write_bytes, data=content))

    def append_metrics(self, metrics: StepMetrics) -> None:
        """Add a step's line to metrics.jsonl."""
        JsonLines(self.metrics_path).append(metrics.record())

    def append_evaluation(self, metrics: StepMetrics) -> None:
        """Add an evaluation's line to evaluations.jsonl; its step is the one whose weights answered."""
        JsonLines(self.evaluations_path).append(metrics.record())

    def read_metrics(self) -> list[StepMetrics]:
        """All steps so far, in order; a line that is being written is left out."""
        return JsonLines(self.metrics_path).read(StepMetrics.of_record)

    def each_step(self, wanted: Callable[[str], bool]) -> Iterator[StepMetrics]:
        """As `read_metrics`, without the others in memory. Args: wanted: whether a metric of this name is to be in it."""
        return JsonLines(self.metrics_path).each(partial(StepMetrics.of_record, wanted=wanted))

    def read_evaluations(self) -> list[StepMetrics]:
        """All held-out evaluations so far, in order of their steps."""
        return sorted(JsonLines(self.evaluations_path).read(StepMetrics.of_record), key=lambda metrics: metrics.step)

    def rewind(self, step: int) -> int:
        """Take back what was written after `step`, before a resume from there; the lines move to rewound.jsonl.

        Returns: number of lines taken back.
        """
        return sum(lines.rewind(step, to=self.path / "rewound.jsonl") for lines in self._lines_by_step)

    def append_monitor_event(self, event: Event) -> None:
        """Add an event of the early warning to monitor.jsonl."""
        JsonLines(self.monitor_path).append(_event_record(event))

    def read_monitor_events(self) -> list[Event]:
        """All events of the early warning so far, in order; a line that is being written is left out."""
        return JsonLines(self.monitor_path).read(_parse_event)

    def append_clipped_tokens(self, step: int, clipped: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Add a step's most often clipped tokens (correction/diagnostics/diagnose.py), if there are any, to clipped_tokens.jsonl."""
        if any(clipped.values()):
            JsonLines(self._clipped_path).append({"step": step, **clipped})

    def read_clipped_tokens(self) -> dict[str, Counter[int]]:
        """How often each token id was among a step's most often clipped ones, over all steps so far, by the advantage's sign."""
        totals = {"positive": Counter[int](), "negative": Counter[int]()}
        for record in JsonLines(self._clipped_path).each(_parse_clipped):
            for sign, total in totals.items():
                total.update(record.get(sign, {}))
        return totals

    def append_answer_lengths(self, step: int, tokens: Sequence[int]) -> None:
        """Add the lengths of a step's answers, one of each group, to answer_lengths.jsonl."""
        JsonLines(self._lengths_path).append({"step": step, "tokens": list(tokens)})

    def read_answer_lengths(self, *, first_step: int) -> list[int]:
        """Tokens of one answer of each group, from `first_step` on, in order; empty for a run of a version that did not write them."""
        steps = JsonLines(self._lengths_path).read(lambda line: (step_of(line), [int(tokens) for tokens in line["tokens"]]))
        return [tokens for step, found in steps if step >= first_step for tokens in found]

    def append_spans(self, spans: Sequence[LaneSpan]) -> None:
        """Add lines to timeline.jsonl, which is bounded."""
        append_spans(self.timeline_path, spans)

    def read_timeline(self) -> list[LaneSpan]:
        """What each process did when, as far back as it is kept; a line that is being written is left out."""
        return read_timeline(self.timeline_path)

    def read_slowest(self) -> list[SlowPrompt]:
        """The prompts of slowest.json, slowest first; none of a run that has none, or whose file is damaged."""
        try:
            return sorted(map(_parse_slow, json.loads((self.path / SLOWEST_FILE).read_text(encoding="utf-8"))), reverse=True)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return []

    def event(self, level: EventLevel, text: str) -> None:
        """Add a line to events.log."""
        self.write_event(RunEvent.now(level, text))

    def write_event(self, entry: RunEvent) -> None:
        """Add an event's line to events.log; it may be older than the last one."""
        try:
            append_whole(self.events_path, entry.line.encode(errors="backslashreplace"))
        except OSError as error:  # a full disk: what there is to say may be just that
            put(f"{self.events_path} can't be written ({error}): {entry.line}", sys.stderr)

    def read_events(self) -> list[RunEvent]:
        """All events so far, in order."""
        if not self.events_path.is_file():
            return []
        lines = self.events_path.read_text(errors="replace").splitlines()
        return [event for line in lines if (event := RunEvent.parse(line)) is not None]

    def write_trajectories(self, step: int, text: str, kind: SampleKind = "step") -> Path:
        """Keep samples as text, of older steps each hundredth's."""
        if (gone := step - KEPT_SAMPLES) % 100:
            (self.path / f"trajectories/{kind}_{gone:06d}.txt").unlink(missing_ok=True)
        return self.write_text(f"trajectories/{kind}_{step:06d}.txt", text)

    def write_tokens(self, step: int, write: Callable[[Path], object], kind: SampleKind = "step") -> Path:
        """Keep trajectories token by token, of older steps each fiftieth's."""
        for older in self.token_steps(kind):  # evaluations come every so many steps: the one that goes isn't at a fixed distance
            if older <= step - KEPT_TOKENS and older % 50:
                self.tokens_path(older, kind).unlink(missing_ok=True)
        return self.write_file(self.tokens_path(step, kind).relative_to(self.path).as_posix(), write)

    def token_steps(self, kind: SampleKind = "step") -> list[int]:
        """Steps of which trajectories are kept token by token, in order."""
        found = (path.stem.removeprefix(f"{kind}_") for path in (self.path / "tokens").glob(f"{kind}_*.npz"))
        return sorted(int(number) for number in found if number.isascii() and number.isdecimal())

    def tokens_path(self, step: int, kind: SampleKind = "step") -> Path:
        return self.path / f"tokens/{kind}_{step:06d}.npz"

    def keep_skipped_batch(self, batch: SkippedBatch) -> Path | None:
        """Keep a batch that the learner's guard skipped; None if there are KEPT of them. Read it with SkippedBatch.load(path)."""
        name = f"skipped_batches/step_{batch.step:06d}"
        if len(list((self.path / "skipped_batches").glob("step_*.json"))) >= KEPT:
            return None
        path = self.write_file(f"{name}.safetensors", batch.save_tensors)  # first: what a full disk leaves without its JSON counts for none
        self.write_file(f"{name}.json", batch.save_rest)
        return path

    def trajectory_files(self, kind: SampleKind = "step") -> list[Path]:
        """Samples of one kind, oldest first."""
        return sorted(path for path in (self.path / "trajectories").glob(f"{kind}_*.txt") if path.stem.rpartition("_")[2].isdecimal())

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of the folder whole: a reader sees the old one or the new one, never a part. Half a surrogate pair is escaped."""
        return self.write_file(name, lambda path: path.write_text(text, encoding="utf-8", errors="backslashreplace"))

    def write_file(self, name: str, write: Callable[[Path], object]) -> Path:
        """The same for a file of any kind; `write` is given the path of a temporary file in the same folder, with the same suffix."""
        path = self.path / name
        make_below(self.path, path.parent)
        temporary = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            write(temporary)
            flush_to_disk(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    # Checkpoints.

    @contextmanager
    def checkpoint(self, step: int, is_given_up: Callable[[], bool] = lambda: False) -> Iterator[Checkpoint]:
        """A place to write a checkpoint to, which becomes checkpoints/step_... when the block ends well, and goes if it doesn't.

        Args: is_given_up: whether nobody waits for this checkpoint any more; asked after what may take a slow disk long.
        Raises: DataError if it is given up.
        """
        final = self.path / "checkpoints" / f"step_{step:06d}"
        partial = final.with_name(f"{final.name}.{os.urandom(4).hex()}.partial")  # another one's, should an old rank still write to that
        self.clear_partial_checkpoints(ignore_errors=True)  # of saves that failed while a rank was still writing
        try:
            for part in ("hf", "state"):
                make_below(self.path, partial / part)
            _refuse_if(is_given_up(), partial)
            yield Checkpoint(step, partial)
            seal(partial, {"format": CHECKPOINT_FORMAT, "step": step})
            for written in [*partial.rglob("*"), partial]:  # on disk before the name says that it is complete
                flush_to_disk(written)
            _refuse_if(is_given_up(), partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        replaced = final.with_name(final.name + _REPLACED)
        if final.exists():  # a resumed run reaches the step of an earlier checkpoint again
            final.rename(replaced)
        partial.rename(final)
        flush_to_disk(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def clear_partial_checkpoints(self, *, ignore_errors: bool = False) -> None:
        """Remove what is left of checkpoints that were not completed. One that was to be replaced just then is put back."""
        for leftover in (self.path / "checkpoints").glob("*.partial"):
            final = leftover.with_name(leftover.name.removesuffix(_REPLACED))
            if final != leftover and not final.exists():
                with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
                    leftover.rename(final)
            else:
                shutil.rmtree(leftover, ignore_errors=ignore_errors)

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first. Raises: OSError."""
        folder = self.path / "checkpoints"  # glob would take one that can't be read for an empty one
        found = [(_CHECKPOINT.match(name), folder / name) for name in (os.listdir(folder) if folder.exists() else ())]
        return sorted((Checkpoint(int(match[1]), path) for match, path in found if match), key=lambda checkpoint: checkpoint.step)

    def best_checkpoint(self) -> Checkpoint | None:
        """The one with the best evaluation, the latest of equals; None if no checkpoint's step was evaluated.

        An evaluation belongs to the step at which it began; its last answers may come from newer weights. Best is the highest
        lower end of the Wilson interval, so that luck with few problems doesn't win against many.
        """
        accuracies = dict(JsonLines(self.evaluations_path).each(lambda line: (step_of(line), float(line["held_out/wilson_low"]))))
        evaluated = [checkpoint for checkpoint in self.checkpoints() if checkpoint.step in accuracies]
        return max(evaluated, key=lambda checkpoint: (accuracies[checkpoint.step], checkpoint.step), default=None)

    def prune_checkpoints(self, keep: int) -> list[Checkpoint]:
        """Remove all complete checkpoints but the newest `keep` >= 1 and the best one. Returns: those removed."""
        best = self.best_checkpoint()
        removed = [checkpoint for checkpoint in self.checkpoints()[: -max(keep, 1)] if checkpoint != best]
        for checkpoint in removed:
            shutil.rmtree(checkpoint.path)
        return removed


def _bytes_of(path: Path) -> bytes:
    """Raises: OSError that names the file, which one of reading doesn't."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _event_record(event: Event) -> dict[str, Any]:
    """An event as monitor.jsonl has it; values that aren't finite stand there as words."""
    words = {name: str(value) for name, value in (("value", event.value), ("growth", event.growth)) if not math.isfinite(value)}
    return asdict(event) | words


def _parse_event(record: dict[str, Any]) -> Event:
    numbers = {"step": step_of(record)} | {name: float(record[name]) for name in ("value", "growth")}
    return Event(**{**record, **numbers, "state": State(record["state"])})


def _parse_clipped(record: dict[str, Any]) -> dict[str, dict[int, int]]:
    counts = {sign: {int(token): int(count) for token, count in record.get(sign, ())} for sign in ("positive", "negative")}
    if any(not 0 <= token < 1 << 32 for of_sign in counts.values() for token in of_sign):
        raise ValueError("an id that no tokenizer has")
    return counts


def _parse_slow(one: dict[str, Any]) -> SlowPrompt:
    return SlowPrompt(
        float(one["reward_s"]),
        float(one["generate_s"]),
        int(one["response_tokens"]),
        str(one["prompt_id"]),
        str(one["worker"]),
        int(one["unscored"]),
    )


def _refuse_if(is_given_up: bool, folder: Path) -> None:
    if is_given_up:
        raise DataError(f"{folder}: given up, because its disk was late")


# Which folder a new run gets, and who owns it: one process, by a lock that the kernel releases when it ends.


def fresh_path(root: Path, name: str) -> Path:
    """root/NAME-DATE-TIME, with a number behind it if that is taken."""
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = [root / stem, *(root / f"{stem}-{i}" for i in range(2, 100))]
    return next(path for path in candidates if not path.exists())


def is_failed_start(path: Path, present: Sequence[str]) -> bool:
    """Whether a folder holds only what a run writes before its first number. A config.yaml alone may be anybody's."""
    known = all(name in _BEFORE_NUMBERS or _PARTIAL.match(name) for name in present)
    samples = path / "trajectories"
    has_samples = samples.is_dir() and any(samples.iterdir())
    checkpoints = path / "checkpoints"
    has_checkpoints = checkpoints.is_dir() and any(not entry.name.endswith(".partial") for entry in checkpoints.iterdir())
    is_ours = "config.yaml" not in present or set(FOLDERS) <= set(present)  # which are made before it
    return known and is_ours and not has_samples and not has_checkpoints


def clear(path: Path, present: Sequence[str]) -> None:
    """Remove what a start that failed has left, all but its events.log."""
    for name in present:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        elif name != "events.log":
            (path / name).unlink()


def make_below(run_folder: Path, path: Path) -> None:
    """Make a folder below the run's, with those between. Raises: FileNotFoundError if the run's is gone, which is not made anew."""
    if not run_folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the run folder is gone", str(run_folder))
    for missing in reversed([path, *path.parents][: len(path.relative_to(run_folder).parts)]):
        missing.mkdir(exist_ok=True)


def _refuse_others(path: Path, *, was_ours: bool) -> list[str]:
    """Returns: what a start that failed has left in the folder. Raises: ConfigError if there is anything else."""
    present = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".owner"))
    if not present or (was_ours and is_failed_start(path, present)):
        return present
    what = "a run" if "config.yaml" in present else f"other files ({present[0]}, ...)"
    remedy = f"Go on with it (--resume {path}), or choose" if "config.yaml" in present else "Choose"
    raise ConfigError(f"run_dir = {path}: holds {what} already, and a new run would mix with it. {remedy} another run_dir.")


def _not_made(path: Path, reason: str | None) -> ConfigError:
    return ConfigError(f"run_dir = {path}: can't be made: {reason}. Choose another run_dir.")


def own(path: Path) -> filelock.BaseFileLock:
    """Take the lock of a folder, which is made if need be.

    Raises: ConfigError if another process has it, or the folder can't be used as it is; OSError for what may pass, such as a full disk.
    """
    require_utf8("run_dir = ", path.absolute())
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_made(path, error.strerror) from error
    lock = filelock.FileLock(path / ".owner.lock", thread_local=False)  # a thread takes it, another may give it back
    owner = path / ".owner.json"
    try:
        lock.acquire(timeout=_GLANCE_S)
    except filelock.Timeout:
        try:
            who = json.loads(owner.read_text())
            by = f"process {who['pid']} on {who['host']} since {who['since']}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            by = "another process"
        raise ConfigError(f"run_dir = {path}: in use by {by}. Wait for that run or stop it, or choose another run_dir.") from None
    except OSError as error:
        if error.errno not in _STAYS:
            raise
        raise ConfigError(f"run_dir = {path}: can't be locked: {error}. Choose another run_dir, or let this user write there.") from error
    ours = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().isoformat(timespec="seconds")}
    try:
        owner.write_text(json.dumps(ours))
    except OSError as error:
        lock.release()
        if error.errno not in _STAYS:
            raise
        raise ConfigError(f"run_dir = {path}: can't be written to: {error}. Choose another, or let this user write there.") from error
    return lock
