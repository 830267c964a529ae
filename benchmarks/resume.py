"""What a resume costs after a run of any length: seconds and memory with ten million prompts behind it, a tenth and a hundredth of them.

    python benchmarks/resume.py [--prompts 10000000] [--groups 512] [--keep FOLDER]

For each of the three numbers a run folder is written that is as a killed run leaves it: one prompt a line in ledger.jsonl, one step of
`--groups` prompts a line in metrics.jsonl (each metric, 12 KB) and in answer_lengths.jsonl, a checkpoint (model, optimizer, book
with two steps of groups under way, half of them finished), one step after it, and torn last lines. What writes them is what writes a run's:
Ledger, RunFolder, GroupBook, TrainingState, LearnerRank; model and task are the nano recipe's. The book gets its counts at once
instead of ten million groups one by one.

Then a process of its own does with the folder what `evenkeel train --resume` does before it starts anything: it opens it, compares all
files of the checkpoint with their checksums and reads its state (find_resume_point), takes back what came later (take_back), looks which
steps have a line in metrics.jsonl, and compares the ledger with its checksum (open_ledger). The files were just written, so the page cache
has them; a disk adds what it takes to read checkpoint, metrics.jsonl and ledger.jsonl once. Imports, model and task are loaded before, and
don't count: they are the same for each number. Peak memory is what comes on top of them.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sides import NANO_RECIPE, options, scratch
from evenkeel.actors.carriers import StoredGroup, Ticket
from evenkeel.actors.checkpoints.reader import steps_without_a_line, take_back
from evenkeel.actors.checkpoints.state import TrainingState, open_ledger
from evenkeel.actors.config import RunConfig
from evenkeel.actors.groups.book import GroupBook
from evenkeel.actors.groups.ledger import Ledger, outstanding_ids
from evenkeel.actors.groups.snapshot import BookContents, BookSnapshot
from evenkeel.actors.metrics.catalogue import CATALOGUE
from evenkeel.actors.metrics.step_metrics import StepMetrics
from evenkeel.actors.record.run_folder import Checkpoint, RunFolder
from evenkeel.recipe import as_recipe, load_config
from evenkeel.resume_point import find_resume_point, with_absolute_paths
from evenkeel.rollout.prompt_place import PromptPlace
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tasks.mixture import Mixture
from evenkeel.rollout.trajectory import FinishReason, Group, Prompt, Trajectory, VersionSpan, ids_of, logprobs_of
from evenkeel.task_config import mixture

SAMPLES, ANSWER = 8, 6
"""Answers of a group, and tokens of an answer."""
TORN = b'{"step": '
"""What a kill leaves of a last line."""

SavePolicy = Callable[[Checkpoint], object]
"""Writes a learner's part of a checkpoint: its state, and the model's folder."""


@dataclass
class Resumed:
    """What a resume took."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By part."""
    megabytes: float = 0.0
    """Peak memory, above what the process had before."""
    prompts: int = 0
    """Lines of the ledger that it goes on with."""
    under_way: int = 0
    """Prompts under way."""
    warnings: list[str] = field(default_factory=list)
    """Its warnings."""


# -- the folder of a run -------------------------------------------------------------------------------------------------


def write_run(base: Path, model: Path, save: SavePolicy, prompts: int, groups: int) -> Path:
    """A run that was killed in the second step after its checkpoint. Returns: its folder.

    Args:
        base: folder for it.
        model: its model.
        prompts: trained by the checkpoint, a multiple of `groups`, which is the number of a step.
    """
    steps, folder_path = prompts // groups, base / f"run-{prompts}"
    changes = [f"model={model}", f"steps={steps + 100}", f"groups_per_step={groups}"]
    config, draw = with_absolute_paths(load_config(RunConfig, NANO_RECIPE, changes)), random.Random(0)
    names = [metric.name for metric in CATALOGUE.values() if not metric.is_family and metric.name != "step"]
    with RunFolder.create(folder_path, "resume") as folder:
        folder.write_recipe(as_recipe(config))
        folder.write_config(config)
        ledger = Ledger(folder.path / "ledger.jsonl")
        for step in range(1, steps + 2):
            if step == steps + 1:
                save_checkpoint(folder, config, model, save, ledger, steps)
            first, last = (step - 1) * groups, step * groups
            ledger.hand_out(_ids(last + groups if step > 1 else 0, last + 2 * groups))
            ledger.settle(step, trained=_ids(first, last), discarded=[], contents=_contents(step, groups))
            folder.append_metrics(StepMetrics(step, {name: draw.random() for name in names}))
            folder.append_answer_lengths(step, [draw.randint(100, 9999) for _ in range(groups)])
        for lines in (folder.path / "ledger.jsonl", folder.metrics_path):
            with lines.open("ab") as file:
                file.write(TORN)
    return folder_path


def save_checkpoint(folder: RunFolder, config: RunConfig, model: Path, save: SavePolicy, ledger: Ledger, steps: int) -> None:
    task = questions(config, model)
    contents = opened(task, steps, config.groups_per_step).contents()
    ledger.compare(contents)
    book = BookSnapshot.of(contents, [one.payload for one in contents.finished])
    settings = config.model_dump(mode="json")
    with folder.checkpoint(steps) as checkpoint:
        save(checkpoint)
        mark = ledger.flush()
        state = TrainingState(steps, steps, 1.0, book, {}, {}, ledger=mark, data=task.fingerprint, settings=settings)
        state.save(checkpoint.state)


def _contents(step: int, groups: int) -> BookContents:
    """Of a book after so many steps, when two steps of groups are being sampled."""
    first, last = step * groups, (step + 2) * groups
    tickets = (Ticket(i, Prompt(one, "", (), ""), step) for i, one in enumerate(_ids(first, last), start=first))
    return BookContents(step, last, first, tuple(tickets), (), {}, ())


def _ids(first: int, last: int) -> list[str]:
    """Ids of the prompts at these positions."""
    return [str(PromptPlace("train", 0, position)) for position in range(first, last)]


def questions(config: RunConfig, model: Path) -> Mixture:
    """The run's task, with its prompts as token ids."""
    return mixture(config, ChatEncoder.of_entries(model, config.rollout))


def opened(task: Mixture, steps: int, groups: int) -> GroupBook:
    """A book from which so many steps have been trained; two steps of groups are under way, of which the older are finished."""
    book = GroupBook(groups_per_step=groups, max_staleness=1)
    book.version = book.published = steps
    book.admitted = book.trained = steps * groups
    tickets = book.admit([task.train_prompt(position) for position in range(steps * groups, (steps + 2) * groups)], now=0.0)
    for ticket in tickets[:groups]:
        one = Group(ticket.group_id, ticket.prompt, tuple(_answer(ticket.prompt, steps) for _ in range(SAMPLES)), steps)
        book.finish(StoredGroup(one.facts, one), now=0.0)
    return book


def _answer(prompt: Prompt, version: int) -> Trajectory:
    ids, logprobs = ids_of(range(ANSWER)), logprobs_of([-1.0] * ANSWER)
    spans = (VersionSpan(version, 0, ANSWER),)
    return Trajectory(prompt.prompt_id, ids_of(prompt.token_ids), ids, logprobs, spans, FinishReason.STOP, reward=1.0)


# -- what a resume does --------------------------------------------------------------------------------------------------


def resume(run: Path) -> Resumed:
    """All that a resume does with the folder before it starts anything."""
    from evenkeel.learner.hf.folder import check_trainable
    from evenkeel.learner.weights.checkpoint_files import check_readable  # noqa: F401 - it imports torch, as a resume does

    found = Resumed()
    view = RunFolder.view(run)
    newest = view.checkpoints()[-1]
    check_trainable(newest.hf)
    with RunFolder.view(run) as folder:
        task = questions(with_absolute_paths(load_config(RunConfig, folder.recipe_path, [])), newest.hf)
    before = _resident_megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    with _timed(found, "open"):
        folder = RunFolder.open(run)
    with folder:
        with _timed(found, "checkpoint"):
            point = find_resume_point(folder, ()).point
        assert point is not None
        with _timed(found, "take back"):
            point, said = take_back(folder, point, task)
        with _timed(found, "metrics"):
            said += steps_without_a_line(folder, point.checkpoint.step)
        with _timed(found, "ledger"):
            ledger = open_ledger(folder.path / "ledger.jsonl", point.state, lambda level, text: said.append((level, str(text))))
        found.prompts, found.under_way = ledger.flush().lines, len(outstanding_ids(point.state.book))
    found.megabytes = _resident_megabytes("VmHWM") - before
    found.warnings = [text for _, text in said]
    return found


@contextmanager
def _timed(found: Resumed, part: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    found.seconds[part] = time.perf_counter() - began


def _resident_megabytes(name: str) -> float:
    """VmRSS: now; VmHWM: the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


# -- the comparison ------------------------------------------------------------------------------------------------------


def row(run: Path, groups: int, found: Resumed) -> str:
    sizes = [(run / name).stat().st_size / 1e6 for name in ("ledger.jsonl", "metrics.jsonl")]
    parts = " | ".join(f"{seconds:.2f}" for seconds in found.seconds.values())
    total = sum(found.seconds.values())
    files = " | ".join(f"{size:,.0f}" for size in sizes)
    return f"| {found.prompts:,} | {found.prompts // groups:,} | {files} | {parts} | {total:.2f} | {found.megabytes:.0f} |"


HEAD = """| prompts | steps | ledger, MB | metrics, MB | seconds: open | checkpoint | take back | metrics | ledger | all | memory, MB |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--prompts", type=int, default=10_000_000)
    parser.add_argument("--groups", type=int, default=512, help="prompts of a step")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run folders there")
    arguments = parser.parse_args()
    from evenkeel.learner.config import LearnerConfig
    from evenkeel.learner.hf.nano import build_nano_model
    from evenkeel.learner.learner_rank import LearnerRank

    with scratch(arguments.keep) as base:
        config, model = load_config(RunConfig, NANO_RECIPE, []), base / "model"
        task = mixture(config, {})
        assert config.init is not None
        build_nano_model(model, [task.train_prompt(position).text for position in range(2000)], config.init.architecture)
        learner = LearnerRank(LearnerConfig())
        learner.load(model)

        def save(checkpoint: Checkpoint) -> None:
            learner.save(checkpoint.state / "learner")
            learner.save_hf(checkpoint.hf)

        print(HEAD)
        for part in (100, 10, 1):
            prompts = max(1, arguments.prompts // part // arguments.groups) * arguments.groups
            run = write_run(base, model, save, prompts, arguments.groups)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply(resume, (run,))
            print(row(run, arguments.groups, found), *found.warnings, sep="\n", flush=True)


if __name__ == "__main__":
    main()
