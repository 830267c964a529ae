"""Data sets of the hub, against a stand-in of it on loopback, and what the doctor says of what a recipe names there."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event

import pytest

from actors.cluster.hub import pinned
from actors.doctor import hub_checks
from actors.doctor.paper_rules import train_takes_model_and_task
from actors.doctor.start_checks import check_on_paper
from actors.settings.derived import derived
from rollout.config import HuggingFaceTask
from rollout.tasks.rows import RowSource, read_dataset
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


def told(*words: str) -> list[tuple[str, str]]:
    """What the doctor says of a run on this machine that is worth more than a number."""
    config, facts = check_on_paper(derived(recipe("rollout.reward.kind=math_verify", *words), has_gpu=False))
    return [(one.severity, str(one)) for one in train_takes_model_and_task(facts, config)]


def test_the_doctor_says_what_the_hub_lacks(server: StandInHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Data set, revision, tokenizer: at each of them a start would stop. Where the hub doesn't answer in time that is a note."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    server.repositories["datasets/acme/two"] = two_subsets()
    server.repositories["models/acme/bare"] = Repository()
    server.repositories["models/acme/bare"].commit({"config.json": json.dumps(QWEN3_06B).encode()})
    named = [f"rollout.task={ {'kind': 'huggingface'} | DATA }", "model=hf:acme/bare"]
    no_tokenizer, other_name = "the folder has no tokenizer", "rollout.task.path=acme/tow"
    (found,) = told(*named)
    assert found[0] == "fail" and no_tokenizer in found[1]
    found, _ = told(*named, other_name)
    assert found[0] == "fail" and f"acme/tow: no such folder here, and {server.address} has no such data set" in found[1]
    found, _ = told(*named, "rollout.task.revision=v9")
    assert found[0] == "fail" and "acme/two: it has no revision v9" in found[1]
    (tmp_path / "home" / "datasets" / "acme___tow").mkdir(parents=True)
    (found,) = told(*named, other_name)
    assert no_tokenizer in found[1], "a run would take the copy in the cache"
    with monkeypatch.context() as away:
        away.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert [severity for severity, _ in told(*named)] == ["note", "note"]
        assert "rollout.task.path = acme/two: not looked up, as http://127.0.0.1:9 doesn't answer" in told(*named)[0][1]
    monkeypatch.setattr(hub_checks, "HUB_S", 0.01)
    for question in ("check_data_set", "outline_by_file"):  # a real one would go on after this test, and ask the real hub
        monkeypatch.setattr(hub_checks, question, lambda _: Event().wait(5.0))
    assert told(*named)[0] == ("note", "rollout.task.path = acme/two: not looked at, as the hub took more than 0.01 s")
