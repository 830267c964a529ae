"""How long the page of a long run takes to open, in a real Chromium: on the clock, and in processor time of server and browser.

    python benchmarks/page_opens.py [--steps 10000] [--metrics 190] [--repeats 5]

The lines are made up: that many of the catalogue's metrics in each step, every number another one. The server is the command's, started
anew each time, so that it has read nothing; the page is asked for as soon as its address is there, and is open when its first charts are
drawn.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import orjson
import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.sides import options
from evenkeel.actors.metrics.catalogue import CATALOGUE
from evenkeel.actors.record.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
_KEPT = ROOT / ".tools" / "chromium" / "run"
CHROMIUM = shutil.which("chromium") or (str(_KEPT) if _KEPT.exists() else None)
DRAWN = "() => ['What happened', 'Reward'].every((name) => typeof charts !== 'undefined' && charts.get(name)?.drawn)"
SERVE = "import sys; from evenkeel.cli import app; app(['dashboard', sys.argv[1]])"


def long_run(path: Path, steps: int, metrics: int) -> RunFolder:
    draw = random.Random(0)
    names = [name for name, metric in CATALOGUE.items() if not metric.is_family and name != "step"][: metrics - 1]
    names = ["reward/mean", *(name for name in names if name != "reward/mean")]
    folder = RunFolder.create(path, "long")
    folder.write_text("config.yaml", f"name: long\nsteps: {steps}\ncorrection: {{preset: mis-full}}\n")
    with folder.metrics_path.open("wb") as file:
        for step in range(1, steps + 1):
            file.write(orjson.dumps({"step": step} | {name: draw.random() for name in names}) + b"\n")
    return folder


def of_browser() -> float:
    """Processor time of all processes of the browser."""
    found = 0.0
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += sum(one.cpu_times()[:2]) if "chrom" in one.name() else 0.0
    return found


@contextmanager
def page_of(folder: RunFolder, browser: Browser) -> Iterator[tuple[Page, str, psutil.Process]]:
    """An empty page, the address of the run's that `evenkeel dashboard` has said, and the process that serves it."""
    with subprocess.Popen([sys.executable, "-c", SERVE, folder.path], cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            address = server.stdout.readline().rpartition(" ")[2].strip()
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            yield page, address, psutil.Process(server.pid)
            page.close()
        finally:
            server.terminate()


def opened(folder: RunFolder, browser: Browser) -> tuple[float, float, float]:
    """Seconds on the clock, and processor time of server and browser, of one opening."""
    with page_of(folder, browser) as (page, address, served):
        before = time.monotonic(), sum(served.cpu_times()[:2]), of_browser()
        page.goto(address, wait_until="commit")
        page.wait_for_function(DRAWN, timeout=120_000, polling=100)  # by default it has the browser draw for as long as it waits
        after = time.monotonic(), sum(served.cpu_times()[:2]), of_browser()
    clock, in_server, in_browser = (end - begin for begin, end in zip(before, after, strict=True))
    return clock, in_server, in_browser


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--metrics", type=int, default=190)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("no Chromium: run deploy/fetch_chromium.sh")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        folder = long_run(Path(scratch) / "long", arguments.steps, arguments.metrics)
        size = os.stat(folder.metrics_path).st_size / 1e6
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened(folder, browser)  # caches of the disk, and of what Chromium makes of scripts
        found = [opened(folder, browser) for _ in range(arguments.repeats)]
        browser.close()
    print(f"{arguments.steps:,} steps of {arguments.metrics} numbers, {size:.0f} MB; median and range of {len(found)}")
    rows = [(clock, server + browser, server, browser) for clock, server, browser in found]
    for what, seconds in zip(("on the clock", "processor time", "of the server", "of the browser"), zip(*rows, strict=True), strict=True):
        print(f"{what:>16}  {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
