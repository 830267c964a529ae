"""`evenkeel dashboard` as a process: it serves while it lives, ends by Ctrl-C without a word, and leaves the run as it was."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import orjson
import pytest

from tests.evenkeel.dashboard.made_runs import made, with_tokens


def test_it_serves_until_ctrl_c_and_changes_nothing(tmp_path: Path) -> None:
    with made(tmp_path) as folder:
        with_tokens(folder, 40)
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    command = [sys.executable, "-m", "evenkeel", "dashboard", str(folder.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        name, _, address = process.stdout.readline().strip().partition(": ")
        assert name == "run" and address.startswith("http://127.0.0.1:")
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert b"<main" in browser.open(address).read()
        data = f"{address.partition('?')[0]}data/overview"
        assert orjson.loads(browser.open(data).read())["status"] == "Finished after 40 steps."
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(data)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "ssh -L" in process.stdout.read() and process.stderr.read() == ""
    finally:
        process.kill()
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before
