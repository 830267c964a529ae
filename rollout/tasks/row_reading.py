"""Rows as files and Hugging Face data sets hold them, before anything is asked of them; what isn't UTF-8 is refused or named."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from correction.errors import DataError, counted
from rollout.config import HuggingFaceTask

PlacedRow = tuple[str, Any]
"""(file and line or row, row); a row that can't even be read is a DataError with the reason."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character: from a JSON escape that lacks its other half, or, as U+DC80 to U+DCFF, a byte that is not UTF-8 (PEP 383)."""
_MARK = "\ufeff"
"""The byte-order mark: at the start of a file, and in its middle where files were joined. It says nothing in UTF-8."""
_HUB_S = 10.0
"""Seconds within which the hub has to answer."""


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
