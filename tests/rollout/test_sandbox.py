"""A task folder's sandbox, with real namespaces: what stays, what is out of reach, what is ended, and what the tests' reward can be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenkeel.rollout.task_folders.sandbox import Ran, Sandbox, SandboxError
from tests.rollout.folder_scene import bubblewrap, in_sandbox, needs_bubblewrap, ran, write_folder
from tests.rollout.reward_scene import sleepers, wait_until

__all__ = ["bubblewrap"]
pytestmark = [needs_bubblewrap, pytest.mark.usefixtures("bubblewrap")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "set" / "one")


def said(folder: Path, command: str, **settings: Any) -> str:
    (one,) = ran(folder, command, **settings)
    return one.text


def test_files_stay_and_processes_end(folder: Path) -> None:
    """Each command begins in the work folder; what the one before left running is gone, daemons too."""
    first, second, third = ran(
        folder,
        "cd /tmp; echo 1 > /tmp/a; echo 2 >> /app/notes.txt; echo 3 > /root/b; setsid sleep 67.5 & disown",
        "pwd; cat /tmp/a notes.txt ~/b; ps -e | grep -c sleep",
        "false",
    )
    assert (first.code, third.text) == (0, "[exit code 1]")
    assert second.output.splitlines() == ["/app", "1", "heron pike", "2", "3", "0"]
    assert not sleepers("67.5")  # at once: one that is left could put links where the next command's mounts are made


def test_each_rollout_has_files_of_its_own(folder: Path) -> None:
    assert ran(folder, "rm -rf /app /root /tmp; ls -A /app")[0].code == 2
    assert said(folder, "cat notes.txt") == "heron pike\n[exit code 0]"
    assert (folder / "environment" / "notes.txt").read_text() == "heron pike\n"


def test_the_machine_is_out_of_reach(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its files but for programs, its processes, network, sockets, users' keys and settings of the kernel."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "secret").write_text("of the run")
    monkeypatch.setenv("HF_TOKEN", "a-key")
    with socket.socketpair()[0], socket.create_server(("127.0.0.1", 0)) as door, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0evenkeel-test")
        abstract.listen()
        port = door.getsockname()[1]
        assert "Connection refused" in said(folder, f"exec 3<>/dev/tcp/127.0.0.1/{port}")
        asks = "import socket; socket.socket(socket.AF_UNIX).connect('\\0evenkeel-test')"
        assert "ConnectionRefusedError" in said(folder, f'python3 -c "{asks}"')
    for path in (tmp_path / "run" / "secret", Path.home() / ".ssh", Path(__file__), folder / "tests", "/etc/shadow", "/var", "/sys"):
        assert f"cannot access '{path}': No such file or directory" in said(folder, f"ls {path}"), path
    assert "a-key" not in said(folder, "env; cat /proc/*/environ")
    assert said(folder, f"ls -d /proc/{os.getpid()}").endswith("[exit code 2]") or os.getpid() < 10
    for path in ("/usr/new", "/etc/alternatives/new", "/dev/new", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory"):
        # what is there is written again, so that a hole does no harm
        assert "Read-only file system" in said(folder, f"cat {path} 2>/dev/null > /tmp/a; cat /tmp/a > {path}"), path
    assert "0000000000000000" in said(folder, "grep CapEff /proc/self/status")
    assert said(folder, "unshare -Ur true").endswith("[exit code 1]")
    assert said(folder, "mount -t tmpfs none /mnt; mknod /tmp/a b 8 0").endswith("[exit code 1]")


FILES_IN_MEMORY = "import os, time; [os.posix_fallocate(os.memfd_create(str(i)), 0, 60 << 20) for i in range(5)]; time.sleep(60)"


@pytest.mark.parametrize(
    ("command", "ended"),
    [
        ("sleep 66.5 & setsid sleep 66.5 & trap '' TERM INT; wait", "it took more than 2 s"),
        ("for i in {1..200}; do sleep 66.5 & done; wait", "it had more than 128 processes"),
        (f"python3 -c '{FILES_IN_MEMORY}'", "it took more than 256 MiB of memory"),
        ("for i in 1 2 3 4; do (x=$(head -c 90M /dev/zero | tr '\\0' x); sleep 66.5) & done; wait", "it took more than 256 MiB of memory"),
    ],
)
def test_a_command_beyond_its_limits_is_ended(folder: Path, command: str, ended: str) -> None:
    """With all that it started; the next one runs."""
    bad, good = ran(folder, command, "cat notes.txt", command_s=2 if "took more than 2 s" in ended else 30)
    assert (bad.code, bad.text.splitlines()[-1]) == (None, f"[ended: {ended}]")
    assert good.text == "heron pike\n[exit code 0]"
    assert wait_until(lambda: not sleepers("66.5"))


def test_memory_of_a_single_process_is_refused_to_it(folder: Path) -> None:
    assert "MemoryError" in said(folder, "python3 -c 'bytearray(300 << 20)'")


def test_much_output_is_cut_in_the_middle(folder: Path) -> None:
    output = ran(folder, "seq 1000000", longest_output=100)[0].output
    assert output.startswith("1\n2\n3\n") and output.endswith("999999\n1000000\n")
    size = sum(len(str(number)) + 1 for number in range(1, 10**6 + 1))
    assert f"\n[... {size - 100} bytes are left out ...]\n" in output and len(output) < 150
    assert ran(folder, "seq 20", longest_output=100)[0].output == "".join(f"{number}\n" for number in range(1, 21))
    assert ran(folder, "printf '\\377\\0ok'")[0].output == "\ufffd\0ok"


@pytest.mark.parametrize("place", ["/tests", "/logs", "/etc"])
def test_a_link_leads_no_mount_out_of_the_sandbox(folder: Path, tmp_path: Path, place: str) -> None:
    """bubblewrap makes the places that it mounts on, and sees the machine's files as /oldroot then."""
    (tmp_path / "of the host").mkdir(mode=0o777)
    (tmp_path / "of the host").chmod(0o777)
    for one in (tmp_path, *tmp_path.parents):  # so that whom root's sandboxes run as could write there
        if one.owner() == Path.home().owner() and one != Path("/"):
            one.chmod(one.stat().st_mode | 0o011)
    move = f"mv {place} /away; rm -rf {place}; ln -s '/oldroot{tmp_path}/of the host' {place}"

    async def work(sandbox: Sandbox) -> tuple[Ran, Any]:
        await sandbox.run(move)
        return await sandbox.run("cat notes.txt"), await sandbox.reward()

    after, worth = in_sandbox(folder, work)
    assert (after.text, worth) == ("heron pike\n[exit code 0]", 0.0)
    assert list((tmp_path / "of the host").iterdir()) == []


@pytest.mark.parametrize("plant", ["mkdir -p /etc2/os-release/x; mv /etc /e; mv /etc2 /etc", "chmod 000 /etc ."])
def test_what_stands_in_the_way_of_a_mount_is_cleared(folder: Path, plant: str) -> None:
    assert [one.code for one in ran(folder, f"rm -rf /e; {plant}", "cat notes.txt", "cat /etc/os-release")][1:] == [0, 0]


def test_values_of_variables_are_in_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody on the machine may read those of others."""
    monkeypatch.setenv("GRADER_KEY", "key-4711")
    toml = '[environment]\nenv = { A = "${GRADER_KEY}" }\n[verifier]\nenv = { B = "${GRADER_KEY}" }\n'
    script = TEST + '[ "$B" = key-4711 ] && sleep 1 && echo 1 > /logs/verifier/reward.txt'
    path = write_folder(tmp_path / "set" / "one", **{"task.toml": toml, "tests/test.sh": script})
    seen = list[bytes]()

    def read() -> bool:
        for one in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                seen.append(one.read_bytes())
        return any(b"/tests/test.sh" in line for line in seen)

    async def work(sandbox: Sandbox) -> tuple[str, Any]:
        testing = asyncio.create_task(sandbox.reward())
        while not read() and not testing.done():
            await asyncio.sleep(0.02)
        worth = await testing
        running = asyncio.create_task(sandbox.run("sleep 0.77; echo $A"))
        while not any(b"sleep 0.77" in line for line in seen) and not running.done():
            await asyncio.sleep(0.02)
            read()
        return (await running).output, worth

    assert in_sandbox(path, work) == ("key-4711\n", 1.0)
    assert any(b"/tests/test.sh" in line for line in seen) and any(b"sleep 0.77" in line for line in seen)
    assert not [line for line in seen if b"key-4711" in line]


def test_a_command_that_bash_can_t_be_given_is_for_the_model_to_read(folder: Path) -> None:
    nul, long, last = ran(folder, "echo \0", f"echo {'x' * (1 << 17)}", f"echo {'x' * 1000}")
    assert nul.text == "[ended: it has a NUL character]"
    assert long.text == "[ended: it has more than 131071 bytes]"
    assert last.code == 0


@pytest.mark.parametrize("command", ["rm -rf /app", "rm -rf /app; touch /app", "chmod 000 .", "rm -rf /app; ln -s /nowhere/at/all /app"])
def test_a_command_begins_in_the_work_folder_whatever_became_of_it(folder: Path, command: str) -> None:
    assert [one.text for one in ran(folder, command, "touch a && pwd")][1] == "/app\n[exit code 0]"
    assert reward(folder, command) == 0.0


def test_files_beyond_their_limit_are_for_the_model_to_read(folder: Path) -> None:
    """It may remove some, and write no more before; the tests have room of their own, and their verdict counts."""
    fill = "for i in 1 2 3; do head -c 40M /dev/zero > $i; done"
    first, more, gone, after = ran(folder, fill, "echo 1 > more", "sleep 1; rm -f 1 2 3", "echo 1 > more; cat more")
    full = "its files took more than 64 MiB"
    assert [first.ended, more.ended, gone.ended, after.text] == [full, full, "", "1\n[exit code 0]"]
    assert more.code is None and reward(folder, fill) == 0.0
    assert reward(folder, "cut -d' ' -f1 notes.txt > answer.txt", fill) == 1.0
    assert "File size limit exceeded" in said(folder, "head -c 80M /dev/zero > big; rm big")
    assert "67108864" in said(folder, "head -c 80M /dev/zero > /dev/shm/a; wc -c /dev/shm/a")


def test_files_far_beyond_their_limit_are_removed(folder: Path) -> None:
    """Others have the same disk, and a rollout may last for hours. The sandbox goes on, empty, and its tests are run."""
    fill = "python3 -c 'import os; [os.posix_fallocate(os.open(str(i), os.O_CREAT | os.O_RDWR), 0, 60 << 20) for i in range(20)]'"
    full, after = ran(folder, fill, "ls -A; pwd; echo 1 > a; cat a")
    assert full.ended == "its files took more than 64 MiB; that was more than twice as much, and all files were removed"
    assert after.text == "/app\n1\n[exit code 0]"
    assert reward(folder, "cut -d' ' -f1 notes.txt > answer.txt", fill) == 0.0


def test_entries_and_folders_that_can_t_be_read_count(folder: Path) -> None:
    """17,000 empty files take 66 MiB, a block each; a folder hides nothing from who counts, or says so."""
    empty, hidden = (
        ran(folder, "mkdir many; cd many; touch {1..17000}")[0],
        ran(folder, "mkdir a; head -c 40M /dev/zero > a/b; head -c 40M /dev/zero > a/c; chmod 000 a")[0],
    )
    assert empty.ended == "its files took more than 64 MiB"
    why = "it made a folder that can't be read, so that nobody knows how much its files take"
    removed = "; that was more than twice as much, and all files were removed"  # as it may be
    assert hidden.ended == (empty.ended if os.geteuid() == 0 else why + removed)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of temporary files that nobody else reaches."""
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def test_nothing_is_left_on_the_disk(folder: Path, scratch: Path) -> None:
    ran(folder, "mkdir -p a/b; touch a/b/c; chmod 000 a/b a; ln -s / root")
    assert list(scratch.iterdir()) == []


def test_commands_are_nobody_s_where_a_run_is_root_s(folder: Path, scratch: Path) -> None:
    async def owner(sandbox: Sandbox) -> int:
        assert (await sandbox.run("touch made; id -u")).text == "0\n[exit code 0]"
        (made,) = scratch.rglob("made")
        return made.stat().st_uid

    assert in_sandbox(folder, owner) == (65534 if os.geteuid() == 0 else os.geteuid())
    if os.geteuid() == 0:
        (scratch / "programs").mkdir()
        said = r"no sandbox starts here \(.*Permission denied.*\): root's sandboxes run as nobody, who has to reach bwrap and rollout"
        with pytest.raises(SandboxError, match=said):
            ran(folder, "true", programs=[scratch / "programs"])


# --- tests and their reward -------------------------------------------------------------------------------------------


def reward(folder: Path, *commands: str) -> Any:
    async def work(sandbox: Sandbox) -> Any:
        for command in commands:
            await sandbox.run(command)
        return await sandbox.reward()

    return in_sandbox(folder, work)


def test_tests_give_the_reward(folder: Path) -> None:
    assert reward(folder) == 0.0
    assert reward(folder, "cut -d' ' -f1 notes.txt > answer.txt") == 1.0


def test_tests_may_be_run_after_each_command(folder: Path) -> None:
    """Each time in a fresh copy; what they may write more is theirs alone."""

    async def work(sandbox: Sandbox) -> list[Any]:
        found = [await sandbox.reward()]
        await sandbox.run("cut -d' ' -f1 notes.txt > answer.txt")
        found.append(await sandbox.reward())
        return [*found, (await sandbox.run("for i in 1 2; do head -c 40M /dev/zero > $i; done")).ended]

    assert in_sandbox(folder, work) == [0.0, 1.0, "its files took more than 64 MiB"]


def test_what_a_rollout_plants_gives_no_reward(folder: Path) -> None:
    """Tests of its own, a reward of its own, a process that waits for the tests, another cat."""
    plants = [
        "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh; chmod +x /tests/test.sh",
        "rmdir /logs/verifier /logs; ln -s /app /logs",
        "setsid bash -c 'while true; do echo 1 > /logs/verifier/reward.txt; done' & disown",
    ]
    assert [reward(folder, plants[0], plants[1]), reward(folder, plants[3])] == [0.0, 0.0]
    assert reward(folder, "rm -rf /logs; ln -s /app /logs; mkdir /app/verifier; chmod 000 /app") == 0.0
    own = "printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\n' > /newroot/x/test.sh; chmod +x /newroot/x/test.sh"
    assert reward(folder, f"rm -rf /tests; mkdir -p /newroot/x /x; ln -s /newroot/x /tests; {own}") == 0.0


TEST = "#!/bin/bash\n"
REWARDS = {
    "echo 0.25 > /logs/verifier/reward.txt; exit 1": 0.25,
    'echo 0.5 > /logs/verifier/reward.txt; echo \'{"reward": 0.75, "style": 0.1}\' > /logs/verifier/reward.json': 0.75,
    'echo \'{"right": 1, "style": 0.5}\' > /logs/verifier/reward.json': {"right": 1, "style": 0.5},
    "[ $LEVEL = 3 ] && [ $PWD = /app ] && [ $GREETING = hello ] && echo 1 > /logs/verifier/reward.txt": 1.0,
}
FAILED = {
    "echo nothing; exit 7": "/tests/test.sh ended with exit code 7 and no /logs/verifier/reward.txt or reward.json (nothing)",
    "echo good > /logs/verifier/reward.txt": "reward.txt can't be used: could not convert string to float: b'good\\n'",
    "echo 1$(printf %0400d) > /logs/verifier/reward.json": "reward.json can't be used: reward is too large",
    "> /logs/verifier/reward.txt": "reward.txt can't be used: could not convert string to float",
    "echo '{' > /logs/verifier/reward.json": "reward.json can't be used: Expecting property name",
    "mkfifo /logs/verifier/reward.txt": "reward.txt can't be used: it is no regular file",
    "ln -s /etc/passwd /logs/verifier/reward.txt": "reward.txt can't be used: [Errno 40]",
    "head -c 1M /dev/zero > /logs/verifier/reward.txt": "reward.txt can't be used: it has more than 65536 bytes",
    "sleep 66.5": "/tests/test.sh: it took more than 2 s",
    "for i in {1..200}; do sleep 66.5 & done; wait": "/tests/test.sh: it had more than 128 processes",
    "yes": "/tests/test.sh: it took more than 2 s",
}


@pytest.mark.parametrize("script", REWARDS)
def test_a_reward_is_a_number_or_parts(tmp_path: Path, script: str) -> None:
    toml = '[verifier]\ntimeout_sec = 20\nenv = { LEVEL = "${NO_SUCH:-3}" }\n[environment]\nenv = { GREETING = "hello" }\n'
    path = write_folder(tmp_path / "set" / "one", **{"task.toml": toml, "tests/test.sh": TEST + script})
    assert reward(path) == REWARDS[script]


@pytest.mark.parametrize("script", FAILED)
def test_tests_that_give_no_reward_are_named(tmp_path: Path, script: str) -> None:
    limit_s = 2 if "took more" in FAILED[script] else 30
    toml = f"[verifier]\ntimeout_sec = {limit_s}\n"
    path = write_folder(tmp_path / "set" / "one", **{"task.toml": toml, "tests/test.sh": TEST + script})
    with pytest.raises(SandboxError) as caught:
        reward(path, "true")
    assert str(path) in str(caught.value) and FAILED[script] in str(caught.value)
    assert wait_until(lambda: not sleepers("66.5"))


@pytest.mark.parametrize(
    "plant",
    ["sleep 66.5", "for i in {1..200}; do sleep 66.5 & done; wait", "exit 3", "right=nan", "right=heron", "rm -f /logs/verifier/*; exit 0"],
)
def test_who_spoils_the_tests_gets_nothing_for_it(tmp_path: Path, plant: str) -> None:
    """Tests that run what the model wrote hang, end or write nonsense by its doing: without it they give a reward."""
    script = "[ -f answer.sh ] && . ./answer.sh\necho ${right:-0.25} > /logs/verifier/reward.txt"
    path = write_folder(tmp_path / "set" / "one", **{"task.toml": "[verifier]\ntimeout_sec = 8\n", "tests/test.sh": TEST + script})
    assert reward(path, f"echo '{plant}' > answer.sh") == 0.0
    assert wait_until(lambda: not sleepers("66.5"))
    assert reward(path, "echo right=0.5 > answer.sh") == 0.5


def test_a_reward_comes_before_its_caller_gives_up(tmp_path: Path) -> None:
    """Tests that the model made hang, 3 s, and those of a fresh sandbox, which takes 3 s to make, need 9 s of the caller's 6: what is never
    known of the folder is worth 0, too. A caller that gave up would leave the rollout out."""
    script = "[ -f answer.sh ] && . ./answer.sh\nsleep 3\necho 1 > /logs/verifier/reward.txt"
    dockerfile = "FROM a\nWORKDIR /app\nRUN sleep 3\n"
    path = write_folder(tmp_path / "set" / "one", **{"environment/Dockerfile": dockerfile, "tests/test.sh": TEST + script})

    async def work(sandbox: Sandbox) -> Any:
        await sandbox.run("echo sleep 60 > answer.sh")
        async with asyncio.timeout(8):
            return await sandbox.reward()

    assert in_sandbox(path, work, within_s=6) == 0.0


# --- what can't be made -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here, whose words are looked for")
def test_a_step_that_fails_is_named_by_its_line(tmp_path: Path) -> None:
    """As most that install something: a sandbox has no network."""
    path = write_folder(
        tmp_path / "set" / "one", **{"environment/Dockerfile": "FROM a\nWORKDIR /app\nRUN curl -sS https://example.org \\\n  -o x\n"}
    )
    with pytest.raises(SandboxError) as caught:
        ran(path, "true")
    wanted = "environment/Dockerfile:3: RUN curl -sS https://example.org -o x: exit code 6 (curl: (6) "
    assert wanted in str(caught.value)
    assert str(caught.value).endswith("), with this machine's programs and no network; set rollout.task.container")


def test_a_variable_that_isn_t_set_is_named(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "set" / "one", **{"task.toml": '[environment]\nenv = { KEY = "${NO_SUCH_KEY}" }\n'})
    with pytest.raises(SandboxError, match=r"task.toml: environment.env names \$\{NO_SUCH_KEY\}, which isn't set here; name it in rollout"):
        ran(path, "true")


def test_a_machine_without_bubblewrap_is_told_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match=r"no program bwrap in PATH; install the package bubblewrap, 0.8 or newer"):
        ran(folder, "true")


def test_a_kernel_that_forbids_namespaces_is_named(folder: Path) -> None:
    """In a namespace that may have none below it."""
    script = f"from pathlib import Path; from tests.rollout.folder_scene import ran; ran(Path({str(folder)!r}), 'true')"
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, sys.executable, script]
    seen = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=120)
    assert "SandboxError: no sandbox starts here (bwrap: " in seen.stderr
    assert "forbids namespaces. Allow them to users (sysctl user.max_user_namespaces" in seen.stderr


def test_a_command_has_a_text_for_the_model() -> None:
    assert Ran(0, "").text == "[exit code 0]"
    assert Ran(3, "a\n\n").text == "a\n[exit code 3]"
    assert Ran(None, "a", "it took more than 3 s").text == "a\n[ended: it took more than 3 s]"


# --- in a container: up to the command line ---------------------------------------------------------------------------

RECORDER = """#!/bin/bash
printf '%q ' "$@" >> {folder}/commands; echo >> {folder}/commands
case "$1 $*" in
    build*) echo "sha256:1f" ;;
    "cp cp evenkeel-"*) echo 0.5 > "$3/reward.txt" ;;
    exec*spins*) sleep 1; exit 137 ;;
    exec*dies*) exit 137 ;;
    exec*) echo said $GREETING ;;
    run*) echo evenkeel: begun; cat; echo ended >> {folder}/commands ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name that writes down what it is asked."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(RECORDER.format(folder=tmp_path))
    (tmp_path / "bin" / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path / "commands"


def test_a_container_s_command_lines(folder: Path, docker: Path) -> None:
    """One that is built, without network, with its limits; commands with theirs; tests go in when all that ran is killed and what lay at
    their place is gone; it is removed, and would end with this process."""

    async def work(sandbox: Sandbox) -> tuple[Ran, Ran, Ran, Any]:
        return await sandbox.run("ls"), await sandbox.run("spins"), await sandbox.run("dies"), await sandbox.reward()

    first, late, killed, worth = in_sandbox(folder, work, container="docker", command_s=1)
    assert (first.text, late.text, worth) == ("said hello\n[exit code 0]", "[ended: it took more than 1 s]", 0.5)
    assert killed.text == "[exit code 137]"
    build, run, ls, spins, _, cleared, tests_in, test, reward_out, removed, last = docker.read_text().splitlines()
    name = run.split()[run.split().index("--name") + 1]
    assert build == f"build --quiet {folder}/environment "
    limits = "--network none --memory 256m --pids-limit 128 --security-opt no-new-privileges"
    assert run == f"run --interactive --rm --name {name} {limits} --entrypoint sh sha256:1f -c echo\\ evenkeel:\\ begun\\;\\ exec\\ cat "
    assert ls == f"exec --env GREETING {name} timeout --signal=KILL 1 bash -c ls "
    assert spins.endswith("bash -c spins ")
    assert tests_in.startswith("cp ") and tests_in.endswith(f"/tests/. {name}:/tests ")
    assert cleared.startswith(f"exec --user 0 {name} bash -c kill\\ -9\\ -1\\;\\ rm\\ -rf\\ /tests\\ /logs/verifier\\ ")
    assert test == f"exec --env GREETING {name} timeout --signal=KILL 20 bash -c /tests/test.sh "
    assert reward_out.startswith(f"cp {name}:/logs/verifier/. ") and removed == f"rm --force {name} " and last == "ended"


def test_an_image_that_is_named_is_not_built(tmp_path: Path, docker: Path) -> None:
    """Nor is its Dockerfile followed here; a work folder is task.toml's."""
    toml = '[environment]\ndocker_image = "org/one:2"\nworkdir = "/work"\n'
    path = write_folder(tmp_path / "set" / "one", **{"task.toml": toml, "environment/Dockerfile": None})
    ran(path, "ls", container="docker")
    run, ls, *_ = docker.read_text().splitlines()
    assert " --memory 1024m " in run and " --entrypoint sh org/one:2 -c " in run and "exec --workdir /work evenkeel-" in ls


def test_a_container_that_doesn_t_start_is_named(folder: Path, docker: Path) -> None:
    docker.with_name("bin").joinpath("docker").write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon'\nexit 125\n")
    with pytest.raises(SandboxError, match=rf"{folder}: docker build failed \(Cannot connect to the Docker daemon\)"):
        ran(folder, "true", container="docker")
    with pytest.raises(SandboxError, match=r"rollout.task.container = podman: no such program in PATH; install it"):
        ran(folder, "true", container="podman")
