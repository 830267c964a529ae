"""What of a Dockerfile a sandbox without a container can follow: copies, folders, variables, and commands that need no network.

The image that it begins from is left aside: programs are those of this machine. What can't be followed is refused by its line.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from evenkeel.correction.errors import DataError

CONTEXT = "/.environment"
"""Where the folder environment/ is seen while a sandbox is made."""
DEFAULTS = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
"""Variables of a sandbox, unless its Dockerfile says otherwise."""
_VARIABLE = re.compile(r"(?<!\\)\$(?:(?P<short>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?:(?P<sign>:[-+])(?P<word>[^{}]*))?\})")
# About what runs when nothing is asked of a container, and about who may ask.
_IGNORED = frozenset({"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "USER"})


@dataclass(frozen=True, slots=True)
class Build:
    """Makes the files of a sandbox."""

    script: str
    """For bash. Where a step fails it ends with a line that says which, and exit code 1."""
    workdir: str
    variables: dict[str, str]


def local_build(context: Path) -> Build:
    """The steps of CONTEXT/Dockerfile. Raises: DataError naming the line of one that can't be followed."""
    steps, workdir, variables, is_begun = ["set -u"], "/", dict[str, str](), False
    for line, name, written in _instructions((context / "Dockerfile").read_text(encoding="utf-8")):
        place = f"environment/Dockerfile:{line}: {name} {' '.join(written.split())}"[:120]
        value = _filled(written, DEFAULTS | variables)
        try:
            if name in _IGNORED:
                continue
            if name == "FROM":
                if is_begun:
                    raise DataError(f"{place}: a second stage")
                is_begun = True
                continue
            if name == "WORKDIR":
                workdir = posixpath.normpath(posixpath.join(workdir, value.strip("\"'")))
                command = f"mkdir -p {shlex.quote(workdir)}"
            elif name in ("ENV", "ARG"):
                variables |= _assigned(value, variables if name == "ARG" else {})
                continue
            elif name in ("COPY", "ADD"):
                command = _copy(context, value, workdir, place)
            elif name == "RUN":
                if written.startswith(("--", "<<")):
                    raise DataError(place)
                command = shlex.join(_listed(written) or ["bash", "-c", written])
            else:
                raise DataError(place)
        except DataError as error:
            raise DataError(f"{error}: only a container can follow it; set rollout.task.container (docker or podman)") from None
        except ValueError as error:  # shlex: quotes that don't end
            raise DataError(f"{place}: {error}; mend it") from error
        given = " ".join(f"{key}={shlex.quote(text)}" for key, text in variables.items())
        failed = f"{{ code=$?; echo; echo {shlex.quote(place)}: exit code $code; exit 1; }}"
        steps.append(f"(cd {shlex.quote(workdir if name != 'WORKDIR' else '/')} && {given} {command}) || {failed}")
    return Build("\n".join(steps), workdir, variables)


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, name, rest) of each instruction, with its continued lines in one."""
    begun, pieces = 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):  # within a continued instruction, too
            continue
        begun = begun if pieces else number
        pieces.append(line.rstrip().removesuffix("\\"))  # blanks before what goes on are the instruction's
        if not line.rstrip().endswith("\\"):
            yield begun, *_named(pieces)
            pieces = []
    if pieces:
        yield begun, *_named(pieces)


def _named(pieces: list[str]) -> tuple[str, str]:
    name, *rest = "".join(pieces).split(maxsplit=1) or [""]
    return name.upper(), "".join(rest).strip()


def _filled(text: str, known: Mapping[str, str]) -> str:
    """With values in place of `$NAME`, `${NAME}`, `${NAME:-else}` and `${NAME:+other}`; nothing in place of one that isn't known."""

    def value(match: re.Match[str]) -> str:
        name, sign, word = match["short"] or match["name"], match["sign"], match["word"]
        given = known.get(name, "")
        return (word if given else "") if sign == ":+" else (given or word or "")

    return _VARIABLE.sub(value, text)


def _assigned(value: str, known: Mapping[str, str]) -> dict[str, str]:
    """Args: known: keep their values. Raises: ValueError."""
    first, _, rest = value.partition(" ")
    pairs = shlex.split(value) if "=" in first else [f"{first}={rest.strip()}"]
    return {key: known.get(key, text) for key, _, text in (pair.partition("=") for pair in pairs)}


def _listed(value: str) -> list[str] | None:
    """Words that are given as a JSON list; None: they aren't."""
    try:
        words = json.loads(value)
    except ValueError:
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _copy(context: Path, value: str, workdir: str, place: str) -> str:
    """A command that copies. Raises: DataError, ValueError."""
    flags = re.match(r"(?:--\S+\s+)*", value)
    assert flags is not None
    *sources, target = _listed(value[flags.end() :]) or shlex.split(value[flags.end() :]) or [""]
    if any(not flag.startswith(("--chown=", "--link")) for flag in flags[0].split()) or any(
        "://" in one or one.startswith("<<") or re.search(r"\.tar(\.\w+)?$", one) for one in sources
    ):
        raise DataError(place)
    is_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
    where = posixpath.normpath(posixpath.join(workdir, target))
    commands = []
    for source in sources:
        inner = posixpath.normpath(source.strip("/") or ".")
        found = [context] if inner == "." else sorted(context.glob(inner))
        if inner.startswith("..") or not found:
            raise DataError(f"{place}: environment/ has no {source}")
        for one in found:
            there = shlex.quote(posixpath.join(CONTEXT, one.relative_to(context).as_posix()))
            into = is_folder or len(found) > 1 or one.is_dir()
            folder = shlex.quote(where if into else posixpath.dirname(where))
            copied = f"{there}/. {shlex.quote(where)}/" if one.is_dir() else f"{there} {shlex.quote(where)}{'/' if into else ''}"
            commands.append(f"mkdir -p {folder} && cp -rd --preserve=mode,timestamps,links {copied}")
    return shlex.join(["bash", "-c", " && ".join(commands)])
