"""Data sets of the hub, against a stand-in of it on loopback, and what the doctor says of what a recipe names there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenkeel.actors.cluster.hub import pinned
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.errors import EvenkeelError
from evenkeel.preparation import check_inputs, outline
from evenkeel.rollout.config import HuggingFaceTask
from evenkeel.rollout.tasks.rows import RowSource, read_dataset
from tests.actors.cluster.hub_scene import offline, recipe
from tests.actors.known_models import QWEN3_06B
from tests.hub_stand_in import Repository, StandInHub


def test_a_data_set_keeps_its_commit_too(server: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "rows")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.address)
    data = server.repositories["datasets/acme/sums"] = Repository()
    data.commit({"train.jsonl": b'{"prompt": "1 + 1", "answer": "2"}\n'})
    named = {"rollout.task.kind": "huggingface", "rollout.task.path": "acme/sums", "rollout.reward.kind": "math_verify"}
    config, said = pinned(recipe(*(f"{key}={value}" for key, value in named.items())))
    data.commit({"train.jsonl": b'{"prompt": "2 + 2", "answer": "4"}\n'})
    task = config.rollout.task
    assert isinstance(task, HuggingFaceTask) and task.revision == data.commits[0][0] and task.revision in said[1]
    assert [question.text for question in read_dataset(task, "train", lambda text: None).questions] == ["1 + 1"]


DATA = {"path": "acme/two", "subset": "main", "held_out_split": "test", "prompt_field": "question"}
"""As the first recipe names its data set: one of two subsets, and a split of its own to be held out."""


def two_subsets() -> Repository:
    """A data set in GSM8K's layout: its card names two subsets of two splits, each question says where it is from."""
    files, card = {}, "---\nconfigs:\n"
    for subset in ("main", "socratic"):
        card += f"- config_name: {subset}\n  data_files:\n"
        for split in ("train", "test"):
            card += f"  - split: {split}\n    path: {subset}/{split}-*\n"
            rows = (f'{{"question": "{subset} {split} {number}", "answer": "{number}"}}\n' for number in range(2))
            files[f"{subset}/{split}-00000-of-00001.jsonl"] = "".join(rows).encode()
    repository = Repository()
    repository.commit(files | {"README.md": f"{card}---\n".encode()})
    return repository


def test_a_data_set_of_subsets_and_splits_is_read_from_the_hub_and_then_without_it(
    server: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of one subset and nothing of the other; training and held-out questions from the splits that are named."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "rows")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.address)
    server.repositories["datasets/acme/two"] = two_subsets()
    task = pinned(recipe("rollout.reward.kind=math_verify", f"rollout.task={ {'kind': 'huggingface'} | DATA }"))[0].rollout.task
    assert isinstance(task, HuggingFaceTask)
    for is_offline in (False, True):
        if is_offline:
            offline(monkeypatch)
            monkeypatch.setattr(server, "requests", [])
        source = RowSource(task, lambda _: None)
        assert sorted(source.train_question(i).text for i in range(source.questions_per_epoch)) == ["main train 0", "main train 1"]
        assert [question.text for question in source.held_out] == ["main test 0", "main test 1"]
    assert server.requests == [], "the second time"


def test_the_doctor_says_what_the_hub_lacks(server: StandInHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokenizer, data set, revision, column: at each of them a start would stop, and says the same."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "rows")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.address)
    server.repositories["datasets/acme/two"] = two_subsets()
    server.repositories["models/acme/bare"] = Repository()
    server.repositories["models/acme/bare"].commit({"config.json": json.dumps(QWEN3_06B).encode()})
    for wrong, said in (
        ({}, []),
        ({"path": "acme/tow"}, ["rollout.task.path = acme/tow (split train): datasets can't load it"]),
        ({"revision": "v9"}, ["rollout.task.path = acme/two (split train): datasets can't load it"]),
        ({"prompt_field": "text"}, ["acme/two [train]: none of its 2 rows can be used"]),
    ):
        words = [f"rollout.task={ {'kind': 'huggingface'} | DATA | wrong }", "rollout.reward.kind=math_verify", "model=hf:acme/bare"]
        config = with_devices(recipe(*words), has_gpu=False)
        lacking: list[EvenkeelError] = []
        check_inputs(config, outline(config)[0], lacking=lacking)
        for one, text in zip(lacking, ["the folder has no tokenizer", *said], strict=True):
            assert text in str(one)
