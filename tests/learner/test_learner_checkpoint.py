"""A checkpoint continues exactly, and what isn't one is refused. Kills and several ranks: test_learner_ranks.py."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from evenkeel.correction.errors import DataError
from evenkeel.learner.hf.folder import open_tensors, read_json, write_shards
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.weights import checkpoint
from evenkeel.learner.weights.checkpoint import is_complete
from evenkeel.rollout.tasks.chat import load_tokenizer
from tests.learner.learner_cases import learner_on, random_batch, save_model
from tests.tiny_models import save_tiny_tokenizer

SETTINGS = {"learning_rate": 1e-3, "warmup_steps": 3, "decay": "cosine", "decay_steps": 12, "weight_decay": 0.1}


def train(learner: LearnerRank, first: int, last: int) -> list[float]:
    batches = [random_batch(step, groups=2) for step in range(first, last)]
    return [learner.supervised_step(batch.token_ids, batch.offsets, batch.loss_mask) for batch in batches]


def test_the_loss_scale_goes_on_where_it_stood(tmp_path: Path) -> None:
    """A checkpoint between the first overflow, which leaves the scale, and the second, which halves it: the scaler's count is in it."""
    folder = save_model(tmp_path / "m")
    with learner_on(folder, dtype="float16", initial_loss_scale=2.0**32) as learner:
        train(learner, 0, 1)
        assert learner.optimizer.loss_scale == 2.0**32
        learner.save(tmp_path / "c")
    with learner_on(folder, dtype="float16") as learner:
        learner.restore(tmp_path / "c")
        assert learner.optimizer.loss_scale == 2.0**32, "not that of a new run"
        train(learner, 1, 2)
        assert learner.optimizer.loss_scale == 2.0**31
    with learner_on(folder, dtype="bfloat16") as learner:
        learner.restore(tmp_path / "c")
        train(learner, 1, 2)
        learner.save(tmp_path / "other")
    with learner_on(folder, dtype="float16") as learner:
        learner.restore(tmp_path / "other")
        assert learner.optimizer.loss_scale == 2.0**16, "of a checkpoint in another type there is none"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_five_steps_and_five_after_a_restore_are_ten(tmp_path: Path, dtype: str) -> None:
    """Bit for bit: weights, losses, learning rate, random numbers; in half precision this needs the float32 master weights. In a
    new learner, and in one that has gone on to other steps meanwhile: nothing of those is left."""
    folder = save_model(tmp_path / "m")
    with learner_on(folder, dtype=dtype, **SETTINGS) as learner:
        losses = train(learner, 0, 10)
        checksums, rate, numbers = learner.weight_checksums(), learner.optimizer.learning_rate, torch.rand(4)
    with learner_on(folder, dtype=dtype, **SETTINGS) as learner:
        train(learner, 0, 5)
        learner.save(tmp_path / "c")
        losses_without_break = train(learner, 5, 10)
        train(learner, 20, 23)
        learner.restore(tmp_path / "c")
        assert train(learner, 5, 10) == losses[5:]
        assert learner.weight_checksums() == checksums and torch.equal(torch.rand(4), numbers)
    with learner_on(folder, dtype=dtype, seed=999, **SETTINGS) as learner:
        learner.restore(tmp_path / "c")
        losses_after = train(learner, 5, 10)
        assert learner.weight_checksums() == checksums
        assert learner.optimizer.learning_rate == rate
        assert learner.optimizer.steps == 10
        assert torch.equal(torch.rand(4), numbers)
    assert losses_without_break == losses[5:]
    assert losses_after == losses[5:]


def test_settings_of_the_recipe_win_over_those_of_the_checkpoint(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    with learner_on(folder, learning_rate=1e-3) as learner:
        train(learner, 0, 2)
        learner.save(tmp_path / "c")
    with learner_on(folder, learning_rate=5e-4) as learner:
        learner.restore(tmp_path / "c")
        train(learner, 2, 3)
        assert learner.optimizer.learning_rate == 5e-4
        assert learner.optimizer.steps == 3


def test_a_model_folder_is_needed_for_its_load_alone(tmp_path: Path) -> None:
    """A resumed run's is a checkpoint that its own pruning removes: what is saved afterwards is a whole folder all the same."""
    folder = save_model(save_tiny_tokenizer(tmp_path / "m"))
    config, tokenizer = (folder / "config.json").read_bytes(), (folder / "tokenizer.json").read_bytes()
    with learner_on(folder) as learner:
        shutil.rmtree(folder)
        train(learner, 0, 1)
        learner.begin_save(tmp_path / "c", tmp_path / "hf")
        assert learner.is_saved(wait=True)
        checksums = learner.weight_checksums()
    assert ((tmp_path / "hf" / "config.json").read_bytes(), (tmp_path / "hf" / "tokenizer.json").read_bytes()) == (config, tokenizer)
    assert (tmp_path / "hf" / "chat_template.jinja").exists()
    with learner_on(tmp_path / "hf") as learner:
        assert learner.weight_checksums() == checksums


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are held back until a step is done, and hold what was there before it."""
    folder, goes_on = save_model(tmp_path / "m"), threading.Event()
    write = checkpoint._write
    monkeypatch.setattr(checkpoint, "_write", lambda path, fill: (goes_on.wait(60), write(path, fill)))
    with learner_on(folder, **SETTINGS) as learner:
        train(learner, 0, 1)
        before = learner.weight_checksums()
        learner.begin_save(tmp_path / "c", tmp_path / "hf")
        losses = train(learner, 1, 3)
        assert not learner.is_saved() and not is_complete(tmp_path / "c") and learner.weight_checksums() != before
        goes_on.set()
        assert learner.is_saved(wait=True) and is_complete(tmp_path / "c")
    with learner_on(tmp_path / "hf", **SETTINGS) as learner:
        assert learner.weight_checksums() == before
        learner.restore(tmp_path / "c")
        assert learner.weight_checksums() == before and train(learner, 1, 3) == losses


def test_a_save_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every call about it until the next save, with the reason of the system: an answer may be lost."""

    def fail(path: Path, fill: object) -> None:
        raise OSError("No space left on device")

    with learner_on(save_model(tmp_path / "m")) as learner:
        monkeypatch.setattr(checkpoint, "_write", fail)
        learner.begin_save(tmp_path / "c")
        for _ in range(2):
            with pytest.raises(DataError, match=r"rank 0.*No space left"):
                learner.is_saved(wait=True)
        monkeypatch.undo()
        learner.begin_save(tmp_path / "c")
        assert learner.is_saved(wait=True) and is_complete(tmp_path / "c")


def test_a_save_that_failed_does_not_stand_in_the_way_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has asked how it ended: the run gave it up. Raised by one rank at the next save, it would leave the others waiting there."""

    def fail(path: Path, fill: object) -> None:
        raise OSError("No space left on device")

    with learner_on(save_model(tmp_path / "m")) as learner:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_write", fail)
            learner.begin_save(tmp_path / "c")
            while learner._saving is None or not learner._saving.done():
                time.sleep(0.01)
        learner.begin_save(tmp_path / "d")
        assert learner.is_saved(wait=True) and is_complete(tmp_path / "d")


def test_the_size_of_a_checkpoint_is_known_before(tmp_path: Path) -> None:
    """To 5 % and a few kilobytes of headers, generators and side files, and never too small by more."""
    with learner_on(save_model(tmp_path / "m"), **SETTINGS) as learner:
        train(learner, 0, 1)
        said = learner.checkpoint_bytes()
        learner.begin_save(tmp_path / "c", tmp_path / "hf")
        assert learner.is_saved(wait=True)
        tensors = [tmp_path / "c/rank-0.safetensors", tmp_path / "hf/model.safetensors"]
        assert sum(path.stat().st_size for path in tensors) == pytest.approx(said, rel=0.05)


def test_a_file_of_tensors_that_can_not_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """Of a checkpoint and of a Hugging Face folder: who waits for them knows OSError, and safetensors' own is none."""
    tensors = {"x": torch.ones(3)}
    for in_the_way in (".x.safetensors.partial", "shard-0.safetensors"):
        (tmp_path / in_the_way).mkdir()
    with pytest.raises(OSError, match=r"x\.safetensors\.partial: Error while serializing"):
        checkpoint._write(tmp_path / "x.safetensors", lambda path: save_file(tensors, path))
    with pytest.raises(OSError, match=r"shard-0\.safetensors: Error while serializing"):
        write_shards(tmp_path, [tensors])


def test_whoever_may_read_the_files_beside_them_may_read_the_weights(tmp_path: Path) -> None:
    """All files of a checkpoint and of a Hugging Face folder have the mode that the umask leaves of 0666."""
    before = os.umask(0o007)
    try:
        folder = save_model(tmp_path / "m")
        with learner_on(folder) as learner:
            learner.begin_save(tmp_path / "c", tmp_path / "hf")
            assert learner.is_saved(wait=True)
        write_shards(tmp_path / "c", [{"x": torch.ones(1)}, {"y": torch.ones(1)}])
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for name in ("c", "hf") for path in (tmp_path / name).iterdir()}
    assert sum(path.suffix == ".safetensors" for path in modes) == 5
    assert set(modes.values()) == {0o660}, modes


def test_files_that_this_user_may_not_read_are_not_called_damaged() -> None:
    """Copying them afresh would change nothing: the sentence says what would."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # pytest's own folders are closed to others
        Path(home).chmod(0o755)
        names = ("config.json", "model.safetensors", "tokenizer.json")
        for name in names:
            (Path(home) / name).touch(mode=0)
        with as_nobody():
            readers = (read_json, open_tensors, lambda path: load_tokenizer(path.parent))
            for name, read in zip(names, readers, strict=True):
                with pytest.raises(DataError) as error:
                    read(Path(home) / name)
                assert str(error.value) == f"{home}/{name}: this user may not read it. Allow it (chmod a+r; folders above it need a+x)"


@contextmanager
def as_nobody() -> Iterator[None]:
    """Read files as a user without rights, where the tests are root's, whom no mode keeps out."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    folder, other = save_model(tmp_path / "m"), save_model(tmp_path / "untied", tie=False)
    with learner_on(folder) as learner:
        learner.save(tmp_path / "c")
        with pytest.raises(DataError, match="exists already"):
            learner.save(tmp_path / "c")
        with pytest.raises(DataError, match=r"manifest\.json"):
            learner.restore(tmp_path / "m")
    with learner_on(other) as learner, pytest.raises(DataError, match=r"another model.*tie_word_embeddings is True there, False here"):
        learner.restore(tmp_path / "c")
    manifest = tmp_path / "c" / "manifest.json"
    for change, message in (({"ranks": 2}, "file of a rank is missing"), ({"format": 0}, "format 0")):
        original = manifest.read_text()
        manifest.write_text(json.dumps(json.loads(original) | change))
        with learner_on(folder) as learner, pytest.raises(DataError, match=message):
            learner.restore(tmp_path / "c")
        manifest.write_text(original)
