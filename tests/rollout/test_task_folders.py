"""Task folders of Harbor's form: what is read of them, what is refused, and what a Dockerfile makes without a container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenkeel.correction.errors import DataError
from evenkeel.rollout.config import FoldersTask, RolloutConfig
from evenkeel.rollout.task_folders.folder import TaskFolder
from evenkeel.rollout.tasks.tasks import build_task
from tests.rollout.folder_scene import bubblewrap, needs_bubblewrap, ran, write_folder

__all__ = ["bubblewrap"]


def folders(tmp_path: Path, count: int = 3) -> FoldersTask:
    for number in range(count):
        write_folder(tmp_path / "set" / f"task-{number}", **{"instruction.md": f"# canary\nWrite {number} to answer.txt.\n"})
    return FoldersTask(path=tmp_path / "set")


def test_folders_are_questions(tmp_path: Path) -> None:
    """The instruction without its marks; files by an absolute path; a solution as the turns of a rollout."""
    task = build_task(folders(tmp_path))
    asked = {task.train_prompt(position).text for position in range(2)} | {task.held_out_sample().text}
    assert asked == {f"Write {number} to answer.txt." for number in range(3)}
    one = task.train_prompt(0)
    assert one.answer == "" and Path(one.metadata["folder"]).is_absolute()
    assert one.metadata["sandbox"] == {"container": None, "programs": [], "command_s": 10.0, "longest_output": 4000}
    shown, last = task.demonstrations(2)
    assert (shown.answer, last.answer) == ("```sh\ncut -d' ' -f1 notes.txt > answer.txt\n```", "Done.")


def test_a_folder_without_solution_shows_nothing(tmp_path: Path) -> None:
    for number in range(3):
        write_folder(tmp_path / f"{number}", solution__solve_sh=None, **{"solution/solve.sh": None, "instruction.md": f"{number}"})
    with pytest.raises(DataError, match="skip the warm-up"):
        build_task(FoldersTask(path=tmp_path)).demonstrations(2)


BAD: dict[str, tuple[dict[str, str | None], str]] = {
    "no tests": ({"tests/test.sh": None}, "it has no tests/test.sh, what scores a rollout; add it"),
    "no instruction": ({"instruction.md": None}, "it has no instruction.md, what the model is asked; add it"),
    "marks alone": ({"instruction.md": "<!-- canary -->\n\n"}, "instruction.md is empty: nothing would be asked; write it"),
    "no toml": ({"task.toml": None}, "it has no task.toml"),
    "no image": ({"environment/Dockerfile": None}, "it has no environment/Dockerfile, what its sandbox is made by; add it"),
    "torn toml": (
        {"task.toml": "[verifier]\ntimeout_sec 3\n"},
        "task.toml is no valid TOML (Expected '=' after a key in a key/value pair (at line 2",
    ),
    "a word": (
        {"task.toml": '[verifier]\ntimeout_sec = "soon"\n'},
        "task.toml: verifier.timeout_sec = 'soon': input should be a valid number",
    ),
    "never": (
        {"task.toml": "[verifier]\ntimeout_sec = 0\n"},
        "task.toml: verifier.timeout_sec = 0: input should be greater than 0; mend it",
    ),
    "a list": ({"task.toml": "verifier = 3\n"}, "task.toml: verifier = 3"),
    "gpus": (
        {"task.toml": "[environment]\ngpus = 1\n"},
        "task.toml: environment.gpus = 1 asks for what no sandbox here has; leave the folder out",
    ),
    "windows": ({"task.toml": '[environment]\nos = "windows"\n'}, "environment.os = 'windows' asks for what no sandbox here has"),
    "steps": ({"task.toml": '[[steps]]\nname = "one"\n'}, "task.toml: steps = [{'name': 'one'}] asks for what no sandbox here has"),
    "separate": ({"task.toml": '[verifier]\nenvironment_mode = "separate"\n'}, "verifier.environment_mode = 'separate' asks for what"),
    "image": (
        {"task.toml": '[environment]\ndocker_image = "a/b:1"\n'},
        "docker_image = 'a/b:1' is for a container; set rollout.task.container",
    ),
    "compose": ({"environment/docker-compose.yaml": "x"}, "environment/docker-compose.yaml asks for several containers"),
    "stages": (
        {"environment/Dockerfile": "FROM a AS b\nFROM c\n"},
        "environment/Dockerfile:2: FROM c: a second stage: only a container can",
    ),
    "other image": (
        {"environment/Dockerfile": "FROM a\n\nCOPY --from=b /x /y\n"},
        "environment/Dockerfile:3: COPY --from=b /x /y: only a container can follow it; set rollout.task.container (docker or podman)",
    ),
    "modes": (
        {"environment/Dockerfile": "FROM a\nCOPY --chmod=755 notes.txt /app/\n"},
        "environment/Dockerfile:2: COPY --chmod=755 notes.txt /app/: only a container can follow it",
    ),
    "missing file": ({"environment/Dockerfile": "FROM a\nCOPY a.txt b.txt /app/\n"}, "COPY a.txt b.txt /app/: environment/ has no a.txt"),
    "outside": ({"environment/Dockerfile": "FROM a\nCOPY ../task.toml /app/\n"}, "environment/ has no ../task.toml"),
    "mount": (
        {"environment/Dockerfile": "FROM a\nRUN --mount=type=cache make\n"},
        "environment/Dockerfile:2: RUN --mount=type=cache make: only",
    ),
    "shell": (
        {"environment/Dockerfile": 'FROM a\nSHELL ["zsh"]\n'},
        'environment/Dockerfile:2: SHELL ["zsh"]: only a container can follow it',
    ),
    "quotes": ({"environment/Dockerfile": "FROM a\nENV A='b\n"}, "environment/Dockerfile:2: ENV A='b: No closing quotation; mend it"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_skipped_with_its_reason(tmp_path: Path, case: str) -> None:
    """Beside three good ones, which are asked."""
    changes, reason = BAD[case]
    task = folders(tmp_path)
    write_folder(tmp_path / "set" / "bad", **changes)
    (skipped,) = build_task(task).check().skipped
    assert skipped.place == str(tmp_path / "set" / "bad") and reason in skipped.reason


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("set/task-0", "this is one task folder; name the folder that it lies in"),
        ("nowhere", "No such file or directory (the run was started in"),
        ("set/task-0/task.toml", "rollout.task.path"),
        ("empty", "none of its 0 rows can be used. A task folder has instruction.md, task.toml, environment/Dockerfile and tests/test.sh"),
    ],
)
def test_a_path_without_task_folders_is_refused(tmp_path: Path, path: str, message: str) -> None:
    folders(tmp_path)
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    with pytest.raises(DataError) as caught:
        build_task(FoldersTask(path=tmp_path / path))
    assert message in str(caught.value)


def test_something_has_to_play_in_them(tmp_path: Path) -> None:
    task: dict[str, Any] = {"kind": "folders", "path": tmp_path}
    with pytest.raises(ValueError, match=r'set environment: \{path: "evenkeel.rollout.environments.shell:Shell"\}'):
        RolloutConfig.model_validate({"task": task, "reward": {"kind": "exact_match"}})


def test_a_command_ends_before_its_step(tmp_path: Path) -> None:
    """Or a model that lets one wait would have its rollout left out."""
    played = {"environment": {"path": "evenkeel.rollout.environments.shell:Shell", "deadline_s": 30}, "reward": {"kind": "environment"}}
    task = {"kind": "folders", "path": tmp_path}
    assert RolloutConfig.model_validate({"task": task | {"command_s": 29}, **played}).environment is not None
    with pytest.raises(ValueError, match=r"task.command_s = 30 with environment.deadline_s = 30: a long command would end its rollout"):
        RolloutConfig.model_validate({"task": task | {"command_s": 30}, **played})


def test_sizes_of_older_folders_are_understood(tmp_path: Path) -> None:
    """Schema 1.0 has "2G" where later ones have 2048."""
    path = write_folder(tmp_path / "one", **{"task.toml": 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\n'})
    one = TaskFolder.read(path, is_local=True)
    assert (one.memory_mib, one.storage_mib, one.tests_s) == (2048, 512, 600)


@needs_bubblewrap
@pytest.mark.usefixtures("bubblewrap")
def test_a_dockerfile_is_followed(tmp_path: Path) -> None:
    """Folders, files and patterns are copied where Docker copies them; variables hold for what follows and for every command."""
    dockerfile = """\
    # syntax=docker/dockerfile:1
    FROM python:3.12-slim
    ARG NAME=pike
    ENV WHERE=/data GREETING="good day" \\
        SECOND=$NAME
    LABEL a=b
    WORKDIR /app
    COPY notes.txt ./
    COPY notes.txt renamed.txt
    COPY --chown=1:1 parts /app/all
    COPY notes.txt ${UNSET:-/opt}/${NAME:+named}/
    COPY ["parts/a.txt", "parts/b.txt", "$WHERE/"]
    ADD parts/*.txt /more/
    RUN echo $SECOND > made.txt && \\
        # in the middle
        pwd >> made.txt
    RUN ["touch", "two words"]
    WORKDIR below
    CMD ["sleep"]
    """
    parts = {"environment/parts/a.txt": "a", "environment/parts/b.txt": "b", "environment/parts/deep/c": "c"}
    path = write_folder(tmp_path / "set" / "one", **{"environment/Dockerfile": "\n".join(map(str.strip, dockerfile.splitlines()))}, **parts)
    (path / "environment" / "parts" / "a.txt").chmod(0o755)
    found, more = ran(
        path, "pwd; cd /; find app data more opt -type f | sort; cat app/made.txt; echo $GREETING,$SECOND,$WHERE", "test -x /data/a.txt"
    )
    files = ["app/all/a.txt", "app/all/b.txt", "app/all/deep/c", "app/made.txt", "app/notes.txt", "app/renamed.txt", "app/two words"]
    files += ["data/a.txt", "data/b.txt", "more/a.txt", "more/b.txt", "opt/named/notes.txt"]
    # task.toml's GREETING wins over the Dockerfile's
    assert found.output.splitlines() == ["/app/below", *files, "pike", "/app", "hello,pike,/data"]
    assert more.code == 0


@needs_bubblewrap
@pytest.mark.usefixtures("bubblewrap")
def test_lines_that_go_on_keep_their_blanks(tmp_path: Path) -> None:
    """As Docker joins them: the backslash and the line's end are taken away, nothing else; one at the file's end ends its instruction."""
    dockerfile = "FROM a\nWORKDIR /app\nENV A=1\\\n    B=2\nRUN echo $A\\\n   $B > said.txt\nRUN echo last >> said.txt \\\n"
    path = write_folder(tmp_path / "set" / "one", **{"environment/Dockerfile": dockerfile})
    assert ran(path, "cat said.txt")[0].output == "1 2\nlast\n"


@needs_bubblewrap
@pytest.mark.usefixtures("bubblewrap")
def test_a_dockerfile_goes_on_from_the_sandbox_s_own_variables(tmp_path: Path) -> None:
    """A program of the task's is found beside the machine's, in a step and in a command."""
    dockerfile = "FROM a\nWORKDIR /app\nENV PATH=/app/bin:$PATH AT=${HOME}/at\nCOPY tool bin/\nRUN tool > said; ls > /dev/null\n"
    path = write_folder(
        tmp_path / "set" / "one", **{"environment/Dockerfile": dockerfile, "environment/tool": "#!/bin/sh\necho from a tool\n"}
    )
    (path / "environment" / "tool").chmod(0o755)
    (one,) = ran(path, "cat said; tool; echo $PATH $AT")
    path_seen = "/app/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert one.output.splitlines() == ["from a tool", "from a tool", f"{path_seen} /root/at"]
