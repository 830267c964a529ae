"""Nobody writes to a batch, or to logprobs, that another process has handed over: in Ray's object store that would end the process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from evenkeel.correction.presets.methods import PRESETS
from tests.actors.read_only_paths import play_into
from tests.learner.learner_cases import rank_context, save_model
from tests.learner.moe_cases import save_moe


@dataclass(frozen=True)
class Played:
    exit_code: int | None
    said: list[str]
    """Lines of its standard output."""
    complained: str


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """In a process of its own, which a write ends; forked from where the learner's ranks are, it has imported Megatron."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "dense")
    save_moe(folder / "moe")
    out, complaints = folder / "out", folder / "complaints"
    process = rank_context().Process(target=play_into, args=(folder, out, complaints))
    process.start()
    process.join(500.0)
    code = process.exitcode
    process.kill()
    return Played(code, out.read_text().splitlines(), complaints.read_text())


def test_a_write_would_be_seen(played: Played) -> None:
    assert played.said[0] == "a write: SIGSEGV"


def test_service_and_learner_only_read_what_they_are_given(played: Played) -> None:
    """With every preset, with and without a forward of its own: from the queue to the diagnosis, and through a real learner's steps."""
    assert played.exit_code == 0, "\n".join(played.said[-20:]) + played.complained[-4000:]
    assert played.said[1:] == ["asked", *(f"{preset} {steps}" for steps in (1, 2) for preset in PRESETS)]
