"""A server over run folders and a real Chromium that looks at it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn
from playwright import sync_api as playwright

from evenkeel.dashboard.open_run import OpenRun
from evenkeel.dashboard.server import application

ROOT = Path(__file__).parents[3]
_KEPT = ROOT / ".tools" / "chromium" / "run"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or (str(_KEPT) if _KEPT.exists() else None)
TOKEN = "a-token-of-the-test"
PATIENCE_MS = 120_000
"""How long a browser has for anything, on a machine that others use, too."""
# The server of a test ends before its page, which asks it every two seconds for news: that this is refused, cut or unanswered is no fault
# of the page.
_GONE = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The address of a page over these runs, without its token."""
    app = application([OpenRun(folder) for folder in folders], TOKEN)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[playwright.Browser]:
    """Of one module: while it is open an event loop runs in this thread, where other tests start theirs. Its folder for temporary files is
    its own: an engine of this process has set TMPDIR, and may be gone."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: run deploy/fetch_chromium.sh (Debian's package)")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(tmp_path_factory.mktemp("browser")))
        with playwright.sync_playwright() as driver:
            found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE_MS)
            yield found
            found.close()


@dataclass
class Seen:
    """A page, and what a browser complains of."""

    page: playwright.Page
    complaints: list[str] = field(default_factory=list)

    def view(self, place: str, ready: str) -> None:
        """Go to a view, such as "tokens?step=2", and wait for what this selector names: in this view, not in the one that was left."""
        mark = "const before = location.href; for (const one of document.querySelector('#view').children) one.dataset.left = ''"
        if self.page.evaluate(f"place => {{ {mark}; location.hash = place; return location.href !== before }}", place):
            self.page.wait_for_function("() => !document.querySelector('#view > [data-left]')")
        self.page.wait_for_selector(ready)

    def points(self, chart: str, series: int) -> list[list[float]]:
        """What a chart draws of one of its series, once one has come to it: its data as the library has it."""
        self.page.wait_for_function("name => { charts.get(name)?.box.scrollIntoView(); return charts.has(name) }", arg=chart)
        find = "([name, i]) => { const o = charts.get(name)?.drawn?.getOption(); return o && o.series[i] ? o.series[i].data : null }"
        self.page.wait_for_function(find, arg=[chart, series], polling=100)  # not at each frame: it copies the whole chart
        found: list[list[float]] = self.page.evaluate(find, [chart, series])
        return found


@pytest.fixture(scope="module")
def free(browser: playwright.Browser) -> list[Seen]:
    """Pages that no test looks at now. One that has drawn before opens the next address in a fraction of a new one's time."""
    return []


@pytest.fixture
def look(browser: playwright.Browser, free: list[Seen]) -> Iterator[Callable[..., Seen]]:
    """Opens a page at a view; at the end no page may have had an error on its console, nor have been wider than its window."""
    opened: list[Seen] = []

    def new_page() -> Seen:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        seen = Seen(page)
        page.on("console", lambda said: seen.complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        return seen

    def open_page(
        address: str,
        place: str = "",
        ready: str = "nav a",
        *,
        width: int = 1280,
        height: int = 900,
        before: Callable[[playwright.Page], object] = lambda page: None,
    ) -> Seen:
        """Args: place: of a view, such as "tokens?step=2". ready: a selector of what is waited for."""
        seen = free.pop() if free else new_page()
        seen.page.set_viewport_size({"width": width, "height": height})
        seen.page.mouse.move(0, 0)
        before(seen.page)
        seen.page.goto(f"{address}/?token={TOKEN}" + (f"#{place}" if place else ""))
        seen.page.wait_for_selector(ready)
        opened.append(seen)
        return seen

    yield open_page
    for seen in opened:
        assert seen.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), "it is wider than its window"
        seen.page.goto("about:blank")
        complaints = [one for one in seen.complaints if not any(gone in one for gone in _GONE)]
        seen.complaints.clear()
        free.append(seen)
        assert complaints == []
