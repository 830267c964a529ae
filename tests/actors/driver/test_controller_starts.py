"""What the controller does before its parts are there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest import mock

import pytest

from actors.config import DeadlinesConfig
from correction.errors import DeadlineExceeded
from tests.actors.cases import prompts
from tests.actors.driver.test_controller import RecordingObserver, controller


def test_what_a_start_keeps_is_written_with_a_name_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the event loop, which has other things to do than to wait for a disk."""
    observer = RecordingObserver()
    run = controller(observer)
    monkeypatch.setattr(DeadlinesConfig, "disk_s", 0.1)
    monkeypatch.setattr("actors.driver.controller.outline_folder", lambda _: [None])
    run._task, run._folder = SimpleNamespace(held_out_prompts=lambda: prompts(0, 4)), mock.Mock()  # type: ignore[assignment]
    observer.disk.result = lambda job: asyncio.sleep(60.0)
    with pytest.raises(DeadlineExceeded, match="config and tokenizer of the model -> the run folder's disk: not done in 0 s"):
        asyncio.run(asyncio.wait_for(run._start(), 5.0))
    run._folder.keep_model_files.assert_not_called()  # type: ignore[attr-defined]
