"""What the controller does before its parts are there."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from evenkeel.actors.config import DeadlinesConfig
from evenkeel.actors.record.disk_writer import DiskWriter
from evenkeel.correction.errors import DeadlineExceeded
from tests.actors.cases import prompts
from tests.actors.driver.controller_cases import EventsRecorder, controller


def test_what_a_start_keeps_is_written_with_a_name_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the event loop, which has other things to do than to wait for a disk: this one hangs for as long as the test."""
    recorder = EventsRecorder()
    run = controller(recorder)
    monkeypatch.setattr(DeadlinesConfig, "disk_s", 0.1)
    monkeypatch.setattr("evenkeel.actors.driver.controller.outline_folder", lambda _: [None])
    is_over, recorder.disk = threading.Event(), DiskWriter(lambda _: None)  # type: ignore[assignment]
    run._task = SimpleNamespace(held_out_prompts=lambda: prompts(0, 4))  # type: ignore[assignment]
    run._folder = SimpleNamespace(keep_model_files=lambda _: is_over.wait(20.0))  # type: ignore[assignment]
    with pytest.raises(DeadlineExceeded, match="config and tokenizer of the model -> the run folder's disk: not done in 0 s"):
        asyncio.run(asyncio.wait_for(run._start(), 5.0))
    is_over.set()
    assert recorder.disk.close(within_s=60.0) == ""  # type: ignore[attr-defined]
