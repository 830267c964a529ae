"""Trajectories token by token, in the run folder: beside what the driver knows of all groups, of evaluations too, and not without end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evenkeel.actors.carriers import ShownAnswer, TokenSample
from evenkeel.actors.driver.evaluation import evaluate
from evenkeel.actors.record import kept_tokens
from evenkeel.actors.record.kept_tokens import MOST_HELD_OUT, held_out_tokens
from evenkeel.actors.record.run_folder import KEPT_TOKENS, RunFolder
from evenkeel.correction.early_warning.monitor import State
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.trajectory import FailureKind, LaterReading, Trajectory, VersionSpan, ids_of, logprobs_of
from tests.actors.cases import facts, prompts, trajectory
from tests.actors.driver.test_evaluation import Answers
from tests.actors.record.recorder_cases import Seen, batch_of, diagnosed, end_step
from tests.actors.record.recorder_cases import seen as seen

ANSWER = ShownAnswer(1, 0, "train/0/1", "what?", "that", 1.0, {"format": 0.5}, "stop", None)


def test_a_step_s_tokens_stand_beside_all_groups_of_its_batch(seen: Seen) -> None:
    told = TokenSample(3, (ANSWER,), np.array([0, 2]), {"token_ids": np.array([7, 8], dtype=np.int32)}, ("veto",))
    groups = (facts(1, 5, 7), replace(facts(2, 9, 9, failures=[(FailureKind.REWARD, "no")]), prompt_id="train/0/2", admitted_version=4))

    async def scenario() -> None:
        observed = asyncio.get_running_loop().create_future()
        observed.set_result(replace(diagnosed(state=State.OK), tokens=told))
        end_step(seen.recorder, 6, observed, batch=batch_of(*groups))
        await seen.recorder.flush()

    asyncio.run(scenario())
    assert seen.folder.token_steps() == [6] and seen.folder.token_steps("held_out") == []
    sample, rows = TokenSample.load(seen.folder.tokens_path(6))
    assert (sample.version, sample.answers, sample.labels) == (3, (ANSWER,), ("veto",))
    assert sample.columns["token_ids"].tolist() == [7, 8]
    assert [(row["group"], row["rewards"], row["tokens"], row["failed"]) for row in rows] == [
        (1, [1.0, 1.0], [5, 7], 0),
        (2, [None, 1.0], [9, 9], 1),
    ]
    assert (rows[1]["prompt_id"], rows[1]["admitted_version"]) == ("train/0/2", 4)


def test_an_evaluation_s_first_answers_are_kept_with_what_was_read_between_turns(seen: Seen) -> None:
    """Two turns: the prompt 1 2 3, sampled 7, read 20 21, sampled 8 9, the last by newer weights."""
    asked = prompts(0, MOST_HELD_OUT + 5)
    (first, *rest) = asked
    two_turns = Trajectory(
        prompt_id=first.prompt_id,
        prompt_ids=ids_of(first.token_ids),
        response_ids=ids_of([7, 8, 9]),
        behavior_logprobs=logprobs_of([-0.5, -0.25, -0.125]),
        version_spans=(VersionSpan(2, 0, 2), VersionSpan(3, 2, 3)),
        later=(LaterReading(1, ids_of([20, 21])),),
        finish_reason=trajectory(first).finish_reason,
        reward=0.5,
    )

    class Told(Answers):
        async def answer(self, *_: object) -> list[tuple[Trajectory, ...]]:
            return [(two_turns,), *((trajectory(one, version=2),) for one in rest)]

    how = AnswerSampling(samples=1, temperature=0.7)
    seen.recorder.evaluated(asyncio.run(evaluate(Told([None]), asked, how, step=7, correct_at={"": 1.0})), asked)
    seen.settle()
    sample, rows = TokenSample.load(seen.folder.tokens_path(7, "held_out"))
    assert (sample.version, len(sample.answers), rows) == (3, MOST_HELD_OUT, [])
    assert (sample.answers[0].question, sample.answers[0].expected, sample.answers[0].reward) == ("question 0", "answer 0", 0.5)
    whole = slice(0, sample.offsets[1])
    of = {name: values[whole].tolist() for name, values in sample.columns.items()}
    assert of["token_ids"] == [1, 2, 3, 7, 20, 21, 8, 9] and of["turns"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert of["sampled"] == [False] * 3 + [True, False, False, True, True]
    assert of["versions"] == [-1, -1, -1, 2, -1, -1, 2, 3]
    assert np.nan_to_num(sample.columns["behavior"][whole], nan=9.0).tolist() == [9.0, 9.0, 9.0, -0.5, 9.0, 9.0, -0.25, -0.125]


def test_an_evaluation_s_kept_tokens_are_as_few_as_a_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 answers of a hundred thousand tokens each would be in the run folder, and in the report, of each evaluation."""
    monkeypatch.setattr(kept_tokens, "MOST_TOKENS", 12)
    asked = prompts(0, 5)  # of 3 tokens each

    def kept(*lengths: int) -> tuple[list[int], list[int]]:
        class Told(Answers):
            async def answer(self, *_: object) -> list[tuple[Trajectory, ...]]:
                return [(trajectory(one, range(n), version=2),) for one, n in zip(asked, lengths, strict=True)]

        how = AnswerSampling(samples=1, temperature=0.7)
        result = asyncio.run(evaluate(Told([None]), asked, how, step=7, correct_at={"": 1.0}))
        found = held_out_tokens(result, asked)
        assert {len(column) for column in found.columns.values()} == {found.offsets[-1]}
        return np.diff(found.offsets).tolist(), [one.left_out_tokens for one in found.answers]

    read = len(asked[0].token_ids)
    assert kept(2, 2, 2, 2, 2) == ([read + 2] * (12 // (read + 2)), [0] * (12 // (read + 2)))
    assert kept(20, 1, 1, 1, 1) == ([12], [read + 20 - 12]), "a very long one is cut"


def test_evaluations_at_any_distance_are_bounded(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "x") as folder:
        for step in range(0, 631, 30):
            folder.write_tokens(step, lambda path: path.write_bytes(b""), "held_out")
        assert folder.token_steps("held_out") == [0, 150, 300, *range(450, 631, 30)]


def test_kept_tokens_are_bounded(tmp_path: Path) -> None:
    """All of the newest steps, and each fiftieth of those before."""
    with RunFolder.create(tmp_path / "run", "x") as folder:
        for step in range(1, 451):
            folder.write_tokens(step, lambda path: path.write_bytes(b""))
        assert folder.token_steps() == [50, 100, 150, 200, 250, *range(451 - KEPT_TOKENS, 451)]
        (folder.path / "tokens" / "step_x.npz").write_bytes(b"")
        assert len(folder.token_steps()) == 5 + KEPT_TOKENS
