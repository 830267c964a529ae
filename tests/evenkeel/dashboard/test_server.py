"""Who is let in, and what the answers say to a browser; no browser is needed to see that."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from evenkeel.correction.errors import ConfigError
from evenkeel.dashboard.open_run import OpenRun
from evenkeel.dashboard.server import PAGE, application, serve
from tests.evenkeel.dashboard.made_runs import made

TOKEN = "secret-of-the-test"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with made(tmp_path_factory.mktemp("server"), steps=3) as folder:
        yield folder.path


@pytest.fixture
def client(run: Path) -> TestClient:
    return TestClient(application([OpenRun(run)], TOKEN), base_url="http://127.0.0.1:8790", follow_redirects=False)


PATHS = ("/", "/data/start", "/data/overview", "/data/pulse", "/page/page.js", "/data/overview?token=wrong", "/?token=wrong")


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_served_without_the_token(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 403 and "evenkeel dashboard" in answer.text


def test_the_token_is_swapped_for_a_cookie_that_no_script_reads(client: TestClient) -> None:
    answer = client.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/"), "the token leaves the address"
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=lax" in answer.headers["set-cookie"]
    assert TOKEN not in answer.headers["set-cookie"], "whoever sees the address later has no cookie, and the other way round"
    for path in ("/", "/data/start", "/data/overview", "/page/page.js"):
        assert client.get(path).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8790", "127.0.0.1.evil.example", ""])
def test_another_host_s_name_is_refused_even_with_the_token(client: TestClient, host: str) -> None:
    """A page elsewhere can have its name lead to this machine; its scripts would read what is served here."""
    assert client.get(f"/?token={TOKEN}", headers={"host": host}).status_code == 400
    client.get(f"/?token={TOKEN}")
    assert client.get("/data/overview", headers={"host": host}).status_code == 400
    assert client.get(f"/?token={TOKEN}", headers={"host": "localhost:8790"}).status_code == 303, "an ssh tunnel's name is this machine's"


@pytest.mark.parametrize("path", ["/", "/data/overview", "/page/nothing.js", "/data/nothing", f"/?token={TOKEN}"])
def test_each_answer_forbids_what_the_page_doesn_t_need(client: TestClient, path: str) -> None:
    client.get(f"/?token={TOKEN}")
    policy = client.get(path).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';") and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and "http" not in policy


def test_only_the_page_s_files_and_the_named_runs_are_served(client: TestClient, run: Path) -> None:
    client.get(f"/?token={TOKEN}")
    (run / "secret.txt").write_text("secret")
    for path in ("/page/../server.py", "/page/%2e%2e/server.py", f"/page/{run}/secret.txt", "/page//etc/passwd", f"/{run}/secret.txt"):
        assert client.get(path).status_code == 404
    for query in ("run=1", "run=-1", "run=../..", "run=%C2%B2"):
        assert client.get(f"/data/overview?{query}").status_code == 404
    assert client.get("/data/overview?from=x").status_code == 422


WORDS = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "http://", "https://", 'onclick="', 'style="')


def test_the_page_is_of_its_own_files_and_makes_no_markup_of_text() -> None:
    ours = [path for path in PAGE.iterdir() if path.suffix in (".js", ".html", ".css") and "echarts" not in path.name]
    assert len(ours) >= 5
    for path in ours:
        text = path.read_text()
        for word in WORDS:
            assert word not in text, f"{path.name} has {word}"


def test_the_chart_library_is_the_file_of_its_npm_package() -> None:
    """dist/echarts.min.js of echarts 6.1.0, whose tarball `npm pack echarts@6.1.0` brings."""
    assert sha256((PAGE / "echarts.min.js").read_bytes()).hexdigest() == "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
    assert "npm package echarts 6.1.0, unchanged" in (PAGE / "echarts.LICENSE.txt").read_text()


def test_bad_input_is_one_sentence(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"not a run folder: it has no config\.yaml"):
        serve([run, tmp_path], port=0, say=said.append)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: can't be listened on: Address already in use\. Choose another"):
            serve([run], port=port, say=said.append)
    (damaged := tmp_path / "damaged").mkdir()
    (damaged / "config.yaml").write_text("steps: [")
    with pytest.raises(ConfigError, match=r"config\.yaml: not valid YAML"):
        serve([damaged], port=0, say=said.append)
    assert said == []
