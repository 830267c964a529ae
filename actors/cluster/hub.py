"""Models and data sets of the Hugging Face hub: at which commit a run takes them, and their folder on this machine.

huggingface_hub does the work: a cache that all processes of a machine share (HF_HOME), a lock for each file, so that one process downloads
it and the others wait, whole files that stay when a download breaks off, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN. It is imported when a
recipe names something of the hub, not before.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evenkeel.actors.config import HubName, RunConfig
from evenkeel.correction.errors import DataError, one_line
from evenkeel.rollout.config import HuggingFaceTask, TaskEntry

# Files of a model: weights, configs, tokenizer, chat template, terms.
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "README.md", "LICENSE*")
# The same weights in other forms: folders of other runtimes, and Mistral's own.
_OTHER_FILES = ("*/*", "consolidated*")
_WANTED: dict[str, Any] = {"allow_patterns": list(_FILES), "ignore_patterns": list(_OTHER_FILES)}
# All but the weights.
_OUTLINE = _WANTED | {"allow_patterns": list(_FILES[1:])}
# Seconds in which the hub has to answer a request.
_HUB_S = 10.0


class HubAway(DataError):
    """The hub doesn't answer, or not with what was asked for, and the cache isn't enough. As far as is known the name is right."""


def pinned(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration with the hub's names pinned to commits, so that a resumed run takes the same files; and sentences about it.

    Raises: DataError if the hub has no such model, or can't be reached and the cache has none. Errors in a data set are raised where it is
    read.
    """
    said = []
    if (name := HubName.of(config.model)) is not None and not name.is_pinned:
        with _in_words(name):
            config = config.model_copy(update={"model": _at_its_commit(name).path})
        said.append(f"{name} is {config.model}")

    def at_its_commit(entry: TaskEntry) -> TaskEntry:
        task = entry.task
        if not isinstance(task, HuggingFaceTask) or Path(task.path).exists():
            return entry
        try:
            commit = _commit("dataset", task.path, task.revision)
        except Exception as error:
            said.append(f"data set {task.path}: its commit isn't known ({type(error).__name__}), so a resume may find other rows")
            return entry
        said.append(f"data set {task.path} at commit {commit}")
        return entry.model_copy(update={"task": task.model_copy(update={"revision": commit})})

    return config.model_copy(update={"rollout": config.rollout.with_entries(at_its_commit)}), said


def _commit(kind: str, repository: str, revision: str | None) -> str:
    """The commit of a branch or tag: the hub's present answer, or, if it can't be reached, its last one."""
    from huggingface_hub import HfApi

    return str(HfApi().resolve_revision(repository, repo_type=kind, revision=revision).resolved)


def model_folder(model: Path, *, before: Callable[[int, int, Path], None] = lambda *_: None) -> Path:
    """The folder of a model: a path as it is; for a name of the hub its folder on this machine, downloaded first if it isn't complete.

    Args: before: called for a name of the hub before anything is downloaded, with the bytes of its files, those still to be downloaded, and
        the cache.
    Raises: DataError naming the cause: no such model or revision, no access, no space, or the hub can't be reached.
    """
    name = HubName.of(model)
    if name is None:
        return model
    with _in_words(name):
        name = _at_its_commit(name)
        if (whole := _whole_copy(name)) is not None:
            before(sum(file.stat().st_size for file in whole.rglob("*") if file.is_file()), 0, whole)
            return whole
        return _downloaded(name, before)


def outline_folder(model: Path) -> tuple[Path, bool]:
    """A folder with the model's config and tokenizer, and whether its weights are in it: they are if it is no name of the hub, or if they
    have been downloaded to this machine before. The machine that starts a run needs no weights; the nodes of the ranks do.

    Raises: as `model_folder`.
    """
    name = HubName.of(model)
    if name is None:
        return model, True
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _in_words(name):
        name = _at_its_commit(name)
        with contextlib.suppress(LocalEntryNotFoundError):
            if (whole := _whole_copy(name)) is not None:
                return whole, True
        return Path(snapshot_download(name.repository, revision=name.revision, **_OUTLINE)), False


def config_folder(model: Path) -> Path:
    """A folder with the model's config.json; other files may be missing. Raises: as `model_folder`."""
    name = HubName.of(model)
    if name is None:
        return model
    from huggingface_hub import hf_hub_download

    with _in_words(name):
        return Path(hf_hub_download(name.repository, "config.json", revision=_at_its_commit(name).revision)).parent


def obstacle_here(model: Path) -> str:
    """Why this machine couldn't read the whole model; empty: the folder is there, or the name is in the cache, or can be downloaded."""
    name = HubName.of(model)
    if name is None:
        return "" if (model / "config.json").is_file() else "the folder isn't there"
    from huggingface_hub import HfApi

    try:
        name = _at_its_commit(name)
        if _whole_copy(name) is not None:
            return ""
        HfApi().model_info(name.repository, revision=name.revision, timeout=_HUB_S)
        return _lack_of_room(name)
    except Exception as error:
        if (words := _words_for(error, name)) is None:
            raise
        return words[1]


def _at_its_commit(name: HubName) -> HubName:
    return name.at(_commit("model", name.repository, name.revision))


def _whole_copy(name: HubName) -> Path | None:
    """The model's folder in the cache, if it is known to be complete; offline also if that isn't known, because there is no other.

    Raises: LocalEntryNotFoundError when offline without one.
    """
    from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    is_offline = constants.HF_HUB_OFFLINE
    try:
        if not is_offline:
            get_cached_repo_tree(name.repository, revision=name.revision)  # says which files a whole copy has
        return Path(snapshot_download(name.repository, revision=name.revision, local_files_only=True, **_WANTED))
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        if is_offline:
            raise
        return None


def _lack_of_room(name: HubName, before: Callable[[int, int, Path], None] = lambda *_: None) -> str:
    """Says that the disk has too little room for the files still to be downloaded; empty: it has enough."""
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    files = snapshot_download(name.repository, revision=name.revision, dry_run=True, **_WANTED)
    needed, free = sum(file.file_size for file in files if file.will_download), shutil.disk_usage(cache).free
    before(sum(file.file_size for file in files), needed, cache)
    return f"{_gb(needed)} have still to be downloaded, but {cache} has {_gb(free)} free" if needed > free else ""


def _downloaded(name: HubName, before: Callable[[int, int, Path], None]) -> Path:
    from huggingface_hub import snapshot_download

    if lack := _lack_of_room(name, before):
        raise DataError(f"model = {name}: {lack}", remedy="Make room, or set HF_HOME to a folder on another disk")
    return Path(snapshot_download(name.repository, revision=name.revision, **_WANTED))


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


@contextlib.contextmanager
def _in_words(name: HubName) -> Iterator[None]:
    """Raises: DataError in place of what huggingface_hub raises; HubAway where the hub didn't answer."""
    try:
        yield
    except Exception as error:
        if (words := _words_for(error, name)) is None:
            raise
        kind, reason, remedy = words
        raise kind(f"model = {name}: {reason}", remedy=remedy) from error


def _words_for(error: Exception, name: HubName) -> tuple[type[DataError], str, str] | None:
    """Our error for what huggingface_hub raised, why a model isn't given, and the remedy; None: it is something else, and to be raised."""
    import httpx
    from huggingface_hub import constants, errors

    at, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    token = "log in with a token that may read it (hf auth login, or HF_TOKEN)"
    match error:
        case errors.GatedRepoError():
            return DataError, "its owner asks for an agreement", f"Accept it at {at}/{name.repository} and {token}"
        case errors.RepositoryNotFoundError():
            return DataError, f"{at} has no such model, or it is private", f"Correct the name, or {token}"
        case errors.RevisionNotFoundError():
            return DataError, f"it has no revision {name.revision}", f"Take a branch, a tag or a commit of {at}/{name.repository}"
        case errors.OfflineModeIsEnabled() | errors.LocalEntryNotFoundError() | errors.RevisionResolutionError():
            if constants.HF_HUB_OFFLINE:
                reason = f"not complete in the cache, {cache}, and offline mode is on (HF_HUB_OFFLINE)"
                return DataError, reason, f"Run `hf download {name.repository}` where there is a network"
            remedy = "Try again (files that are complete are kept), or set model to a folder that has it"
            return HubAway, f"not complete in the cache, {cache}, and {at} can't be reached", remedy
        case httpx.HTTPError():  # errors.HfHubHTTPError too
            return (
                HubAway,
                f"not complete in the cache, {cache}, and {at} doesn't provide it ({one_line(error)})",
                "Try again: files that are complete are kept; if you know that the cache is complete, set HF_HUB_OFFLINE=1",
            )
        case errors.HFValidationError():
            return DataError, f"not a name that the hub allows ({error})", ""
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return DataError, f"no space left for it in {cache}", "Make room, or set HF_HOME"
    return None
