"""A task folder as Harbor has it (harborframework.com/docs/tasks, schema 1.4): what it asks, and why one can't be used here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError, field_validator

from evenkeel.correction.errors import DataError
from evenkeel.rollout.task_folders.dockerfile import Build, local_build

# Lines at the start of an instruction that mark a benchmark's data; Harbor shows them to no agent.
_CANARY = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*\n)+\s*", re.IGNORECASE)
# What no sandbox of ours has: key of task.toml, and the values that ask for none of it.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "steps": (None, []),
    "environment.os": (None, "linux"),
    "environment.gpus": (None, 0),
    "environment.tpu": (None,),
    "environment.mcp_servers": (None, []),
    "environment.healthcheck": (None,),
    "verifier.environment": (None,),
    "verifier.environment_mode": (None, "shared"),
    "verifier.collect": (None, []),
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Environment(_Section):
    docker_image: str | None = None
    build_timeout_sec: PositiveFloat = 600.0
    memory_mb: PositiveInt | None = None
    storage_mb: PositiveInt | None = None
    memory: PositiveInt | None = None
    storage: PositiveInt | None = None
    env: dict[str, str] = {}
    workdir: str | None = None

    @field_validator("memory", "storage", mode="before")
    @classmethod
    def _in_mib(cls, size: Any) -> Any:
        """Of folders of schema 1.0: "2G", "512M"."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([GMK])B?", size.strip().upper()) if isinstance(size, str) else None
        return size if match is None else max(1, int(float(match[1]) * {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[match[2]]))


class _Verifier(_Section):
    timeout_sec: PositiveFloat = 600.0
    env: dict[str, str] = {}


class _Toml(_Section):
    environment: _Environment = _Environment()
    verifier: _Verifier = _Verifier()


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """What a folder asks, and how it is played and tested."""

    path: Path
    instruction: str
    solution: str | None
    """solution/solve.sh; None: it has none."""
    memory_mib: int | None
    storage_mib: int | None
    workdir: str | None
    """Where commands begin; None: where the Dockerfile says."""
    variables: dict[str, str]
    """Environment variables of commands and tests, as they are written: `${NAME}` is one of this process's."""
    tests_s: float
    tests_variables: dict[str, str]
    image: str | None
    build_s: float
    build: Build | None
    """The Dockerfile's steps for a local sandbox; None: it is for a container."""

    @classmethod
    def read(cls, path: Path, *, is_local: bool) -> TaskFolder:
        """Args: is_local: for a local sandbox; else for a container. Raises: DataError with why it can't be used, without its path."""
        text = _text(path, "task.toml", "what a task folder has its limits in")
        try:
            raw = tomllib.loads(text)
            toml = _Toml.model_validate(raw)
        except tomllib.TOMLDecodeError as error:
            raise DataError(f"task.toml is no valid TOML ({error}); mend it") from error
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise DataError(f"task.toml: {key} = {first['input']!r:.60}: {first['msg'].lower()}; mend it") from error
        for key, neutral in _NEUTRAL.items():
            section, _, name = key.rpartition(".")
            if (value := raw.get(section, raw if not section else {}).get(name)) not in neutral:
                raise DataError(f"task.toml: {key} = {value!r:.60} asks for what no sandbox here has; leave the folder out")
        if not (instruction := _CANARY.sub("", _text(path, "instruction.md", "what the model is asked")).strip()):
            raise DataError("instruction.md is empty: nothing would be asked; write it")
        _text(path, "tests/test.sh", "what scores a rollout")
        asked, tested = toml.environment, toml.verifier
        has_solution = (path / "solution" / "solve.sh").is_file()
        for compose in ("docker-compose.yaml", "docker-compose.yml"):
            if (path / "environment" / compose).exists():
                raise DataError(f"environment/{compose} asks for several containers, which no sandbox here has; leave the folder out")
        if asked.docker_image is not None and is_local:
            raise DataError(f"task.toml: environment.docker_image = {asked.docker_image!r} is for a container; {_IN_A_CONTAINER}")
        if asked.docker_image is None:
            _text(path, "environment/Dockerfile", "what its sandbox is made by")
        return cls(
            path,
            instruction,
            _text(path, "solution/solve.sh", "") if has_solution else None,
            asked.memory_mb or asked.memory,
            asked.storage_mb or asked.storage,
            asked.workdir,
            asked.env,
            tested.timeout_sec,
            tested.env,
            asked.docker_image,
            asked.build_timeout_sec,
            local_build(path / "environment") if is_local else None,
        )


_IN_A_CONTAINER = "set rollout.task.container (docker or podman), or leave the folder out"


def _text(path: Path, name: str, what: str) -> str:
    """Args: what: it is, for the message. Raises: DataError."""
    try:
        return (path / name).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"it has no {name}, {what}; add it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{name} can't be read as text ({error}); mend it") from error


def folder_rows(path: Path, sandbox: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(folder, row) of each task folder in a folder, by name; for one that can't be used a DataError with the reason instead of the row.

    Args: sandbox: settings of the task's sandboxes, which each row takes along.
    Raises: OSError if the folder can't be listed.
    """
    for one in sorted(path.iterdir()):
        if one.name.startswith(".") or not one.is_dir():
            continue
        try:
            task = TaskFolder.read(one.absolute(), is_local=sandbox["container"] is None)
        except DataError as error:
            yield str(one), error
            continue
        row: dict[str, Any] = {"instruction": task.instruction, "folder": str(task.path), "sandbox": dict(sandbox)}
        if task.solution is not None:
            row["solution"] = _worked(task.solution)
        yield str(one), row


def _worked(script: str) -> list[dict[str, str]]:
    """A solution as the turns of a rollout in which it prints nothing."""
    body = re.sub(r"\A#!.*\n", "", script).strip()
    return [
        {"role": "assistant", "content": f"```sh\n{body}\n```"},
        {"role": "user", "content": "[exit code 0]"},
        {"role": "assistant", "content": "Done."},
    ]
