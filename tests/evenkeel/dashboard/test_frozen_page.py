"""The report in a real Chromium, opened as a file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from evenkeel.dashboard.frozen import write_report
from tests.evenkeel.dashboard.conftest import PATIENCE_MS, Seen
from tests.evenkeel.dashboard.made_runs import PIECES, made, reward, with_tokens


def test_the_frozen_page_shows_every_view_and_fetches_nothing(tmp_path: Path, browser: Any) -> None:
    """Opened as a file, with what a model shouldn't have written in it: its data can't end the element that holds it."""
    with made(tmp_path) as folder:
        path = shutil.copy(write_report(with_tokens(folder, 3, 7, 11, 40)), tmp_path / "alone.html")
        shutil.rmtree(folder.path / "tokens")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    seen, asked = Seen(page), list[str]()
    page.on("console", lambda said: seen.complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{path}")
    assert seen.points("Reward", 0) == [[step, pytest.approx(reward(step))] for step in range(1, 41)]
    assert page.inner_text("#live").startswith("written 20") and "taken" not in page.title()
    seen.view("pool", "#book")
    assert page.locator("#book b").all_inner_texts() == ["164", "160", "1", "3", "balanced"]
    seen.view("correction", "#bounds")
    seen.view("timeline", "main p")
    seen.view("tokens?step=11", ".tokens .t")
    assert page.locator("#choose-step option").all_inner_texts() == ["the newest", "40", "11", "3"], "the first, the middle, the last"
    assert page.locator(".tokens").nth(0).locator(".t").nth(1).text_content() == PIECES[1]
    seen.view("tokens?kind=held_out", ".tokens .t")
    seen.view("tokens?step=7", ".refusal")
    assert "evenkeel dashboard shows all of the run" in page.inner_text(".refusal")
    assert seen.complaints == [] and asked == [f"file://{path}"]
    page.close()
