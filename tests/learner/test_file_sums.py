"""Every way in which a file can differ from what was written is found and named; the manifest is written last and knows itself."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from evenkeel.correction.errors import DataError
from evenkeel.learner.weights import file_sums
from evenkeel.learner.weights.file_sums import leave_sum, read_manifest_of_files, seal, sum_of, verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, of which one has left its sum."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state/rank-0.safetensors").write_bytes(bytes(range(256)) * 40_000)  # more than one chunk
    (tmp_path / "config.json").write_text("{}")
    leave_sum(tmp_path / "state/rank-0.safetensors")
    seal(tmp_path, {"format": 5, "step": 2})
    return tmp_path


def test_the_manifest_has_every_file(folder: Path) -> None:
    manifest = read_manifest_of_files(folder)
    assert manifest["format"] == 5 and manifest["step"] == 2
    content = (folder / "state/rank-0.safetensors").read_bytes()
    assert manifest["files"] == {
        "config.json": {"bytes": 2, "xxh3": xxhash.xxh3_64(b"{}").hexdigest()},
        "state/rank-0.safetensors": {"bytes": len(content), "xxh3": xxhash.xxh3_64(content).hexdigest()},
    }
    assert verify(folder, manifest) == []
    assert sorted(path.name for path in folder.rglob("*.*")) == ["config.json", "manifest.json", "rank-0.safetensors"]


def test_a_sum_that_was_left_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    leave_sum(tmp_path / "a")
    read: list[str] = []
    monkeypatch.setattr(file_sums, "sum_of", lambda path: read.append(path.name) or sum_of(path))
    seal(tmp_path, {})
    assert read == ["b"] and set(read_manifest_of_files(tmp_path)["files"]) == {"a", "b"}


def test_a_file_that_is_shorter_on_disk_than_it_was_written_is_found(tmp_path: Path) -> None:
    """As a network file system may lose what it has taken."""
    (tmp_path / "a").write_text("whole")
    leave_sum(tmp_path / "a")
    (tmp_path / "a").write_text("who")
    with pytest.raises(DataError, match=r"a: 3 bytes are on disk, but 5 were written"):
        seal(tmp_path, {})
    assert not (tmp_path / "manifest.json").exists()


def flip(path: Path) -> None:
    """One bit, in the middle: of a tensor's number, which nothing but a checksum can know."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged, 10239999 bytes long instead of 10240000"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "damaged, 10240001 bytes long instead of 10240000"),
        (flip, r"damaged, its checksum is [0-9a-f]{16} instead of [0-9a-f]{16}"),
        (Path.unlink, "is not there, but the manifest has it with 10240000 bytes"),
    ],
    ids=["cut", "longer", "one bit", "gone"],
)
def test_a_damaged_file_is_named(folder: Path, damage: Callable[[Path], object], said: str) -> None:
    path = folder / "state/rank-0.safetensors"
    damage(path)
    with pytest.raises(DataError, match=rf"^{path}: {said}"):
        verify(folder, read_manifest_of_files(folder))


@pytest.mark.parametrize("name", ["state/rank-0.safetensors", "manifest.json"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.ENOTCONN, errno.EMFILE])
def test_a_disk_that_is_away_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str) -> None:
    """What may pass names the file, and is not taken for what the disk has lost."""
    opened, manifest = Path.open, read_manifest_of_files(folder)

    def fails(path: Path, *arguments: Any, **named: Any) -> Any:
        if path == folder / name:
            raise OSError(number, os.strerror(number))
        return opened(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises((DataError, OSError)) as caught:
        verify(folder, read_manifest_of_files(folder) if name == "manifest.json" else manifest)
    is_damage = number in (errno.EIO, errno.EUCLEAN)
    assert isinstance(caught.value, DataError) is is_damage and f"{folder / name}" in str(caught.value)
    assert is_damage or getattr(caught.value, "errno", 0) == number


def test_files_that_were_not_written_with_it(folder: Path) -> None:
    """A note is told; tensors could be read in place of the saved ones."""
    (folder / "state/note.txt").write_text("x")
    assert verify(folder, read_manifest_of_files(folder)) == ["state/note.txt"]
    (folder / "model-2.safetensors").write_text("x")
    with pytest.raises(DataError, match=r"model-2.safetensors: not in the manifest, but its tensors could be read"):
        verify(folder, read_manifest_of_files(folder))


@pytest.mark.parametrize("change", [{"format": 4}, {"files": {}}, {"xxh3": "0"}, {"more": 1}])
def test_a_manifest_that_was_changed_is_damaged(folder: Path, change: dict[str, object]) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=r"manifest.json: damaged, its content is not what its own checksum says"):
        read_manifest_of_files(folder)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b"{", b"\xff", pytest.param(b"[" * 100_000, id="nested")])
def test_no_manifest_is_one_sentence(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest.json: damaged"):
        read_manifest_of_files(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"not complete, it has no manifest.json, which is written last"):
        read_manifest_of_files(folder)


def test_whoever_waits_is_told_what_is_read_and_is_not_kept_by_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every file, as it comes; by threads for which no process waits when it ends: a disk may hang for good."""
    read, by = list[int](), set[threading.Thread]()

    def note(size: int) -> None:
        read.append(size)
        by.add(threading.current_thread())

    assert verify(folder, read_manifest_of_files(folder), note) == []
    assert sum(read) == 256 * 40_000 + 2 and max(read) == 4 << 20
    assert threading.current_thread() not in by and all(thread.daemon for thread in by)


def test_after_a_damage_no_further_file_is_begun(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number:03}.json").write_text("{}")
    seal(tmp_path, {})
    (tmp_path / "000.json").write_text("[]")
    read = list[int]()

    def note(size: int) -> None:
        read.append(size)
        if len(read) > 20:
            time.sleep(0.5)  # the thread that has the damaged file gets its turn meanwhile

    with pytest.raises(DataError, match=r"000\.json: damaged, its checksum is"):
        verify(tmp_path, read_manifest_of_files(tmp_path), note)
    assert len(read) < 40
