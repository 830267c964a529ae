"""What ends an answer, of every family that is trained here, and that all who need to know it ask for the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenkeel.correction.errors import DataError
from evenkeel.learner.hf import families
from evenkeel.rollout.config import FileTask
from evenkeel.rollout.tasks.chat import ChatEncoder, configured_ends
from tests.rollout.family_tokenizers import CHATML, FAMILIES, Family

TASK = FileTask(path=Path("rows.jsonl"))


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatEncoder]:
    folder = tmp_path_factory.mktemp("families")
    return {name: ChatEncoder.of_folder(family.save(folder / str(i)), TASK) for i, (name, family) in enumerate(FAMILIES.items())}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_ends_at_what_tokenizer_template_and_configs_name(name: str, encoders: dict[str, ChatEncoder]) -> None:
    """The expected tokens are those of the published generation configs, and what the templates put after an answer: GLM's puts nothing,
    and its answers end where a user's or a tool's turn begins."""
    family, encoder = FAMILIES[name], encoders[name]
    assert [family.special[token] for token in encoder.ends.ids] == list(family.ends)
    assert encoder.ends.of_turn is not None and family.special[encoder.ends.of_turn] == family.of_turn


def test_every_family_is_among_them() -> None:
    assert {family.model_type for family in FAMILIES.values()} == families.FAMILIES.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_demonstration_ends_as_the_template_ends_a_turn(name: str, encoders: dict[str, ChatEncoder]) -> None:
    """Else a warm-up teaches an end that the engine doesn't stop at, or that the template never shows."""
    prompt, answer = encoders[name].encode_demonstration("1 + 2", "12")
    assert prompt == encoders[name].encode("1 + 2")
    assert FAMILIES[name].special[answer[-1]] == FAMILIES[name].of_turn and not set(answer[:-1]) & set(encoders[name].ends.ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_scorer_sees_all_that_was_said_and_not_the_end(name: str, encoders: dict[str, ChatEncoder]) -> None:
    """A special token within an answer was sampled like any other: without it a reward would see another text than the one that trains."""
    family, encoder = FAMILIES[name], encoders[name]
    said = encoder.tokenizer.encode("1 + 2 = 3", add_special_tokens=False)
    special = next(token for token in range(len(family.special)) if token not in encoder.ends.ids)
    assert encoder.text_of(said) == encoder.text_of([*said, encoder.ends.ids[-1]]) == "1 + 2 = 3"
    assert encoder.text_of([*said, special, *said]).count("1 + 2 = 3") == 2
    assert family.special[special] in encoder.text_of([*said, special]), "not the end: it was said"


def test_who_names_an_end_is_known(encoders: dict[str, ChatEncoder]) -> None:
    """A base model whose configs know nothing of the turns that its template ends."""
    ends = encoders["Qwen2.5, a base model"].ends
    assert ends.sources == {0: ("tokenizer's eos_token", "config.json", "generation_config.json"), 2: ("chat template",)}
    assert ends.unknown_to_configs == {2: ("chat template",)}
    assert encoders["Qwen3"].ends.unknown_to_configs == {}


def test_without_a_template_its_turns_end_nothing(tmp_path: Path) -> None:
    folder = FAMILIES["Qwen2.5, a base model"].save(tmp_path / "base")
    bare = ChatEncoder.of_folder(folder, TASK.model_copy(update={"apply_chat_template": False}))
    assert (bare.ends.ids, bare.ends.of_turn) == ((0,), 0)


@pytest.mark.parametrize(("content", "named"), [(3, (3,)), ([2, 0, 2], (2, 0)), (None, ()), (-1, ()), (True, ()), ("2", ())])
def test_configs_name_one_end_or_several_or_none(content: object, named: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": content}}))
    (tmp_path / "generation_config.json").write_text("{")
    assert configured_ends(tmp_path) == {"config.json": named, "generation_config.json": ()}


def test_a_model_that_names_no_end_is_refused(tmp_path: Path) -> None:
    """Every answer would be cut. A config that names one is enough."""
    folder = Family("qwen3", ("<a>", "<b>"), "<a>", "{% for m in messages %}{{ m.content }}{% endfor %}", (), "").save(tmp_path / "m")
    options = json.loads((folder / "tokenizer_config.json").read_text())
    del options["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    (folder / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 1}')
    (folder / "generation_config.json").unlink()
    assert ChatEncoder.of_folder(folder, TASK).ends.of_turn == 1
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(DataError, match=r"no eos_token, and config.json and generation_config.json name no eos_token_id"):
        ChatEncoder.of_folder(folder, TASK)


def test_a_template_that_ends_turns_with_an_ordinary_text_names_no_token() -> None:
    """Of which an engine on token ids couldn't know; the tokenizer's own is left."""
    plain = CHATML.replace("<|im_end|>", "###").replace("<|im_start|>", "@")
    encoder = ChatEncoder(Family("qwen2", ("<|endoftext|>",), "<|endoftext|>", plain, (), "").tokenizer())
    assert encoder.ends.sources == {0: ("tokenizer's eos_token",)}


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}<a>{% endfor %}",
        "Say something.<a>",
    ],
    ids=["content in parts", "constant"],
)
def test_a_template_that_leaves_out_what_is_asked_is_refused(template: str, tmp_path: Path) -> None:
    """Every prompt would be the same, and accuracy 0 with nothing said. Without a template the same tokenizer does."""
    folder = Family("qwen3", ("<a>",), "<a>", template, (), "").save(tmp_path / "m")
    with pytest.raises(DataError, match="leaves out what is asked: two questions give the same prompt"):
        ChatEncoder.of_folder(folder, TASK)
    ChatEncoder.of_folder(folder, TASK.model_copy(update={"apply_chat_template": False}))
