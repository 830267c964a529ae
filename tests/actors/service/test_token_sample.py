"""The trajectories that are kept token by token are those of the batch, with what the learner and the correction made of each token."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from evenkeel.actors.carriers import MOST_TOKENS, TokenSample
from evenkeel.actors.config import MetricsConfig
from evenkeel.actors.service.token_sample import chosen_sequences
from evenkeel.correction.batch import FinalDecision
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.decision import no_counts
from evenkeel.rollout.trajectory import AnswerPlace
from tests.actors.service.service_scene import GROUPS, ServiceScene, play


def test_kept_tokens_are_those_of_whole_groups_of_the_batch_in_their_places(tmp_path: Path) -> None:
    """Token ids say where a token belongs: 100 times its group, 10 times its answer, and its place. Answers of a group are 0 and 1."""
    found: list[TokenSample] = []

    async def scenario() -> None:
        scene = ServiceScene(preset="ppo", steps=1, metrics=MetricsConfig(trajectories_per_step=2))
        for version in range(3):
            prepared = await scene.batch(version)
            batch = prepared.corrected.batch
            keep = batch.loss_mask & (batch.token_ids % 10 != 1)  # the second token of each answer is dropped
            decided = FinalDecision(keep, batch.token_ids.float(), no_counts(prepared.correction), is_clipped=batch.token_ids % 10 == 0)
            told = await scene.observe(prepared, gap=0.25, decided=decided, entropies=batch.token_ids / 8)
            assert told.tokens is not None
            told.tokens.save(tmp_path / "tokens.npz")
            found.append(TokenSample.load(tmp_path / "tokens.npz")[0])
            assert CorrectionConfig.model_validate(found[-1].correction) == prepared.correction
        scene.stop()

    play(scenario)
    for version, sample in enumerate(found):
        assert sample.version == version and len({one.group for one in sample.answers}) == 2 and len(sample.answers) == 4
        for one, (start, end) in zip(sample.answers, itertools.pairwise(sample.offsets.tolist()), strict=True):
            of = {name: values[start:end] for name, values in sample.columns.items()}
            assert version * GROUPS <= one.group < (version + 1) * GROUPS and one.question == f"question {one.group}"
            assert (one.expected, one.reward, one.finish_reason) == (f"answer {one.group}", float(one.answer), "stop")
            own = of["sampled"]
            assert of["token_ids"][~own].tolist() == [1, 2, 3], "the prompt"
            ids = of["token_ids"][own]
            assert ids.tolist() == [100 * one.group + 10 * one.answer + j for j in range(own.sum())]
            assert np.all(of["behavior"][own] == -1.0) and np.all(of["target"][own] == -0.75) and np.all(of["proximal"][own] == -0.75)
            assert np.all(of["entropy"][own] == ids / 8) and np.all(of["importance_weight"][own] == ids)
            assert np.all(of["advantage"][own] > 0) if one.answer else np.all(of["advantage"][own] < 0)
            assert np.all(of["versions"][own] <= version) and np.all(of["versions"][~own] == -1) and np.all(of["turns"] == 0)
            assert of["kept"].tolist() == (own & (of["token_ids"] % 10 != 1)).tolist()
            assert of["clipped"].tolist() == (own & (of["token_ids"] % 10 == 0)).tolist()
            assert [sample.labels[k - 1] for k in of["dropped_by"][own & ~of["kept"]]] == ["other"], "ppo has no criterion"
            assert all(np.all(np.isnan(of[name][~own])) for name in ("behavior", "proximal", "target", "entropy", "advantage"))
    assert len({tuple(sorted({one.group % GROUPS for one in sample.answers})) for sample in found}) > 1, "drawn anew each time"


def test_none_are_kept_where_none_are_wanted() -> None:
    async def scenario() -> None:
        scene = ServiceScene(steps=1, metrics=MetricsConfig(trajectories_per_step=0))
        assert (await scene.observe(await scene.batch(0))).tokens is None
        scene.stop()

    play(scenario)


@pytest.mark.parametrize(("length", "kept"), [(10, 16), (MOST_TOKENS // 3, 3), (MOST_TOKENS, 1), (10 * MOST_TOKENS, 1)])
def test_however_long_answers_are_the_kept_tokens_are_few(length: int, kept: int) -> None:
    """Eight groups of four: two whole groups would be 8 sequences, four 16."""
    places = [AnswerPlace(g, a) for g in range(8) for a in range(4)]
    chosen = chosen_sequences(places, [length] * 32, groups=4, version=3)
    assert len(chosen) == kept and chosen == sorted(set(chosen))
    assert chosen == chosen_sequences(places, [length] * 32, groups=4, version=3)


def test_a_very_long_answer_is_kept_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenkeel.actors.service import token_sample

    monkeypatch.setattr(token_sample, "MOST_TOKENS", 4)

    async def scenario() -> None:
        scene = ServiceScene(preset="ppo", steps=1)
        prepared = await scene.batch(0)
        told = (await scene.observe(prepared)).tokens
        assert told is not None and told.offsets.tolist() == [0, 4] and told.columns["token_ids"][:3].tolist() == [1, 2, 3]
        (one,) = told.answers
        (sequence,) = torch.nonzero(prepared.corrected.batch.token_ids == int(told.columns["token_ids"][3]))
        which = int((prepared.corrected.batch.offsets <= int(sequence)).sum()) - 1
        assert one.left_out_tokens == int(prepared.corrected.batch.lengths[which]) - 4 > 0
        scene.stop()

    play(scenario)


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-40], lambda content: b"", lambda content: content.replace(b"offsets", b"offsetz")]
)
def test_a_damaged_file_is_no_sample(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "tokens.npz"
    TokenSample(0, (), np.array([0]), {"token_ids": np.zeros(0, dtype=np.int32)}).save(path)
    assert TokenSample.load(path)[0].answers == ()
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(Exception, match=r".") as caught:
        TokenSample.load(path)
    assert not isinstance(caught.value, (AttributeError, AssertionError))
