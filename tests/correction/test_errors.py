"""What errors carry in addition to their message, and that they carry it to another process."""

from __future__ import annotations

import pickle
import signal

import pytest

from evenkeel.correction.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EngineError,
    EvenkeelError,
    LateError,
    one_line,
    signal_name,
)


@pytest.mark.parametrize("kind", [ConfigError, DataError, EngineError, LateError])
@pytest.mark.parametrize(("remedy", "end"), [("", ""), ("lower it", "; lower it"), ("Set b", ". Set b")])
def test_a_message_ends_with_its_remedy_and_both_cross_processes(kind: type[EvenkeelError], remedy: str, end: str) -> None:
    reason = "a = 3: too large (b; c. D)"
    error = kind(reason, remedy=remedy)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (type(one), str(one), one.reason, one.remedy) == (kind, reason + end, reason, remedy)


def test_a_deadline_has_its_wait_and_its_setting_apart() -> None:
    error = DeadlineExceeded("weight group w-0-1: not done in 40 s", what="weight group w-0-1", seconds=40.5, setting="deadlines")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert str(one) == "weight group w-0-1: not done in 40 s; the deadline is set under deadlines"
        assert (one.reason, one.what, one.seconds) == ("weight group w-0-1: not done in 40 s", "weight group w-0-1", 40.5)
    assert str(DeadlineExceeded("no answer in 600 s")) == DeadlineExceeded("no answer in 600 s").reason == "no answer in 600 s"


def test_every_signal_has_a_name() -> None:
    """Python has none for most real-time signals."""
    assert [signal_name(number) for number in (9, 11, 40)] == ["SIGKILL", "SIGSEGV", "SIG40"]
    assert all(signal_name(number) for number in range(1, signal.NSIG))


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("a = 3", "a = 3", "a = 3"),
        ("\n  a = 3  \nTraceback\n  b = 4\n\n", "a = 3  ", "  b = 4"),
        ("", "OSError", "OSError"),
        (" \n", "OSError", "OSError"),
    ],
)
def test_an_error_in_one_line(text: str, first: str, last: str) -> None:
    error = OSError(text)
    assert (one_line(error), one_line(error, last=True)) == (first, last)
    named = ["OSError" if line == "OSError" else f"OSError: {line}" for line in (first, last)]
    assert [one_line(error, named=True), one_line(error, last=True, named=True)] == named
