"""Where a task folder is played: a copy of its files, commands in it one after the other, and its tests at the end.

Without a container it is bubblewrap's: user, mount, process, network, IPC and host name namespaces of its own for every command, without
capabilities. A command sees this machine's programs (/usr and what belongs to it), read-only, and its own files; what it leaves running
ends with it, and nothing but files goes on to the next one. Tests and their reward are out of reach until the last command has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import resource
import select
import shlex
import shutil
import stat
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from evenkeel.correction.errors import DataError
from evenkeel.rollout.limited_processes.child import REMOVE
from evenkeel.rollout.limited_processes.guardian import LARGEST_FILE_BYTES, MOST_PROCESSES, beyond_memory, descendant_pids
from evenkeel.rollout.limited_processes.small_file import read_small_file
from evenkeel.rollout.rewards.reward_process import components
from evenkeel.rollout.task_folders.dockerfile import CONTEXT, DEFAULTS
from evenkeel.rollout.task_folders.folder import TaskFolder

# Whom root has its sandboxes run as.
_NOBODY = 65534
# Where nobody reaches a rollout's files, which lie in folders of root's: in a mount namespace of the command's own.
_PLACE = "/mnt"
_ENTER = f'mount --bind "$0" {_PLACE} && exec "$@"'
# Of a folder that names none, MiB; those of a container's tmpfs and of any command's /dev/shm.
_MEMORY_MIB, _STORAGE_MIB, _SHARED_MIB = 1024, 1024, 64
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS_SEEN = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/os-release")
_USERS = {"passwd": "root:x:0:0:root:/root:/bin/bash\n", "group": "root:x:0:\n", "hosts": "127.0.0.1 localhost\n"}
# Seconds between two looks at what a command takes. Looks at its files may take a part of the time: one in so many.
_LOOK_S, _REST = 0.05, 20
# Exit code of `timeout --signal=KILL` when it has; seconds by which a container's program may be later.
_KILLED, _LATER_S = 137, 10.0
# What a container says when it is there.
_BEGUN = "evenkeel: begun"
_PIECE, _BLOCK_BYTES = 1 << 16, 4096
# Bytes of a command that the kernel takes (MAX_ARG_STRLEN), less the one that ends it.
_LONGEST_COMMAND = (1 << 17) - 1
# Seconds within which the processes of a command are gone that was ended.
_GONE_S = 30.0
# Run in the sandbox, of a command and the work folder. A command may have taken that away, and the next one, or the tests, begin in it all
# the same. The number of processes is a wall for what forks faster than anybody looks.
_BEGIN = (
    'cd /; { cd -- "$1" || { /bin/chmod u+rwx -- "$1"; cd -- "$1"; } || '
    '{ /bin/rm -f -- "$1"; /bin/mkdir -p -- "$1" && cd -- "$1"; }; } 2>/dev/null; '
    f'ulimit -u {2 * MOST_PROCESSES}; exec /bin/bash -c "$0"'
)


class SandboxError(Exception):
    """A sandbox, or the tests in it, can't do what a task folder says; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a command."""

    code: int | None
    """Exit code; None: it was ended."""
    output: str
    """All that it wrote, the middle of much left out."""
    ended: str = ""
    """Why it was ended."""

    @property
    def text(self) -> str:
        """For the model."""
        last = f"[exit code {self.code}]" if self.code is not None else f"[ended: {self.ended}]"
        return f"{self.output.rstrip()}\n{last}".lstrip()


async def opened(metadata: Mapping[str, Any], *, within_s: float = math.inf) -> Sandbox:
    """A sandbox of its own for a rollout; close it.

    Args:
        metadata: of a question of rollout.task.kind = folders.
        within_s: of `reward`, whose caller waits no longer; seconds.
    Raises: SandboxError if it can't be made, naming the folder and what to do.
    """
    path, settings = Path(metadata["folder"]), metadata["sandbox"]
    is_local = settings["container"] is None
    try:
        folder = TaskFolder.read(path, is_local=is_local)
    except DataError as error:
        raise SandboxError(f"{path}: {error}") from error
    folder = replace(folder, tests_s=min(folder.tests_s, within_s / 2))  # they may run twice, see `reward`
    sandbox = await (_Local if is_local else _Container).opened(folder, settings)
    sandbox.within_s = within_s
    return sandbox


class Sandbox(ABC):
    """One rollout's. Use it from one event loop, a call at a time."""

    within_s = math.inf
    """Of `reward`, whose caller waits no longer; seconds."""

    def __init__(self, folder: TaskFolder, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder, settings
        self._is_root = False
        self._is_untouched = True  # by commands
        self._scratch = Path(tempfile.mkdtemp(prefix="sandbox-"))
        self._variables = dict[str, str]()
        most, _ = resource.getrlimit(resource.RLIMIT_DATA)  # of this process, whose limit must not be what ends a command
        asked = folder.memory_mib or _MEMORY_MIB
        self._memory_mib = asked if most == resource.RLIM_INFINITY else min(asked, most >> 21)
        self._storage_mib: float = folder.storage_mib or _STORAGE_MIB

    @classmethod
    async def opened(cls, folder: TaskFolder, settings: Mapping[str, Any]) -> Self:
        """Raises: SandboxError."""
        sandbox = cls(folder, settings)
        try:
            await sandbox.make()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def run(self, command: str) -> Ran:
        """What a command for bash does; one that no bash could be given is ended at once. Raises: SandboxError if the sandbox is lost."""
        self._is_untouched = False
        if "\0" in command:
            return Ran(None, "", "it has a NUL character")
        if len(command.encode(errors="replace")) > _LONGEST_COMMAND:
            return Ran(None, "", f"it has more than {_LONGEST_COMMAND} bytes")
        return await self._run(command, self._variables, self._settings["command_s"])

    async def reward(self) -> Any:
        """What the folder's tests write as the reward: a number; of several without the name `reward` all, by name. Tests that hang, or
        write none that can be used, after commands alone were ended or broken by these: that is worth 0, or to spoil its tests would cost a
        rollout nothing.

        Raises: SandboxError if they write none in a sandbox either that no command has touched: it is the folder that is wrong. That has
            what is left of `within_s`, less a tenth for the end of it.
        """
        until = asyncio.get_running_loop().time() + 0.9 * self.within_s
        try:
            return await self._tested()
        except SandboxError:
            if self._is_untouched:
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    untouched = await self.opened(self._folder, self._settings)
                    try:
                        await untouched._tested()
                    finally:
                        await untouched.close()
            return 0.0

    async def _tested(self) -> Any:
        """Raises: SandboxError."""
        name = f"{self._folder.path}/tests/test.sh"
        tests, verifier = self._scratch / "tests", self._scratch / "verifier"
        await _remove(tests, verifier)  # of another time
        await self._copy(self._folder.path / "tests", tests)
        (tests / "test.sh").chmod(0o755)
        verifier.mkdir()
        await self._hand_over("tests", "verifier")
        ran = await self._test(self._variables | self._resolved(self._folder.tests_variables, "verifier.env"), self._folder.tests_s)
        if ran.code is None:
            raise SandboxError(f"{name}: {ran.ended}")
        for file, parse in (("reward.json", json.loads), ("reward.txt", float)):
            try:
                found: Any = parse(read_small_file(verifier / file))
                found = found.get("reward", found) if isinstance(found, dict) else found
                components(found)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, TypeError, RecursionError) as error:
                raise SandboxError(f"{name}: its /logs/verifier/{file} can't be used: {error}") from error
            return found
        said = ran.output.strip().rpartition("\n")[2][:200]
        raise SandboxError(f"{name} ended with exit code {ran.code} and no /logs/verifier/reward.txt or reward.json ({said})")

    async def close(self) -> None:
        """End it, and remove its files."""
        await _remove(self._scratch)

    @abstractmethod
    async def make(self) -> None:
        """Raises: SandboxError."""

    @abstractmethod
    async def _run(self, command: str, variables: Mapping[str, str], limit_s: float) -> Ran:
        """Have bash run a command there."""

    @abstractmethod
    async def _test(self, variables: Mapping[str, str], limit_s: float) -> Ran:
        """Run the tests, a copy of which is in `scratch`, and have what they write to /logs/verifier there."""

    async def _hand_over(self, *names: str) -> None:
        """Give files of `scratch` to whom its commands run as."""
        if self._is_root:
            given = [str(self._scratch / name) for name in names]
            await (await asyncio.create_subprocess_exec("chown", "-R", f"{_NOBODY}:{_NOBODY}", "--", *given)).wait()

    async def _look(self, process: asyncio.subprocess.Process) -> str:
        """Why a command has to be ended; empty: it may go on."""
        return ""

    async def _copy(self, source: Path, target: Path) -> None:
        copying = await asyncio.create_subprocess_exec("cp", "-rd", "--preserve=mode,links", "--", str(source), str(target))
        if await copying.wait():
            raise SandboxError(f"{source}: it can't be copied to {target}")

    def _resolved(self, variables: Mapping[str, str], key: str) -> dict[str, str]:
        """Variables as task.toml has them, with those of this process in place of `${NAME}` and `${NAME:-else}`. Raises: SandboxError."""

        def of_this_process(match: re.Match[str]) -> str:
            found = os.environ.get(match[1], match[2])
            if found is None:
                raise SandboxError(
                    f"{self._folder.path}/task.toml: {key} names ${{{match[1]}}}, which isn't set here; name it in "
                    "rollout.environment.variables, or set it"
                )
            return found

        return {name: re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", of_this_process, text) for name, text in variables.items()}

    async def _ran(
        self, command: Sequence[str], limit_s: float, given: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
    ) -> Ran:
        """Run a program without input, until it ends or a limit is passed. Args: given: environment variables; None: this process's own."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=given,
            pass_fds=descriptors,
        )
        assert process.stdout is not None
        reading = asyncio.create_task(_shortened(process.stdout, self._settings["longest_output"]))
        ended = ""
        try:
            async with asyncio.timeout(limit_s):
                while not ended:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), _LOOK_S)
                        break
                    ended = await self._look(process)
        except TimeoutError:
            ended = f"it took more than {limit_s:g} s"
        finally:
            if process.returncode is None:
                process.kill()
        await process.wait()
        return Ran(None if ended else process.returncode, await reading, ended)


async def _remove(*folders: Path) -> None:
    await (await asyncio.create_subprocess_exec(*REMOVE, *map(str, folders), env={"PATH": os.defpath})).wait()


async def _shortened(output: asyncio.StreamReader, most: int) -> str:
    """What comes, as a text; of more than so many bytes the middle is left out."""
    head, tail, size = bytearray(), deque[bytes](), 0
    while piece := await output.read(_PIECE):
        size += len(piece)
        room = max(0, most // 2 - len(head))
        head += piece[:room]
        tail.append(piece[room:])
        while len(tail) > 1 and sum(map(len, tail)) - len(tail[0]) >= most:
            tail.popleft()
    last = b"".join(tail)[-(most - most // 2) :]
    left_out = size - len(head) - len(last)
    middle = f"\n[... {left_out} bytes are left out ...]\n".encode() if left_out else b""
    return (bytes(head) + middle + last).decode(errors="replace")


# --- without a container ----------------------------------------------------------------------------------------------


class _Local(Sandbox):
    """bubblewrap's: each command in namespaces of its own, over the same files."""

    def __init__(self, folder: TaskFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, settings)
        self._files = self._scratch / "files"
        self._workdir = "/"
        self._is_root = _is_root()
        self._reached = _PLACE if self._is_root else str(self._scratch)
        self._variables = dict(DEFAULTS)
        self._is_full = False
        # What its files took at the last look, and when the next one may be.
        self._taken_mib, self._next_look = 0.0, 0.0
        # What a command may find there that is too much, to remove it.
        self._before_mib = 0.0

    async def make(self) -> None:
        build, programs = self._folder.build, [Path(one) for one in self._settings["programs"]]
        assert build is not None
        if shutil.which("bwrap") is None:
            raise SandboxError("no program bwrap in PATH; install the package bubblewrap, 0.8 or newer, or set rollout.task.container")
        if missing := [one for one in programs if not one.is_dir()]:
            raise SandboxError(f"rollout.task.programs = {missing[0]}: no such folder here; correct it")
        for name in ("etc", "tmp", "root", "logs", "tests"):
            (self._files / name).mkdir(parents=True)
        for name, text in _USERS.items():
            (self._files / "etc" / name).write_text(text)
        await self._copy(self._folder.path / "environment", self._scratch / "environment")
        await self._hand_over(".")
        shown = ("--ro-bind", f"{self._reached}/environment", CONTEXT)
        ran = await self._run(build.script, self._variables, self._folder.build_s, shown)
        if ran.code:
            *before, said = [line for line in ran.output.splitlines() if line.strip()] or ["nothing was said"]
            if said.startswith(("bwrap: ", "setpriv: ", "unshare: ", "mount: ")):
                if "Permission denied" in said and self._is_root:
                    raise SandboxError(
                        f"no sandbox starts here ({said}): root's sandboxes run as nobody, who has to reach bwrap and "
                        "rollout.task.programs; make these readable by everybody, or start the run as an ordinary user"
                    )
                raise SandboxError(
                    f"no sandbox starts here ({said}): the kernel, or the container that this runs in, forbids namespaces. Allow them to "
                    "users (sysctl user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns; a container's seccomp "
                    "profile), or set rollout.task.container"
                )
            why = f" ({before[-1]})" if before else ""
            raise SandboxError(f"{self._folder.path}: {said}{why}, with this machine's programs and no network; set rollout.task.container")
        if ran.code is None:
            raise SandboxError(f"{self._folder.path}/environment/Dockerfile: {ran.ended}")
        bins = [f"{one}/bin" for one in programs]
        self._variables |= build.variables | self._resolved(self._folder.variables, "environment.env")
        self._variables["PATH"] = ":".join([*bins, self._variables["PATH"]])
        self._workdir = self._folder.workdir or build.workdir

    async def _run(self, command: str, variables: Mapping[str, str], limit_s: float, more: Sequence[str] = ()) -> Ran:
        """Args: more: arguments of bubblewrap: mounts, of three words each."""
        seen = [path for path in (*_SYSTEM, *_SETTINGS_SEEN, *self._settings["programs"]) if Path(path).exists()]
        for path in (*more[2::3], "/proc", "/dev"):
            self._clear(path, is_folder=True)
        for path in seen:
            self._clear(str(path), is_folder=Path(path).is_dir())
        # Where too much is on the disk a command can still remove some.
        self._before_mib = self._taken_mib if self._is_full else 0.0
        largest = 0 if self._is_full else int(min(self._storage_mib * 2**20, LARGEST_FILE_BYTES))
        limits = f"--data={self._memory_mib << 20}", f"--fsize={largest}", "--core=0"
        # Without capabilities, too, root is who writes settings of the kernel and reads what only root may, and isn't counted.
        user = (str(shutil.which("setpriv")), f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups") if self._is_root else ()
        entered = (str(shutil.which("unshare")), "--mount", "/bin/sh", "-c", _ENTER, str(self._scratch)) if self._is_root else ()
        # Not in a command line, which everybody on the machine may read.
        values = _file_of(word for name, text in variables.items() for word in ("--setenv", name, text))
        told, tells = os.pipe()
        arguments = [
            *(*entered, str(shutil.which("prlimit")), *limits, *user, str(shutil.which("bwrap")), "--info-fd", str(tells)),
            *("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--uid", "0", "--gid", "0", "--hostname", "sandbox", "--bind", f"{self._reached}/files", "/"),
            *(word for path in seen for word in ("--ro-bind", str(path), str(path))),
            *("--proc", "/proc", "--remount-ro", "/proc"),
            *("--dev", "/dev", "--size", str(_SHARED_MIB << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *(*more, "--args", str(values), "--", "/bin/bash", "-c", _BEGIN, command, self._workdir),
        ]
        try:
            ran = await self._ran(arguments, limit_s, {}, (values, tells))
        finally:
            os.close(values)
            os.close(tells)
            await asyncio.to_thread(_await_end, told)
        full = await self._fullness()
        self._is_full = bool(full)
        if self._taken_mib > 2 * self._storage_mib:  # others have the same disk, and a rollout lasts
            await _remove(self._files, self._scratch / "verifier")
            self._files.mkdir()
            await self._hand_over("files")
            self._is_full = False
            return replace(ran, code=None, ended=f"{full}; that was more than twice as much, and all files were removed")
        return replace(ran, code=None, ended=full) if full and not ran.ended else ran

    def _clear(self, path: str, *, is_folder: bool) -> None:
        """Make way for a mount among the files, which were a command's: links would lead bubblewrap elsewhere, out of the sandbox too, and
        things of another kind would stop it. No command runs meanwhile."""
        at, parts = self._files, PurePosixPath(os.path.normpath(path)).parts[1:]
        at.chmod(0o755)
        for left, part in reversed(list(enumerate(reversed(parts)))):
            at /= part
            try:
                mode = at.lstat().st_mode
            except FileNotFoundError:
                return
            if stat.S_ISDIR(mode):
                at.chmod(stat.S_IMODE(mode) | 0o700)
                if not left and not is_folder:
                    at.rename(self._scratch / f"cleared-{uuid.uuid4().hex}")
            elif left or is_folder or stat.S_ISLNK(mode):
                at.unlink()
                return

    async def _test(self, variables: Mapping[str, str], limit_s: float) -> Ran:
        # Tests have room of their own: how much the commands before have filled is no reason for them to fail.
        of_commands, self._is_full = self._storage_mib, False
        self._storage_mib += await asyncio.to_thread(_size_mib, self._scratch)
        shown = ("--bind", f"{self._reached}/tests", "/tests", "--bind", f"{self._reached}/verifier", "/logs/verifier")
        try:
            return await self._run("/tests/test.sh", variables, limit_s, shown)
        finally:
            self._storage_mib = of_commands

    async def _fullness(self) -> str:
        """Why nothing more may be written; empty: it may."""
        began = time.monotonic()
        size = self._taken_mib = await asyncio.to_thread(_size_mib, self._scratch)
        self._next_look = time.monotonic() + _REST * (time.monotonic() - began)
        if size == math.inf and self._storage_mib != math.inf:
            return "it made a folder that can't be read, so that nobody knows how much its files take"
        return f"its files took more than {self._storage_mib} MiB" if size > self._storage_mib else ""

    async def _look(self, process: asyncio.subprocess.Process) -> str:
        tree = descendant_pids(process.pid)
        if len(tree) > MOST_PROCESSES:
            return f"it had more than {MOST_PROCESSES} processes"
        if beyond_memory(tree, self._memory_mib << 20):
            return f"it took more than {self._memory_mib} MiB of memory"
        if time.monotonic() < self._next_look:
            return ""
        full = await self._fullness()
        return full if self._taken_mib > self._before_mib else ""


def _is_root() -> bool:
    """Whether this is the machine's root, and not that of a user namespace, who can be nobody else."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]


def _file_of(words: Iterable[str]) -> int:
    """A descriptor of a file in memory with arguments of bubblewrap (--args). Raises: SandboxError."""
    written = [os.fsencode(word) for word in words]
    if any(b"\0" in word for word in written):
        raise SandboxError("an environment variable of the task's has a NUL character, which none can have; mend task.toml or Dockerfile")
    file = os.memfd_create("arguments")
    with os.fdopen(os.dup(file), "wb") as opened_file:
        opened_file.write(b"".join(word + b"\0" for word in written))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _await_end(told: int) -> None:
    """Wait until no process is left of a sandbox whose bubblewrap has ended; the kernel kills them, and takes its time.

    Args: told: what bubblewrap wrote of its first process (--info-fd); closed here.
    Raises: SandboxError.
    """
    with os.fdopen(told, "rb") as pipe:
        found = re.search(rb'"child-pid": (\d+)', pipe.read())
    if found is None:  # it hadn't begun
        return
    try:
        first = os.pidfd_open(int(found[1]))
    except ProcessLookupError:
        return
    try:
        ends = select.poll()
        ends.register(first, select.POLLIN)  # the first of a PID namespace is gone when all others are
        if not ends.poll(_GONE_S * 1000):
            raise SandboxError(f"a command's processes are still there, {_GONE_S:g} s after they were killed")
    finally:
        os.close(first)


def _size_mib(folder: Path) -> float:
    """What the files of a folder take on the disk, an entry a block at least; infinite if a folder of it can't be read."""
    found, unreadable = 0, list[OSError]()
    for inner, folders, files in os.walk(folder, onerror=unreadable.append):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                found += max(os.lstat(os.path.join(inner, name)).st_blocks << 9, _BLOCK_BYTES)
    return math.inf if any(isinstance(error, PermissionError) for error in unreadable) else found >> 20


# --- in a container ---------------------------------------------------------------------------------------------------


class _Container(Sandbox):
    """docker's or podman's, without network. Each command is an `exec` in it: what one leaves running goes on until the tests."""

    def __init__(self, folder: TaskFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, settings)
        self.name = f"evenkeel-{uuid.uuid4().hex}"
        self._program: str = settings["container"]
        self._holder: asyncio.subprocess.Process | None = None

    async def make(self) -> None:
        if shutil.which(self._program) is None:
            raise SandboxError(f"rollout.task.container = {self._program}: no such program in PATH; install it")
        self._variables = self._resolved(self._folder.variables, "environment.env")
        image = self._folder.image or await self._done(self.building, self._folder.build_s)
        command = self.starting(image.strip().rpartition("\n")[2])
        pipe = asyncio.subprocess.PIPE
        self._holder = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        assert self._holder.stdout is not None
        said = ""
        try:
            async with asyncio.timeout(self._folder.build_s):
                while line := await self._holder.stdout.readline():
                    if (said := line.decode(errors="replace").strip()) == _BEGUN:
                        return
        except TimeoutError:
            said = f"it took more than {self._folder.build_s:g} s"
        raise SandboxError(f"{self._folder.path}: {shlex.join(command[:2])} failed ({said})")

    @property
    def building(self) -> list[str]:
        """The command line that prints the image that it makes, or has made before."""
        return [self._program, "build", "--quiet", f"{self._folder.path}/environment"]

    def starting(self, image: str) -> list[str]:
        """The command line that starts it. It ends with its input, so when this process does, however that is."""
        return [
            *(self._program, "run", "--interactive", "--rm", "--name", self.name, "--network", "none"),
            *("--memory", f"{self._memory_mib}m", "--pids-limit", str(MOST_PROCESSES), "--security-opt", "no-new-privileges"),
            *("--entrypoint", "sh", image, "-c", f"echo {_BEGUN}; exec cat"),
        ]

    def running(self, command: str, variables: Mapping[str, str], limit_s: float) -> list[str]:
        """The command line of a command for bash. Values are left to the program's environment: everybody may read a command line."""
        given = (word for name, text in variables.items() for word in ("--env", f"{name}={text}" if _is_for_clients(name) else name))
        at = () if self._folder.workdir is None else ("--workdir", self._folder.workdir)
        return [self._program, "exec", *given, *at, self.name, "timeout", "--signal=KILL", f"{limit_s:g}", "bash", "-c", command]

    async def _run(self, command: str, variables: Mapping[str, str], limit_s: float) -> Ran:
        given = {name: text for name, text in variables.items() if not _is_for_clients(name)}
        began = time.monotonic()
        ran = await self._ran(self.running(command, variables, limit_s), limit_s + _LATER_S, os.environ | given)
        is_late = ran.code == _KILLED and time.monotonic() - began >= limit_s  # and not killed by itself, or for its memory
        return replace(ran, code=None, ended=f"it took more than {limit_s:g} s") if is_late else ran

    async def _test(self, variables: Mapping[str, str], limit_s: float) -> Ran:
        # What commands have left running or put there. Of the container's root, who is the only one that surely may.
        cleared = "kill -9 -1; rm -rf /tests /logs/verifier && mkdir -p /logs/verifier && chmod 777 /logs/verifier"
        await self._done([self._program, "exec", "--user", "0", self.name, "bash", "-c", cleared], limit_s)
        await self._done([self._program, "cp", f"{self._scratch}/tests/.", f"{self.name}:/tests"], limit_s)
        ran = await self._run("/tests/test.sh", variables, limit_s)
        await self._done([self._program, "cp", f"{self.name}:/logs/verifier/.", f"{self._scratch}/verifier"], limit_s)
        return ran

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            await self._ran([self._program, "rm", "--force", self.name], _LATER_S)
        if self._holder is not None and self._holder.stdin is not None:
            self._holder.stdin.close()
            try:
                await asyncio.wait_for(self._holder.wait(), _LATER_S)
            except TimeoutError:
                self._holder.kill()
        await super().close()

    async def _done(self, command: Sequence[str], limit_s: float) -> str:
        """The output of a command that has to end well. Raises: SandboxError."""
        ran = await self._ran(command, limit_s)
        if ran.code != 0:
            said = ran.ended or ran.output.strip().rpartition("\n")[2]
            raise SandboxError(f"{self._folder.path}: {shlex.join(command[:2])} failed ({said})")
        return ran.output


def _is_for_clients(name: str) -> bool:
    """Whether a variable would change what docker or podman does here, so that it has to be told a command's value otherwise."""
    return name in ("PATH", "HOME", "TMPDIR") or name.startswith(("DOCKER_", "CONTAINER_", "XDG_", "LD_"))
