"""Questions from the rows of files and Hugging Face data sets. Bad rows are skipped, each with its reason."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from evenkeel.correction.errors import DataError, counted
from evenkeel.rollout.config import FileTask, FoldersTask, HuggingFaceTask
from evenkeel.rollout.task_folders.folder import folder_rows
from evenkeel.rollout.tasks.questions import Question, SkippedRow, hash_share, text_key

# ----------------------------------------------------------------------------------------------------------------------
# Rows as files and Hugging Face data sets hold them, before anything is asked of them; what isn't UTF-8 is refused or named.

PlacedRow = tuple[str, Any]
"""(file and line or row, row); a row that can't even be read is a DataError with the reason."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character: from a JSON escape that lacks its other half, or, as U+DC80 to U+DCFF, a byte that is not UTF-8 (PEP 383)."""
# The byte-order mark: at the start of a file, and in its middle where files were joined. It says nothing in UTF-8.
_MARK = "\ufeff"
# Seconds within which the hub has to answer.
_HUB_S = 10.0


class UnreadableFile(Exception):
    """No row of a file can be read; the message says why."""


def file_rows(path: Path) -> Iterator[PlacedRow]:
    """Rows of a file that is there.

    Raises: UnreadableFile if it is of an unknown kind, or can't be read as a whole; while it is read, too.
    """
    readers = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet}
    if path.suffix not in readers:
        raise UnreadableFile(f"unknown kind of file {path.suffix!r}; use one of {', '.join(readers)}")
    return readers[path.suffix](path)


def dataset_rows(task: HuggingFaceTask, split: str) -> Iterator[PlacedRow]:
    """Rows of one split of a Hugging Face data set.

    Raises: DataError if it can't be loaded.
    """
    import datasets

    on_disk = Path(task.path)
    with contextlib.ExitStack() as stack:
        unreachable = None if on_disk.exists() else _why_the_hub_is_out_of_reach(task.path)
        if unreachable is not None:
            stack.enter_context(_from_cache_alone())
        try:
            if (on_disk / "dataset_dict.json").exists():
                table = datasets.load_from_disk(task.path)[split]
            elif (on_disk / "state.json").exists():
                table = datasets.load_from_disk(task.path)
            else:
                table = datasets.load_dataset(task.path, task.subset, split=split, revision=task.revision)
        except Exception as error:
            if unreachable is not None:
                raise DataError(
                    f"rollout.task.path = {task.path} (split {split}): no such folder here, no copy in the cache, and the Hugging Face hub "
                    f"can't be reached ({unreachable}); load it once with a network connection, or take a file (rollout.task.kind: file)"
                ) from error
            raise DataError(
                f"rollout.task.path = {task.path} (split {split}): datasets can't load it ({type(error).__name__}: {error}); "
                f"check path, subset and split, or load it once with a network connection"
            ) from error
    return _table_rows(table, f"{task.path} [{split}]")


def _why_the_hub_is_out_of_reach(path: str) -> str | None:
    """The reason; None if the hub answers anything at all. The datasets package itself would try for half a minute."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        HfApi().dataset_info(path, timeout=_HUB_S)
    except OfflineModeIsEnabled:
        return "offline mode is on, HF_HUB_OFFLINE"
    except httpx.TransportError as error:
        return str(error) or type(error).__name__
    except Exception:  # a name that isn't there, or no access: what loads it says that better
        return None
    return None


@contextlib.contextmanager
def _from_cache_alone() -> Iterator[None]:
    """Keep datasets off the network. Set on the modules, as both have read HF_HUB_OFFLINE from the environment when they were imported."""
    import datasets
    import huggingface_hub

    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _table_rows(table: Any, name: str) -> Iterator[PlacedRow]:
    number = 0
    try:
        for row in table:
            number += 1
            yield f"{name}, row {number}", row
    except UnicodeDecodeError:  # one by one from here on: only so is it known which it is
        for index in range(number, len(table)):
            yield f"{name}, row {index + 1}", _or_reason(table.__getitem__, index)


def _or_reason(read: Callable[[int], Any], index: int) -> Any:
    """A row, or why its text can't be read."""
    try:
        return read(index)
    except UnicodeDecodeError as error:
        return DataError(f"its text is not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start})")


def _jsonl(path: Path) -> Iterator[PlacedRow]:
    _refuse_other_encoding(path, bad_lines=2)  # a single one may be a torn row
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_MARK)
            if line.strip():
                yield f"{path}:{number}", _parsed(line)


def _parsed(line: str) -> Any:
    if not line.isascii() and (byte := SURROGATE.search(line)):
        return DataError(f"not UTF-8 (byte 0x{ord(byte[0]) - 0xDC00:02x} at column {byte.start() + 1})")
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return DataError(f"no valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})")
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a thousand brackets
        return DataError(f"no readable JSON ({error})")


def _json(path: Path) -> Iterator[PlacedRow]:
    _refuse_other_encoding(path, bad_lines=1)
    try:
        rows = json.loads(path.read_text(encoding="utf-8").removeprefix(_MARK))
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"no valid JSON ({error}); one object a line belongs into a .jsonl file") from error
    if not isinstance(rows, list):
        raise UnreadableFile(f"holds {type(rows).__name__}, not a list of objects")
    return ((f"{path}, row {i + 1}", row) for i, row in enumerate(rows))


def _refuse_other_encoding(path: Path, bad_lines: int) -> None:
    """Raises: UnreadableFile if so many lines have bytes that are not UTF-8, and none has others beyond ASCII."""
    with path.open("rb") as file:
        encoding = json.detect_encoding(file.read(4))
        if not encoding.startswith("utf-8"):
            name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
            raise UnreadableFile(f"is {name}, not UTF-8; convert it: iconv -f {name} -t UTF-8 {path.name} > NEW{path.suffix}")
        file.seek(0)
        bad: list[str] = []
        for number, line in enumerate(file, start=1):
            if line.isascii():
                continue
            try:
                line.decode()
            except UnicodeDecodeError as error:
                bad.append(f"line {number} (0x{line[error.start]:02x} at byte {error.start + 1})")
            else:
                if bad_lines > 1:
                    return  # UTF-8 with torn rows, which are skipped one by one
    if len(bad) >= bad_lines:
        raise UnreadableFile(
            f"not UTF-8: {counted(len(bad), 'line')} with other bytes, the first is {bad[0]}; likely Windows-1252 (Latin-1), or "
            f"another encoding from before Unicode. Convert it: iconv -f WINDOWS-1252 -t UTF-8 {path.name} > NEW{path.suffix}"
        )


def _parquet(path: Path) -> Iterator[PlacedRow]:
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in _batch_rows(batch):
                    number += 1
                    yield f"{path}, row {number}", row
    except ArrowException as error:
        raise UnreadableFile(f"no readable Parquet file ({error})") from error


def _batch_rows(batch: Any) -> list[Any]:
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:  # one by one: only so is it known which it is
        return [_or_reason(lambda index: batch.slice(index, 1).to_pylist()[0], i) for i in range(batch.num_rows)]


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Questions of a source, and the rows that were left out."""

    questions: tuple[Question, ...]
    skipped: tuple[SkippedRow, ...]


class RowSource:
    """Rows of a file or data set, or task folders. Held out are rows of their own, or the distinct texts with the smallest hashes."""

    def __init__(self, config: FileTask | HuggingFaceTask | FoldersTask, excess: Callable[[Question], str | None]) -> None:
        """
        Args:
            excess: why a question can't be asked (too long), or None; a row with a reason is skipped.
        Raises: DataError if there is nothing to read, or nothing left to train on.
        """
        self._config = config
        self._excess = excess
        rows = self._read(held_out=False)
        self.skipped = rows.skipped
        has_own_held_out = (config.held_out_split if isinstance(config, HuggingFaceTask) else config.held_out_path) is not None
        if has_own_held_out:
            held_out_rows = self._read(held_out=True)
            self.skipped += held_out_rows.skipped
            self.held_out = tuple({text_key(q.text): q for q in reversed(held_out_rows.questions)}.values())[::-1][: config.held_out_size]
        else:
            self.held_out = _smallest_hashes(rows.questions, config.held_out_size, config.held_out_fraction)
        kept_back = {text_key(question.text) for question in self.held_out}
        self._train = tuple(question for question in rows.questions if text_key(question.text) not in kept_back)
        if not self._train:
            raise DataError(f"{self.name}: every row is held out, none is left to train on; add rows, or lower rollout.task.held_out_size")
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def name(self) -> str:
        config = self._config
        return f"{config.path} [{config.split}]" if isinstance(config, HuggingFaceTask) else str(config.path)

    @property
    def questions_per_epoch(self) -> int:
        return len(self._train)

    def train_question(self, position: int) -> Question:
        epoch, index = divmod(position, len(self._train))
        return self._train[self._epoch_order(epoch)[index]]

    def demonstration_questions(self) -> Iterator[Question]:
        while True:
            yield from self._train

    @property
    def distinct_train_questions(self) -> int:
        return len({text_key(question.text) for question in self._train})

    def _epoch_order(self, epoch: int) -> list[int]:
        """Rows in the order of an epoch; the last one asked for is kept."""
        if self._order[0] != epoch:
            order = list(range(len(self._train)))
            if self._config.shuffle:
                random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def _read(self, *, held_out: bool) -> ReadRows:
        config = self._config
        if not isinstance(config, HuggingFaceTask):
            path = config.held_out_path if held_out else config.path
            assert path is not None
            return read_file(path, config, self._excess) if isinstance(config, FileTask) else read_folders(path, config, self._excess)
        split = config.held_out_split if held_out else config.split
        assert split is not None
        return read_dataset(config, split, self._excess)


def _smallest_hashes(questions: Sequence[Question], size: int, fraction: float) -> tuple[Question, ...]:
    """The distinct questions with the smallest hashes, at most `size` and at most that fraction of all (but one at least)."""
    distinct = {text_key(question.text): question for question in reversed(questions)}  # the first of equals stays
    by_hash = sorted(distinct, key=hash_share)
    return tuple(distinct[key] for key in by_hash[: min(size, max(1, int(fraction * len(by_hash))))])


# --- reading -------------------------------------------------------------------------------------------------------


def read_file(path: Path, task: FileTask, excess: Callable[[Question], str | None]) -> ReadRows:
    """Questions of a file.

    Args:
        excess: why a question can't be asked (too long), or None; a row with a reason is skipped.
    Raises: DataError if the file is missing, of an unknown kind, or without a usable row.
    """
    check_file(path, task)
    try:
        return _collect(file_rows(path), str(path), task, excess)
    except (UnreadableFile, OSError) as error:
        raise DataError(f"{_key(path, task)} = {path}: {error}") from error


def read_folders(path: Path, task: FoldersTask, excess: Callable[[Question], str | None]) -> ReadRows:
    """Questions of a folder of task folders. Args: excess: as read_file. Raises: DataError likewise."""
    try:
        if (path / "task.toml").exists():
            raise DataError(f"{_key(path, task)} = {path}: this is one task folder; name the folder that it lies in")
        return _collect(folder_rows(path, task.sandbox), str(path), task, excess)
    except OSError as error:
        raise DataError(f"{_key(path, task)} = {path}: {error.strerror} (the run was started in {Path.cwd()}); correct it") from error


def check_file(path: Path, task: FileTask) -> None:
    """Raises: DataError if a file of the task is not there."""
    if not path.is_file():
        reason = f"{_key(path, task)} = {path}: no such file (the run was started in {Path.cwd()})"
        raise DataError(reason, remedy="correct the path, or start the run in the folder to which it is relative")


def _key(path: Path, task: FileTask | FoldersTask) -> str:
    return "rollout.task.held_out_path" if path == task.held_out_path else "rollout.task.path"


def read_dataset(task: HuggingFaceTask, split: str, excess: Callable[[Question], str | None]) -> ReadRows:
    """Questions of one split of a Hugging Face data set.

    Raises: DataError if it can't be loaded or has no usable row.
    """
    return _collect(dataset_rows(task, split), f"{task.path} [{split}]", task, excess)


def _collect(
    rows: Iterator[PlacedRow], name: str, task: FileTask | HuggingFaceTask | FoldersTask, excess: Callable[[Question], str | None]
) -> ReadRows:
    questions: list[Question] = []
    skipped: list[SkippedRow] = []
    too_long = with_fields = 0
    seen: set[str] = set()
    for place, row in rows:
        try:
            question = _question(row, task)
            if task.distinct and (key := text_key(question.text)) in seen:
                continue
            seen |= {key} if task.distinct else set()
            with_fields += 1
            if reason := excess(question):
                too_long += 1
                raise DataError(reason)
        except DataError as error:
            skipped.append(SkippedRow(place, str(error)))
        else:
            questions.append(question)
    if not questions:
        first = f"; the first: {skipped[0]}" if skipped else ""
        fields = f'"{task.prompt_field}" (rollout.task.prompt_field)'
        if task.answer_field is not None:
            fields += f' and "{task.answer_field}" (rollout.task.answer_field)'
        remedy = f"A row needs the text fields {fields}"
        if isinstance(task, FoldersTask):
            remedy = "A task folder has instruction.md, task.toml, environment/Dockerfile and tests/test.sh (docs/agents.md)"
        if with_fields == len(skipped) > 0:
            remedy = "Take shorter questions, or a longer context" if too_long else "Take turns that the model's chat template knows"
        raise DataError(f"{name}: none of its {len(skipped)} rows can be used{first}. {remedy}")
    return ReadRows(tuple(questions), tuple(skipped))


def _question(row: Any, task: FileTask | HuggingFaceTask | FoldersTask) -> Question:
    """Raises: DataError with the reason to skip the row."""
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, dict):
        raise DataError(f"holds {type(row).__name__}, not an object with fields")
    for name, value in row.items():
        try:
            half = _surrogate_in([name, value])
        except RecursionError:
            raise DataError(f"field {name!a} is nested too deeply") from None
        if half:
            raise DataError(f"field {name!a} holds {half!a}, half of a surrogate pair, which is no character")
    text, turns = _asked(_field(row, task.prompt_field), task.prompt_field)
    if not text.strip():
        raise DataError(f'field "{task.prompt_field}" is empty')
    answer = "" if task.answer_field is None else _accepted(row, task.answer_field)
    shown = None if isinstance(task, FoldersTask) and "solution" not in row else task.demonstration_field
    demonstration = None if shown is None else _demonstration(row, shown)
    used = {task.prompt_field, task.answer_field, task.demonstration_field}
    return Question(text, answer, {name: value for name, value in row.items() if name not in used}, turns, demonstration)


def _demonstration(row: dict[str, Any], name: str) -> str | tuple[Mapping[str, Any], ...]:
    """Raises: DataError."""
    value = _field(row, name)
    if not isinstance(value, list):
        return _as_text(value, name)
    roles = [turn.get("role") if isinstance(turn, dict) and isinstance(turn.get("content"), str) else None for turn in value]
    if None in roles or roles[::2] != ["assistant"] * (len(roles) // 2 + 1) or "assistant" in roles[1::2]:
        raise DataError(f"field \"{name}\" is a list, but not of turns: an assistant's, then another's, and so on, up to an assistant's")
    return tuple(value)


_OF_EVERY_TURN = {"role", "content"}


def _asked(value: Any, name: str) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """The question's text, and, of a list of several turns, the turns; one turn alone, a user's of nothing but content, is its text.

    A turn keeps all of its parts, such as tool_calls or reasoning_content. Parts that are null are none: tables have them in all turns.
    Raises: DataError.
    """
    if isinstance(value, str):
        return value, ()
    kind = f'field "{name}" is {type(value).__name__}, neither text nor a list of turns with role and content'
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise DataError(kind)
    turns = tuple({part: of_part for part, of_part in turn.items() if of_part is not None or part == "content"} for turn in value)
    if not all(isinstance(turn.get("role"), str) and (isinstance(turn.get("content"), str) or "tool_calls" in turn) for turn in turns):
        raise DataError(f"{kind} as text")
    last = turns[-1]
    if last["role"] != "user" or not isinstance(last.get("content"), str):
        raise DataError(f'field "{name}" ends with a turn of {last["role"]}, not with a question of the user')
    if len(turns) == 1:
        return last["content"], () if last.keys() == _OF_EVERY_TURN else turns
    return "\n\n".join(map(_text_of_turn, turns)), turns


def _text_of_turn(turn: Mapping[str, Any]) -> str:
    more = {part: value for part, value in turn.items() if part not in _OF_EVERY_TURN}
    text = f"{turn['role']}: {turn.get('content') or ''}"
    return f"{text} {json.dumps(more, ensure_ascii=False, sort_keys=True, default=str)}" if more else text


def _field(row: dict[str, Any], name: str) -> Any:
    """Args: name: of a column, or with dots of a field within one."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        raise DataError(f'no field "{name}" (it has {", ".join(str(key) for key in row if row[key] is not None) or "none"})')
    return value


def with_field(row: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The row with this field where `_field` read it: within a column that is still there, or else in a column of that name."""
    *outer, last = name.split(".")
    holders = [row]
    for part in outer:
        inner = holders[-1].get(part)
        holders.append(inner if isinstance(inner, dict) else {})
    if name in row or last not in holders[-1]:
        return {**row, name: value}
    for part, holder in zip([last, *reversed(outer)], reversed(holders), strict=True):
        value = {**holder, part: value}
    return dict(value)


def _accepted(row: dict[str, Any], name: str) -> str | tuple[str, ...]:
    """The reference answer; of a list all of its answers, any of which is right. Raises: DataError."""
    value = _field(row, name)
    if not isinstance(value, list):
        return _as_text(value, name)
    if not value:
        raise DataError(f'field "{name}" is an empty list: no answer is right; leave the row out, or write an answer')
    return tuple(_as_text(one, name) for one in value)


def _as_text(value: Any, name: str) -> str:
    """A text or a number as a text: a whole number without a decimal point, whichever type a file gives it. Raises: DataError."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value):
        is_exact = not isinstance(value, float) or abs(value) < 2**53  # beyond it digits would be made up
        return str(int(value)) if is_exact and value == int(value) else str(value)
    said = f"{value!r:.60}" if isinstance(value, bool | float | Decimal) else type(value).__name__
    remedy = "write it as a text, a number or a list of these"
    if isinstance(value, dict):
        remedy = f'name the field within it, e.g. "{name}.{next(iter(value), "value")}"'
    raise DataError(f'field "{name}" is {said}, which no answer is compared with; {remedy}')


def _surrogate_in(value: Any) -> str | None:
    """The first half of a surrogate pair in a text, or in what a list or mapping holds."""
    match value:
        case str():
            found = None if value.isascii() else SURROGATE.search(value)
            return found[0] if found else None
        case dict():
            return _surrogate_in([*value, *value.values()])
        case list():
            return next((half for item in value if (half := _surrogate_in(item))), None)
        case _:
            return None
