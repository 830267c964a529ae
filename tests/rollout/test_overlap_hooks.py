"""An update in place under SGLang's overlap schedule: the step under way ends first, and its tokens count as the old weights'.

With a real engine: tests/e2e/test_overlapped_updates.py.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel.rollout.sglang_plugin import hooks


def request(tokens: int, *, finished: bool = False, retracted: bool = False, chunks: int = 0) -> Any:
    """One that has so many tokens. Args: chunks: of its prompt, under way without being the last."""
    state: dict[str, Any] = {"is_retracted": retracted, "inflight_middle_chunks": chunks, "weight_version_events": []}
    return SimpleNamespace(output_ids=[7] * tokens, finished=lambda: finished, **state)


def spans(of: Any, tokens: int) -> list[tuple[str, int, int]]:
    """What SGLang answers when the request has so many tokens at version 2."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    return [(span.version, span.start, span.end) for span in compute_weight_version_spans(of.weight_version_events, "2", tokens)]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    from sglang.srt import runtime_context

    state = SimpleNamespace(weight_version="1")
    monkeypatch.setattr(runtime_context, "get_serving", lambda: state)
    return state


def change(serving: Any, scheduler: Any, live: list[Any], version: str | None) -> None:
    """As SGLang's record_weight_version_change, hooked."""
    from sglang.srt.utils.weight_versions import record_weight_version_events

    def original(_: Any, new_version: str | None) -> None:
        if new_version is not None and new_version != serving.weight_version:
            record_weight_version_events(live, old_version=serving.weight_version)
            serving.weight_version = new_version

    hooks._count_what_is_on_its_way(original, scheduler, new_version=version)


def test_tokens_of_the_step_under_way_are_of_the_weights_that_sampled_them(serving: Any) -> None:
    decoding, prefilled, ended, begun, waiting = request(3), request(0), request(3, finished=True), request(0, chunks=1), request(2)
    under_way = SimpleNamespace(reqs=[decoding, prefilled, ended, begun])
    scheduler = SimpleNamespace(result_queue=deque([(under_way, None)]))
    change(serving, scheduler, [*under_way.reqs, waiting], "2")
    assert spans(decoding, 6) == [("1", 0, 4), ("2", 4, 6)]
    assert spans(decoding, 4) == [("1", 0, 4)], "the token under way was its last"
    assert spans(prefilled, 5) == [("1", 0, 1), ("2", 1, 5)]
    assert spans(ended, 3) == [("1", 0, 3)]
    assert spans(begun, 5) == [("2", 0, 5)]
    assert spans(waiting, 4) == [("1", 0, 2), ("2", 2, 4)]


def test_a_bucket_without_a_version_and_a_loop_without_overlap_change_nothing(serving: Any) -> None:
    decoding = request(3)
    change(serving, SimpleNamespace(result_queue=deque([(SimpleNamespace(reqs=[decoding]), None)])), [decoding], None)
    assert decoding.weight_version_events == []
    change(serving, SimpleNamespace(), [decoding], "2")
    assert spans(decoding, 6) == [("1", 0, 3), ("2", 3, 6)]


def test_weights_are_not_copied_while_the_gpu_computes_with_them() -> None:
    waited: list[str] = []
    hooks._end_the_step_under_way(None, SimpleNamespace(device_module=SimpleNamespace(synchronize=lambda: waited.append("device"))))
    assert waited == ["device"]
