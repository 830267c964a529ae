"""Tasks: the split by text, the training stream as a function of position, bad rows, and what is said about mistakes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.rollout.config import FileTask, HuggingFaceTask, ReasoningGymTask
from evenkeel.rollout.prompt_place import PromptPlace
from evenkeel.rollout.rewards.reward_process import as_json, create_reasoning_gym, from_json
from evenkeel.rollout.tasks.chat import ChatEncoder, load_tokenizer
from evenkeel.rollout.tasks.questions import hash_share, text_key
from evenkeel.rollout.tasks.tasks import build_task
from evenkeel.rollout.trajectory import Demonstration
from tests.rollout.row_files import numbered, write_rows

TWO_TERMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def chain_sum(**settings: Any) -> ReasoningGymTask:
    return ReasoningGymTask(**{"dataset": "chain_sum", "options": TWO_TERMS, "held_out_size": 50, **settings})


# --- the split ------------------------------------------------------------------------------------------------------


def test_the_hash_is_uniform_over_texts_and_blind_to_blanks() -> None:
    """10,000 uniform numbers: the count below 0.1 has mean 1000 and standard deviation 30."""
    shares = [hash_share(f"question {i}") for i in range(10_000)]
    assert abs(sum(share < 0.1 for share in shares) - 1000) < 5 * 30
    assert hash_share("1  + 2\n") == hash_share("1 + 2")


def test_training_held_out_and_demonstrations_share_no_text_whatever_the_seed() -> None:
    held_out = {text_key(p.text) for p in build_task(chain_sum()).held_out_prompts()}
    other_seed = build_task(chain_sum(seed=99))
    train = {text_key(other_seed.train_prompt(i).text) for i in range(2000)}
    demonstrated = {text_key(d.question) for d in other_seed.demonstrations(500)}
    assert len(held_out) == 50
    assert not held_out & train and not held_out & demonstrated
    # the same questions come up on the training side once the split is turned off
    unsplit = build_task(chain_sum(seed=99, held_out_fraction=1e-9))
    assert held_out & {text_key(unsplit.train_prompt(i).text) for i in range(2000)}


def test_the_check_finds_a_demonstration_that_is_held_out() -> None:
    task = build_task(chain_sum())
    leaked = Demonstration(task.held_out_prompts()[3].text + " ", "", "0")
    with pytest.raises(DataError, match="1 held-out questions are also in the warm-up demonstrations"):
        task.check(demonstrations=[*task.demonstrations(5), leaked])


def test_the_check_finds_a_question_that_another_task_of_the_run_holds_out() -> None:
    """Each splits by its own fraction: what one trains on, the other may keep for its accuracy."""
    own, other = build_task(chain_sum(seed=99)), build_task(chain_sum(held_out_fraction=0.5))
    own.check(train_positions=2000, others={"alike": build_task(chain_sum(seed=98))})
    with pytest.raises(DataError, match=r"\(task sums\): \d+ held-out questions are also in the training stream of"):
        own.check(train_positions=2000, others={"sums": other})


def test_the_report_counts_and_warns_when_there_are_too_few_questions() -> None:
    """One-digit two-term sums: 10 x 10 x 2 = 200 distinct questions, of which a tenth, about 20, may be held out."""
    tiny = build_task(chain_sum(options=TWO_TERMS | {"max_digits": 1}, held_out_size=100))
    report = tiny.check()
    assert 8 <= report.held_out <= 32
    assert report.held_out + report.train_distinct <= 200
    assert [w.split(":")[1][:5] for w in report.warnings] == [" only", " the "]
    plenty = build_task(chain_sum()).check(demonstrations=build_task(chain_sum()).demonstrations(7))
    assert (plenty.held_out, plenty.train_checked, plenty.demonstrations_checked, plenty.warnings) == (50, 1000, 7, ())


def test_the_report_names_the_setting_that_holds_so_few_questions_back(tmp_path: Path) -> None:
    """Twenty different questions in thirty rows: two, a tenth, are held out, and of the other eighteen some stand there twice."""
    rows = write_rows(tmp_path / "rows.jsonl", [*numbered(20), *numbered(10)])
    own = write_rows(tmp_path / "own.jsonl", [*numbered(3), "no row"])
    task = build_task(FileTask(path=rows, held_out_size=5))
    report = task.check()
    assert (report.held_out, report.train_questions) == (2, 18)
    assert f"18 distinct in {report.train_checked} rows; rollout.task.distinct: true takes each once" in str(report)
    why = "rollout.task.held_out_fraction = 0.1 holds back that share of its 20 different questions; raise it or take more questions"
    assert report.warnings == (f"{rows}: only 2 of the 5 held-out questions could be found: {why}, or lower rollout.task.held_out_size",)
    assert task.held_out_shortage(2) == "" and task.held_out_shortage(3) == why
    assert build_task(FileTask(path=rows)).check().warnings == (), "nobody has asked for so many"
    (tmp_path / "all.jsonl").write_text(rows.read_text())
    of_its_own = build_task(FileTask(path=tmp_path / "all.jsonl", held_out_path=own, held_out_size=5))
    assert of_its_own.held_out_shortage(5).startswith(f"{own} has no more with other texts, 1 bad row aside ({own}:4: no valid JSON")


# --- reasoning-gym --------------------------------------------------------------------------------------------------


def test_a_training_prompt_depends_on_seed_and_position_alone() -> None:
    forwards = [build_task(chain_sum()).train_prompt(i) for i in range(3)]
    task = build_task(chain_sum())
    assert [task.train_prompt(i) for i in (200, 2, 1, 0)][:0:-1] == forwards  # after another stretch, backwards
    assert [p.prompt_id for p in forwards] == ["train/0/0", "train/0/1", "train/0/2"]
    assert [PromptPlace.parse(p.prompt_id) for p in forwards] == [PromptPlace("train", 0, number) for number in range(3)]
    assert {PromptPlace.parse(other) for other in ("train/3", "train/0/x", "a/b/c/0/1", "")} == {None}
    assert build_task(chain_sum(seed=1)).train_prompt(0).text != forwards[0].text


def test_neighbouring_stretches_of_the_stream_do_not_repeat_each_other() -> None:
    """chain_sum draws entry i from Random(seed + i): stretches whose seeds were neighbours would share all entries but one."""
    task = build_task(chain_sum(options=TWO_TERMS | {"min_digits": 4, "max_digits": 4}))  # 162 million questions
    texts = [task.train_prompt(i).text for i in range(64 * 4)]
    assert len(set(texts)) == len(texts)


def test_the_prompt_is_the_question_in_its_template_with_the_entry_for_the_scorer() -> None:
    prompt = build_task(chain_sum(prompt_template=r"{question} End with \boxed{}.")).train_prompt(0)
    assert prompt.text == prompt.metadata["question"] + r" End with \boxed{}."
    assert prompt.answer == prompt.metadata["answer"] == str(eval(prompt.metadata["metadata"]["expression"]))


def test_demonstrations_show_the_right_answer() -> None:
    for shown in build_task(chain_sum()).demonstrations(20):
        expression = shown.question.rpartition(":")[2].rstrip(" =")
        assert shown.answer == str(eval(expression))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "chainsum"}, "did you mean chain_sum?"),
        ({"options": {"min_term": 2}}, "did you mean min_terms?"),
        ({"options": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
    ],
)
def test_names_and_options_that_reasoning_gym_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_task(chain_sum(**settings))
    assert message in str(caught.value)


def test_questions_that_are_too_long_are_passed_over_and_counted(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    config = chain_sum(options=TWO_TERMS | {"max_terms": 6})
    lengths = sorted(len(ChatEncoder(tokenizer).encode(build_task(config).train_prompt(i).text)) for i in range(99))
    limit = lengths[49]
    task = build_task(config, ChatEncoder(tokenizer, max_prompt_tokens=limit))
    assert all(len(task.train_prompt(i).token_ids) <= limit for i in range(30))
    report = task.check(train_positions=30)
    assert report.skipped and f"more than the {limit}" in report.skipped[0].reason
    with pytest.raises(DataError, match="held out or too long"):
        build_task(chain_sum(), ChatEncoder(tokenizer, max_prompt_tokens=3)).train_prompt(0)


class Raising:
    """A reasoning-gym data set some entries of which raise."""

    def __init__(self, dataset: Any, share: float) -> None:
        self._dataset, self._share = dataset, share

    def __getitem__(self, index: int) -> Any:
        entry = self._dataset[index]
        if hash_share(f"{entry['question']} raises") < self._share:
            raise RecursionError(f"entry {index}: " + "deep " * 1000)
        return entry


def with_raising(monkeypatch: pytest.MonkeyPatch, share: float, made: Callable[[int], object] = lambda seed: None) -> None:
    def create(*words: Any, seed: int, size: int) -> Raising:
        made(seed)
        return Raising(create_reasoning_gym(*words, seed=seed, size=size), share)

    monkeypatch.setattr("evenkeel.rollout.tasks.gym_source.create_reasoning_gym", create)


def test_a_question_that_raises_is_passed_over_the_same_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the run, and each resume at the same position."""
    plain = build_task(chain_sum())
    first = [plain.train_prompt(i) for i in range(40)]
    with_raising(monkeypatch, 0.3)
    task, again = build_task(chain_sum()), build_task(chain_sum())
    found = [task.train_prompt(i) for i in range(40)]
    assert found == [again.train_prompt(i) for i in range(40)] and len(task.held_out_prompts()) == 50
    kept = [one for one, other in zip(found, first, strict=True) if one == other]
    assert kept == [one for one in first if hash_share(f"{one.text} raises") >= 0.3] and 20 < len(kept) < 36
    report = task.check(train_positions=40)
    assert "making it raised RecursionError: entry " in report.skipped[0].reason and len(report.skipped[0].reason) < 600
    assert str(report).endswith("bad rows skipped")


def test_questions_that_all_raise_are_one_sentence_with_the_last_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with_raising(monkeypatch, 1.0)
    with pytest.raises(DataError) as caught:
        build_task(chain_sum()).train_prompt(3)
    told = str(caught.value)
    assert "16 questions in a row are held out or too long, or raise (16 can't be asked so far" in told
    assert "the last that can't be asked: reasoning-gym chain_sum, train, entry 0/63: making it raised RecursionError: entry 63" in told
    assert "start a new run" in told and "rollout.task." not in told, "no setting of a task can be changed on a resume"


def test_a_stretch_that_can_not_be_made_is_made_of_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some data sets make all their entries at once: one that raises was the end of 256 positions."""
    seeds = list[int]()

    def made(seed: int) -> None:
        seeds.append(seed)
        if seed in bad:
            raise ZeroDivisionError("no such sum")

    bad = set[int]()
    with_raising(monkeypatch, 0.0, made)
    task = build_task(chain_sum())
    plain = task.train_prompt(256)
    bad.add(seeds[-1])
    others = [build_task(chain_sum()).train_prompt(256) for _ in range(2)]
    assert others[0] == others[1] != plain and others[0].prompt_id == plain.prompt_id
    task = build_task(chain_sum())
    monkeypatch.setattr("evenkeel.rollout.tasks.gym_source.create_reasoning_gym", lambda *_, **__: made(next(iter(bad))))
    seeds.clear()
    with pytest.raises(DataError, match="making it raised ZeroDivisionError: no such sum"):
        task.train_prompt(256)
    assert len(seeds) == 4, "not again for each of its entries"


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_what_is_the_machines_fault_passes_no_question_over(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    task = build_task(chain_sum())

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("evenkeel.rollout.tasks.gym_source.create_reasoning_gym", refuse)
    with pytest.raises(error):
        task.train_prompt(256)


# --- rows -----------------------------------------------------------------------------------------------------------


def test_each_epoch_has_every_training_row_once_in_a_new_order(tmp_path: Path) -> None:
    config = FileTask(path=write_rows(tmp_path / "rows.jsonl", numbered(40)), held_out_size=4)
    task = build_task(config)
    report = task.check()
    assert (report.held_out, report.train_questions) == (4, 36)
    first, second = ([task.train_prompt(36 * epoch + i) for i in range(36)] for epoch in (0, 1))
    rest = {f"question {i}" for i in range(40)} - {p.text for p in task.held_out_prompts()}
    assert {p.text for p in first} == {p.text for p in second} == rest
    assert [p.text for p in first] != [p.text for p in second]
    assert (first[5].prompt_id, second[5].prompt_id) == ("train/0/5", "train/1/5")
    assert build_task(config).train_prompt(41) == second[5]  # resumed from the position alone
    assert (second[5].answer, second[5].metadata) == (second[5].text.split()[1], {"level": int(second[5].answer) % 3})


def test_unshuffled_rows_keep_their_order(tmp_path: Path) -> None:
    task = build_task(FileTask(path=write_rows(tmp_path / "rows.jsonl", numbered(20)), held_out_size=2, shuffle=False))
    numbers = [int(task.train_prompt(i).answer) for i in range(18)]
    assert numbers == sorted(numbers)


def test_the_fingerprint_is_of_every_training_question_and_its_answer(tmp_path: Path) -> None:
    """A row more, an answer changed, two rows swapped: other data. Runs of blanks between equal rows are none."""

    def of(rows: list[Any]) -> str:
        return build_task(FileTask(path=write_rows(tmp_path / "rows.jsonl", rows), held_out_size=1, shuffle=False)).fingerprint

    rows = numbered(20)
    last = {**rows[-1], "answer": "another"}
    prints = [of(rows), of(numbered(21)), of([*rows[:-1], last]), of([rows[1], rows[0], *rows[2:]])]
    assert len(set(prints)) == 4 and of(numbered(20)) == prints[0]


def test_the_fingerprint_of_a_stream_is_of_its_seed() -> None:
    assert build_task(chain_sum(seed=1)).fingerprint == build_task(chain_sum(seed=1)).fingerprint
    assert build_task(chain_sum(seed=1)).fingerprint != build_task(chain_sum(seed=2)).fingerprint


def test_equal_texts_are_on_the_same_side(tmp_path: Path) -> None:
    task = build_task(FileTask(path=write_rows(tmp_path / "rows.jsonl", numbered(20) * 3), held_out_size=5, held_out_fraction=0.5))
    assert len(task.held_out_prompts()) == 5
    report = task.check()
    assert (report.train_questions, report.train_checked) == (15, 45)


def test_bad_rows_are_skipped_with_file_line_and_reason(tmp_path: Path, tiny_model: Path) -> None:
    rows: list[Any] = [
        *numbered(3),
        {"question": "no prompt", "answer": 1}, '{"prompt": "cut', {"prompt": "  ", "answer": 1}, {"prompt": ["a"], "answer": 1},
        "[1, 2]", {"prompt": "no answer"}, {"prompt": "long " * 200, "answer": 1}, {"prompt": "null", "answer": None},
    ]  # fmt: skip
    path = write_rows(tmp_path / "rows.jsonl", rows)
    task = build_task(FileTask(path=path), ChatEncoder(load_tokenizer(tiny_model), max_prompt_tokens=64))
    skipped = {row.place: row.reason for row in task.check().skipped}
    assert list(skipped) == [f"{path}:{line}" for line in range(4, 12)]
    expected = ['no field "prompt" (it has question, answer)', "no valid JSON", "is empty", "is list, neither text",
                "holds list", 'no field "answer"', "more than the 64", 'no field "answer"']  # fmt: skip
    assert all(part in reason for part, reason in zip(expected, skipped.values(), strict=True)), skipped


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("72", "72"), ("72.0", "72"), ("1e3", "1000"), ("0.1", "0.1"), ("-0.0", "0"), ("1e300", "1e+300"),
        ("123456789012345678901", "123456789012345678901"), ('" 7 "', " 7 "),
        ('["72"]', ("72",)), ('["Paris", 7.0]', ("Paris", "7")),
    ],
)  # fmt: skip
def test_a_reference_answer_is_the_text_that_a_model_writes(tmp_path: Path, said: str, kept: str | tuple[str, ...]) -> None:
    """Parquet and pandas make whole numbers floats: no model answers "72.0". Any answer of a list is right."""
    path = write_rows(tmp_path / "rows.jsonl", [f'{{"prompt": "{i}?", "answer": {said}}}' for i in range(2)])
    task = build_task(FileTask(path=path, held_out_size=1))
    assert task.train_prompt(0).answer == kept
    assert task.train_row(0)["answer"] == (kept if isinstance(kept, str) else list(kept))
    assert task.demonstrations(1)[0].answer == (kept if isinstance(kept, str) else kept[0])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("true", 'field "answer" is True'), ("NaN", 'field "answer" is nan'), ("[]", "is an empty list"), ("[[1]]", "is list"),
        ('{"value": 72}', 'name the field within it, e.g. "answer.value"'),
    ],
)  # fmt: skip
def test_what_no_answer_can_equal_is_a_bad_row(tmp_path: Path, said: str, reason: str) -> None:
    """As "{'value': 72}" it would give every right answer 0, and nobody would know."""
    rows = [*numbered(3), f'{{"prompt": "another", "answer": {said}}}']
    (skipped,) = build_task(FileTask(path=write_rows(tmp_path / "rows.jsonl", rows))).check().skipped
    assert skipped.place.endswith(":4") and reason in skipped.reason


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no such file"),
        ("rows.csv", "a,b", "unknown kind of file '.csv'; use one of .jsonl, .json, .parquet"),
        ("rows.jsonl", '{"question": "q", "answer": "a"}\n', "none of its 1 rows can be used; the first:"),
        ("rows.jsonl", "", "none of its 0 rows can be used."),
        ("rows.json", "{", "one object a line belongs into a .jsonl file"),
        ("rows.parquet", "PAR", "no readable Parquet file"),
        ("rows.jsonl", '{"prompt": "q", "answer": "a"}\n', "every row is held out"),
    ],
)
def test_a_useless_file_is_one_clear_error(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        build_task(FileTask(path=tmp_path / name))
    assert message in str(caught.value) and str(tmp_path / name) in str(caught.value)


def test_one_bad_row_is_one_row_and_demonstrations_are_the_warm_ups(tmp_path: Path) -> None:
    task = build_task(FileTask(path=write_rows(tmp_path / "rows.jsonl", [*numbered(3), "{"]), held_out_size=1))
    assert str(task.check()).endswith("(2 distinct); 1 bad row skipped")
    shown = task.check(demonstrations=[Demonstration("another", "another", "1")])
    assert "and from the 1 demonstrations of the model's warm-up; 1 bad row skipped" in str(shown)


def test_a_worked_conversation_is_a_demonstration_of_each_turn(tmp_path: Path, tiny_model: Path) -> None:
    """Of the model's turns alone, each after the very tokens that it would read. Another order of roles is no conversation."""
    said = [("assistant", "1 + 2 ="), ("tool", "3"), ("assistant", "it is 3")]
    turns = [{"role": role, "content": content} for role, content in said]
    rows = [{"prompt": f"sum {i}", "answer": "3", "worked": turns} for i in range(9)] + [
        {"prompt": "no", "answer": "", "worked": turns[:2]}
    ]
    encoder = ChatEncoder(load_tokenizer(tiny_model))
    task = build_task(FileTask(path=write_rows(tmp_path / "rows.jsonl", rows), demonstration_field="worked", held_out_size=1), encoder)
    (skipped,) = task.check().skipped
    assert "is a list, but not of turns: an assistant's, then another's" in skipped.reason
    first, second, third = task.demonstrations(3)
    assert [one.answer for one in (first, second, third)] == ["1 + 2 =", "it is 3", "1 + 2 ="] and first.question == second.question
    asked, called = encoder.encode_demonstration(first.prompt, first.answer)
    assert asked == encoder.encode(first.question)
    following = encoder.following(first.question, called, turns[1:2])
    assert encoder.encode_demonstration(second.prompt, second.answer)[0] == (*asked, *called, *following)


def test_too_long_questions_are_no_want_of_fields(tmp_path: Path, tiny_model: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", numbered(3))
    with pytest.raises(DataError) as caught:
        build_task(FileTask(path=path), ChatEncoder(load_tokenizer(tiny_model), max_prompt_tokens=2))
    assert "more than the 2 that fit" in str(caught.value) and "needs the text fields" not in str(caught.value)


def test_a_data_set_without_a_network_is_one_sentence_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried again: the one question to the hub fails, and then datasets looks into its cache alone."""
    import datasets
    import httpx
    import huggingface_hub

    asked: list[str] = []

    def unreachable(_: Any, path: str, **__: Any) -> None:
        asked.append(path)
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda _: pytest.fail("it waits before another attempt"))
    with pytest.raises(DataError) as caught:
        build_task(HuggingFaceTask(path="nobody/nothing"))
    assert "the Hugging Face hub can't be reached (Name or service not known)" in str(caught.value) and asked == ["nobody/nothing"]
    assert not datasets.config.HF_HUB_OFFLINE and not huggingface_hub.constants.HF_HUB_OFFLINE, "as it was, for whatever comes next"


def test_a_held_out_file_of_its_own_is_kept_out_of_training(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", numbered(10))
    held_out = write_rows(tmp_path / "test.jsonl", numbered(30)[8:])
    report = build_task(FileTask(path=train, held_out_path=held_out, held_out_size=12)).check()
    assert (report.held_out, report.train_questions) == (12, 8)


def test_own_field_names_and_worked_demonstrations(tmp_path: Path) -> None:
    rows = [{"q": f"q{i}", "gold": i, "worked": f"so it is {i}"} for i in range(10)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    task = build_task(FileTask(path=path, prompt_field="q", answer_field="gold", demonstration_field="worked", held_out_size=1))
    shown = task.demonstrations(12)  # nine rows are left, so three come again
    assert len(shown) == 12
    assert all(d.answer == f"so it is {d.question[1:]}" for d in shown)
    unanswered = build_task(FileTask(path=path, prompt_field="q", answer_field=None, held_out_size=1))
    with pytest.raises(DataError, match="skip the warm-up"):
        unanswered.demonstrations(1)


def test_parquet_json_and_hugging_face_folders_hold_the_same_questions(tmp_path: Path) -> None:
    import datasets

    rows = numbered(20)
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    write_rows(tmp_path / "rows.jsonl", rows)
    tasks = [
        build_task(FileTask(path=tmp_path / "rows.jsonl")),
        build_task(FileTask(path=tmp_path / "rows.json")),
        build_task(FileTask(path=tmp_path / "rows.parquet")),
        build_task(HuggingFaceTask(path=str(tmp_path / "saved"))),
        build_task(HuggingFaceTask(path=str(tmp_path / "splits"))),
    ]
    streams = [[task.train_prompt(i) for i in range(18)] + list(task.held_out_prompts()) for task in tasks]
    assert all(a == b for a, b in itertools.pairwise(streams))
    with pytest.raises(DataError, match="check path, subset and split"):
        build_task(HuggingFaceTask(path=str(tmp_path / "splits"), split="tset"))


def test_an_entry_of_reasoning_gym_survives_json_with_its_types() -> None:
    """Tuples, sets and keys that are no text, which scorers compare; what else there may be is named."""
    entry = {"a": (1, [2.5, None, (True,)]), "b": {(0, 1): "x", 3: {"y"}}, "c": {"__tuple__": "a text"}, "d": set(), "e": "é"}
    back = from_json(json.loads(json.dumps(as_json(entry), allow_nan=False)))
    assert back == entry and repr(back["a"]) == repr(entry["a"]) and type(back["d"]) is set
    for value, place in ((object(), r"entry\.x\[1\] is object"), (float("nan"), r"entry\.x\[1\] is float \(nan\)"), (b"x", "is bytes")):
        with pytest.raises(TypeError, match=place):
            as_json({"x": [0, value]})


@pytest.mark.parametrize("dataset", ["chain_sum", "countdown", "graph_color", "knights_knaves", "word_ladder"])
def test_generated_questions_can_stand_in_a_file(dataset: str) -> None:
    task = build_task(ReasoningGymTask(dataset=dataset))
    row, prompt = json.loads(json.dumps(task.train_row(5), allow_nan=False)), task.train_prompt(5)
    assert (row["prompt"], row["answer"], from_json(row["reasoning_gym_entry"])) == (prompt.text, prompt.answer, prompt.metadata)
