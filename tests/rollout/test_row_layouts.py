"""Rows as the data sets of the GPU recipes have them: DAPO-Math-17k with turns and nested answers, GSM8K with worked ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from evenkeel.actors.config import RunConfig
from evenkeel.correction.errors import DataError
from evenkeel.recipe import load_config
from evenkeel.rollout.config import FileTask, RolloutConfig
from evenkeel.rollout.tasks.chat import ChatEncoder, load_tokenizer
from evenkeel.rollout.tasks.rows import _field, read_file, with_field
from evenkeel.rollout.tasks.tasks import build_task
from tests.rollout.family_tokenizers import FAMILIES
from tests.rollout.reward_scene import asked, scored

RECIPES = Path(__file__).parents[2] / "recipes"


def dapo(problem: str, answer: str) -> dict[str, Any]:
    """With the columns and the instruction of BytedTsinghua-SIA/DAPO-Math-17k."""
    text = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without "
        f'quotes) where $Answer is the answer to the problem.\n\n{problem}\n\nRemember to put your answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": problem},
    }


def gsm8k(question: str, last: str) -> dict[str, Any]:
    """With the columns of openai/gsm8k."""
    return {"question": question, "answer": f"She has 48/2 = <<48/2=24>>24 of them.\n#### {last}"}


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def of_recipe(name: str, path: Path) -> RolloutConfig:
    """Its task on a file here, and its reward."""
    rollout = load_config(RunConfig, RECIPES / f"{name}.yaml", []).rollout
    told = rollout.task.model_dump(include={"prompt_field", "answer_field", "prompt_template", "distinct", "chat_template_kwargs"})
    return rollout.model_copy(update={"task": FileTask(path=path, held_out_size=1, shuffle=False, **told)})


@pytest.mark.parametrize("name", ["qwen3_8b_8gpu", "qwen3_30b_a3b_4nodes"])
def test_the_recipes_read_dapo_math_as_it_is(name: str, tmp_path: Path, tiny_model: Path) -> None:
    """The whole file repeats each question a hundred times."""
    rows = [dapo(f"What is {i} + {i}?", str(2 * i)) for i in range(20)] * 3
    rollout = of_recipe(name, parquet(tmp_path / "rows.parquet", rows))
    tokenizer = load_tokenizer(tiny_model)
    task = build_task(rollout.task, ChatEncoder.for_task(tokenizer, rollout.task))
    report = task.check()
    assert (report.held_out, report.train_questions, report.train_checked, report.skipped) == (1, 19, 19, ())
    prompt = task.train_prompt(0)
    assert prompt.answer == str(2 * int(prompt.metadata["extra_info"]["index"].split()[2]))
    rendered = f"<|im_start|>user\n{rows[0]['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n".replace("0 + 0", "{0} + {0}")
    number = prompt.metadata["extra_info"]["index"].split()[2]
    assert tokenizer.decode(list(prompt.token_ids)) == rendered.replace("{0}", number), "the turn as it is, through the template"


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("qwen3_8b_8gpu", dapo("What is 17 + 17?", "34"), "17 and 17.\n\nAnswer: $34$", "Answer: 17 at first.\nAnswer: 35"),
        ("qwen3_8b_8gpu", dapo("Which?", "34"), "so \\boxed{3}. Answer: \\boxed{34}", "34"),
        ("qwen3_0.6b_1gpu", gsm8k("How many?", "1,072"), "\\boxed{1072}", "\\boxed{24}"),
    ],
)
def test_answers_to_true_rows_are_scored(name: str, row: dict[str, Any], right: str, wrong: str, tmp_path: Path) -> None:
    rollout = of_recipe(name, parquet(tmp_path / "rows.parquet", [row]))
    assert isinstance(rollout.task, FileTask)
    (question,) = read_file(rollout.task.path, rollout.task, lambda _: None).questions
    patient = rollout.reward.model_copy(update={"deadline_s": 60.0, "processes": 1})  # each takes a second to import sympy
    found = scored(patient, right, wrong, prompt=asked(question.answer))
    assert [one.reward for one in found] == [1.0, 0.0], found


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3 more?"},
]


def test_a_conversation_goes_through_the_chat_template_as_it_is(tmp_path: Path, tiny_model: Path) -> None:
    """Its own system turn stays; the task's template is round the last turn; two that end alike are two questions."""
    other = [CONVERSATION[0], {"role": "user", "content": "5 + 5?"}, {"role": "assistant", "content": "10"}, CONVERSATION[3]]
    path = tmp_path / "rows.jsonl"
    rows = ((CONVERSATION, 7), (other, 13), (other, 13))
    path.write_text("".join(json.dumps({"messages": turns, "answer": answer}) + "\n" for turns, answer in rows))
    around = {"prompt_template": "{question} Say it.", "system_prompt": "Another."}
    config = FileTask(path=path, prompt_field="messages", held_out_size=1, distinct=True, **around)
    tokenizer = load_tokenizer(tiny_model)
    task = build_task(config, ChatEncoder.for_task(tokenizer, config))
    assert task.check().train_questions == 1 and len(task.held_out_prompts()) == 1
    prompts = {prompt.answer: prompt for prompt in (task.train_prompt(0), *task.held_out_prompts())}
    rendered = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in CONVERSATION)
    rendered = rendered.replace("and 3 more?", "and 3 more? Say it.") + "<|im_start|>assistant\n"
    assert tokenizer.decode(list(prompts["7"].token_ids)) == rendered
    assert task.train_row(0)["messages"] in (CONVERSATION, other), "`evenkeel filter` writes what it has read"


def test_all_parts_of_a_turn_reach_the_template(tmp_path: Path) -> None:
    """Thoughts and calls of tools, as Qwen3's template writes them. A table has each part in all turns, null where there is none: a
    template that asks whether a turn has it would find it. Two conversations that differ in a call alone are two questions."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": a}}} for a in (1, 2)]

    def turns(call: dict[str, Any]) -> list[dict[str, Any]]:
        parts = dict.fromkeys(("content", "reasoning_content", "tool_calls", "name"))
        called = {"role": "assistant", "reasoning_content": "add them", "tool_calls": [call]}
        got = {"role": "tool", "content": "3", "name": "add"}
        asked = [{"role": "user", "content": text} for text in ("1 + 2?", "and 3 more?")]
        return [parts | turn for turn in (asked[0], called, got, asked[1])]

    rows = [{"messages": turns(call), "answer": str(i)} for i, call in enumerate(calls)]
    config = FileTask(path=parquet(tmp_path / "rows.parquet", rows), prompt_field="messages", held_out_size=1, distinct=True)
    tokenizer = FAMILIES["Qwen3"].tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("loop.last", "m.name is not defined")  # also of earlier turns
    task = build_task(config, ChatEncoder.for_task(tokenizer, config))
    (held_out,), prompt = task.held_out_prompts(), task.train_prompt(0)
    texts = {one.answer: tokenizer.decode(list(one.token_ids)) for one in (held_out, prompt)}
    assert texts.keys() == {"0", "1"}
    for number, text in texts.items():
        call = json.dumps(calls[int(number)]["function"])
        assert f"<think>\nadd them\n</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>\n" in text
        assert "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n" in text
    assert [set(turn) for turn in task.train_row(0)["messages"]][1] == {"role", "content", "reasoning_content", "tool_calls"}


def test_a_row_keeps_its_nested_answer_when_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [dapo("a?", "1"), dapo("b?", "2")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = build_task(FileTask(path=path, answer_field="reward_model.ground_truth", held_out_size=1))
    (row,) = [row for row in rows if row["extra_info"] == task.train_row(0)["extra_info"]]
    assert task.train_row(0) == row | {"prompt": row["prompt"][0]["content"]}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("q", {"q": "old", "x": 1}),
        ("m.a.b", {"m": {"a": {"b": "old", "c": 1}, "a.b": "another's"}}),
        ("m.a.b", {"m.a.b": "old", "m": {"c": 1}}),
        ("m.q", {"m.q": "old", "m": "a text"}),
        ("m.q", {"m.q": "old", "m": {"c": 1}}),
    ],
)
def test_a_field_is_written_where_it_was_read(name: str, row: dict[str, Any]) -> None:
    """A row without the columns that were used, as a question keeps it, gets its value back: the same row, from which the same is read."""
    kept = {column: value for column, value in row.items() if column != name}
    assert with_field(kept, name, "old") == row
    assert _field(with_field(kept, name, "new"), name) == "new"


def test_a_warm_up_teaches_the_prompt_that_is_asked(tmp_path: Path, tiny_model: Path) -> None:
    """Turns and all: a demonstration's ids are those of the training prompt of the same question."""
    path = tmp_path / "rows.jsonl"
    other = [CONVERSATION[0], {"role": "user", "content": "alone"}]
    path.write_text("".join(json.dumps({"messages": turns, "answer": "7"}) + "\n" for turns in (CONVERSATION, other, "plain")))
    config = FileTask(path=path, prompt_field="messages", held_out_size=1, prompt_template="{question} Say it.")
    encoder = ChatEncoder.for_task(load_tokenizer(tiny_model), config)
    task = build_task(config, encoder)
    shown = task.demonstrations(2)
    taught = {encoder.encode_demonstration(one.prompt, one.answer)[0] for one in shown}
    assert taught == {task.train_prompt(position).token_ids for position in range(2)} and len(taught) == 2
    assert all(one.prompt_text.endswith(" Say it.") for one in shown)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "is list, neither text nor a list of turns"),
        ([{"role": "user", "content": [{"type": "image"}]}], "with role and content as text"),
        ([{"role": "user"}], "with role and content as text"),
        ([{"role": "assistant", "content": None}, {"role": "user", "content": "a"}], "with role and content as text"),
        ([{"role": "user", "content": None, "tool_calls": []}], "ends with a turn of user, not with a question"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "ends with a turn of assistant"),
    ],
)
def test_turns_that_can_t_be_asked_are_skipped_with_the_reason(prompt: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": one, "reward_model": {"ground_truth": "1"}}) + "\n" for one in (prompt, "fine")))
    read = read_file(path, FileTask(path=path, answer_field="reward_model.ground_truth"), lambda _: None)
    assert [question.text for question in read.questions] == ["fine"] and reason in read.skipped[0].reason


def test_a_field_that_is_not_there_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "reward_model": {"style": "rule"}}\n')
    with pytest.raises(DataError, match=r'no field "reward_model.ground_truth" \(it has prompt, reward_model\)'):
        read_file(path, FileTask(path=path, answer_field="reward_model.ground_truth"), lambda _: None)


def test_a_conversation_needs_the_chat_template(tiny_model: Path) -> None:
    with pytest.raises(DataError, match="a conversation of 4 turns needs the chat template"):
        ChatEncoder(load_tokenizer(tiny_model), apply_chat_template=False).encode(CONVERSATION)


TOOL = [{"role": "tool", "content": "{}"}, {"role": "user", "content": "and now?"}]


@pytest.mark.parametrize("limit", [None, 256])
def test_turns_that_the_chat_template_refuses_are_one_bad_row(limit: int | None, tmp_path: Path, tiny_model: Path) -> None:
    """Raised as jinja2's own error, one row of a file ended the start."""
    tokenizer, path = load_tokenizer(tiny_model), tmp_path / "rows.jsonl"
    refuses = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    tokenizer.chat_template = refuses + tokenizer.chat_template
    rows = [{"prompt": turns, "answer": "7"} for turns in (CONVERSATION, TOOL, "one", "two")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = ChatEncoder(tokenizer, max_prompt_tokens=limit)
    task = build_task(FileTask(path=path, held_out_size=1), encoder)
    (skipped,) = task.check().skipped
    assert skipped.place == f"{path}:2"
    assert skipped.reason == "the model's chat template refuses its turns, of tool, user (TemplateError: no tools here)"
    path.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(DataError, match=r"none of its 1 rows can be used; the first: .*:1: the model's .* Take turns that the model's"):
        build_task(FileTask(path=path), encoder)
