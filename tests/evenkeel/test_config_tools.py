"""Loading a recipe: what is merged, what is replaced, and what each error says.

The models here are small stand-ins with every feature that the real ones use; the real ones are loaded by the recipes' test.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from typer.testing import CliRunner

from evenkeel.actors.config import RunConfig
from evenkeel.cli import app
from evenkeel.correction.errors import ConfigError
from evenkeel.explain import BASICS, explain, explain_lines, nearest_key
from evenkeel.other_words import MEANT
from evenkeel.recipe import load_config

NANO = Path(__file__).parents[2] / "recipes" / "nano_spell_backward.yaml"


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Clip(Part):
    kind: Literal["clip"] = "clip"
    low: float = Field(default=0.2, ge=0)
    """Distance from 1."""


class Score(Part):
    kind: Literal["score"] = "score"
    gate: float | None = None
    """Where it stops."""


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Criterion(Part):
    upper: float
    """Largest accepted value."""


class Rollout(Part):
    workers: PositiveInt = 1
    """Engines."""
    samples_per_group: int = 8
    """Answers to a prompt."""
    colour: Colour = Colour.RED
    """A choice."""


class Run(Part):
    steps: PositiveInt
    """Training batches."""
    rollout: Rollout = Rollout()
    """What samples."""
    objective: Annotated[Clip | Score, Field(discriminator="kind")] = Clip()
    """The trust region."""
    gate: Annotated[Clip | Score, Field(discriminator="kind")] | None = None
    """Optional and tagged."""
    rejection: tuple[Criterion, ...] = ()
    """All must pass."""
    data: Path | None = None
    """Where rows are."""
    limit: int | None = Field(default=None, gt=2)
    """Bounded or absent."""
    rate: float = 1e-4
    """Learning rate."""

    @model_validator(mode="after")
    def _check(self) -> Run:
        if self.steps == 13:
            raise ConfigError("steps = 13: unlucky. Take 12.")
        return self


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("steps: 5\nrollout:\n  workers: 2\nobjective:\n  kind: clip\n  low: 0.3\nrejection:\n  - {upper: 2}\nrate: 5e-5\n")
    return path


def problem(recipe: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Run, recipe, overrides)
    return str(caught.value)


def test_overrides_lie_over_the_recipe_and_the_recipe_over_defaults(recipe: Path) -> None:
    run = load_config(Run, recipe, ["rollout.workers=3", "data=rows.jsonl", "steps=7", "steps=8"])
    assert (run.rollout.workers, run.rollout.samples_per_group, run.steps, run.data) == (3, 8, 8, Path("rows.jsonl"))
    assert run.rate == 5e-5  # a plain YAML 1.1 reader takes 5e-5 for text


def test_a_recipe_is_not_needed() -> None:
    assert load_config(Run, None, ["steps=2"]).steps == 2


def test_values_are_yaml() -> None:
    run = load_config(Run, None, ["steps=2", "rejection=[{upper: 1.5},{upper: 3}]", "rollout={workers: 4}", "data=null"])
    assert [criterion.upper for criterion in run.rejection] == [1.5, 3.0]
    assert run.rollout.workers == 4 and run.data is None


def test_an_override_reaches_into_a_list(recipe: Path) -> None:
    assert load_config(Run, recipe, ["rejection.0.upper=9"]).rejection[0].upper == 9


def test_changing_the_kind_replaces_the_variant(recipe: Path) -> None:
    """`low` belongs to the recipe's clip; score has none. In either order the override next to the kind stays."""
    for overrides in (["objective.kind=score", "objective.gate=1"], ["objective.gate=1", "objective.kind=score"]):
        assert load_config(Run, recipe, overrides).objective == Score(gate=1.0)


def test_the_same_kind_keeps_its_neighbours(recipe: Path) -> None:
    assert load_config(Run, recipe, ["objective.kind=clip"]).objective == Clip(low=0.3)


def test_an_optional_tagged_section_can_be_set(recipe: Path) -> None:
    assert load_config(Run, recipe, ["gate.kind=score", "gate.gate=2"]).gate == Score(gate=2.0)


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("rollout.wokers", "rollout.workers"),
        ("rolout", "rollout"),
        ("samples_per_group", "rollout.samples_per_group"),  # right word, wrong section
        ("objective.lo", "objective.low"),
        ("rejection.0.uper", "rejection.N.upper"),
        ("colours", "rollout.colour"),  # nearly the right word, in another section
        ("wibble", ""),
    ],
)
def test_the_nearest_key(typo: str, nearest: str) -> None:
    assert nearest_key(Run, typo) == nearest


def test_words_of_other_trainers_lead_to_settings_that_there_are() -> None:
    """Each of the table's settings exists; of words that are a key here, at the top, none is in it."""
    keys = {line.path for line in explain_lines(RunConfig)}
    assert {meant.key for meant in MEANT.values() if meant.key} - keys == set()
    assert MEANT.keys() & {key for key in keys if "." not in key} == set()
    assert all(meant.key or meant.note for meant in MEANT.values())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lr=1", "lr = 1: no such key; it is learner.learning_rate here."),
        ("learner.lr=1", "learner.lr = 1: no such key; it is learner.learning_rate here."),
        ("num_generations=8", "it is rollout.sampling.samples_per_group here."),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n = 8: no such key; it is rollout.sampling.samples_per_group here."),
        ("batch_size=8", "it is groups_per_step here (counts prompts: "),
        ("beta=0.1", "it is correction.kl.coefficient here."),
        ("epochs=3", "set steps to EPOCHS x questions / groups_per_step."),
        ("lora_rank=8", "there is no LoRA."),
        ("temperature=1", "it is rollout.sampling.temperature here"),
        ("wibble=1", "no such key; `evenkeel config` lists those that one usually sets"),
        ("correction.preset=tis", "Did you mean tis-token or tis-sequence or "),
        ("correction.preset=none", "Without one it is null: PPO's clip alone"),
    ],
)
def test_a_word_of_another_trainer(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(RunConfig, NANO, [word])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "5"], "KEY=VALUE: steps=5"),
        (["--lr=1e-4"], "KEY=VALUE: learner.learning_rate=1e-4"),
        (["--num-generations", "8"], "KEY=VALUE: rollout.sampling.samples_per_group=8"),
        (["--lora-rank", "8"], "none stands for lora_rank: all weights are trained"),
        (["--steps", "seed=1"], "KEY=VALUE: steps=VALUE"),
    ],
)
def test_an_option_that_is_meant_as_a_setting(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["train", str(NANO), *words])
    assert done.exit_code == 2 and said in " ".join(done.stderr.replace("\u2502", " ").split())


def test_the_settings_that_one_usually_sets_are_a_page() -> None:
    """Two lines each, all of them there."""
    shown = CliRunner().invoke(app, ["config"]).stdout.splitlines()
    assert len(shown) == 2 * len(BASICS) + 2 and [line.partition(":")[0] for line in shown[: 2 * len(BASICS) : 2]] == list(BASICS)
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("evenkeel ")


def test_what_kinds_and_sections_share_is_explained_once() -> None:
    """Four rewards have the same limits, init.learner is a learner, and one of several tasks has the keys of the only one."""
    text = explain(RunConfig)
    heads = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert len(heads) == len(set(heads)) and sum(head.startswith("rollout.reward.deadline_s:") for head in heads) == 1
    assert "rollout.task.distinct: bool = false   [kind: file or huggingface or folders]" in heads
    assert "init.learner: section = as below   [keys as in learner]" in heads and "init.learner.seed" not in text
    named = {head.partition(":")[0] for head in heads}
    left = {line.path for line in explain_lines(RunConfig)} - named
    elsewhere = ("init.learner.", "correction.objective.gate.relax.", "rollout.tasks.N.")
    assert all(path.startswith(elsewhere) or path.endswith(".kind") for path in left), left


def test_unknown_key_names_file_line_and_nearest(recipe: Path) -> None:
    recipe.write_text("steps: 5\nrollout:\n  wokers: 2\n")
    assert problem(recipe) == f"{recipe}:3: rollout.wokers = 2: no such key; the nearest is rollout.workers."


def test_unknown_key_of_a_variant_is_named_without_the_tag(recipe: Path) -> None:
    assert problem(recipe, "objective.lo=1") == "command line: objective.lo = 1: no such key; the nearest is objective.low."


def test_a_key_of_another_kind_is_named_with_its_own(recipe: Path) -> None:
    """`low` is a key, and the nearest to itself: what is wrong is the kind."""
    assert problem(None, "steps=1", "objective.kind=score", "objective.low=0.1") == (
        "command line: objective.low = 0.1: low belongs to kind: clip, but objective.kind is score. "
        "Leave it out, or set objective.kind to clip."
    )
    recipe.write_text("steps: 1\ngate:\n  kind: clip\n  gate: 2\n")
    assert problem(recipe).startswith(f"{recipe}:4: gate.gate = 2: gate belongs to kind: score, but gate.kind is clip.")


def test_a_missing_section_is_added_in_a_way_that_can_be_typed(tmp_path: Path) -> None:
    class Nested(Part):
        rollout: Rollout

    recipe = tmp_path / "empty.yaml"
    recipe.write_text("")
    with pytest.raises(ConfigError, match=r"rollout is missing\. Add the section to the recipe, as `rollout:`; `evenkeel config --section"):
        load_config(Nested, recipe)
    with pytest.raises(ConfigError, match=r"Add the section a key at a time: rollout\.KEY=VALUE"):
        load_config(Nested, None)


def test_a_folder_is_no_recipe_and_shows_those_in_it(recipe: Path) -> None:
    (recipe.parent / "looks_like.yaml").mkdir()
    assert problem(recipe.parent) == f"{recipe.parent}: a folder, not a recipe file. There are: {recipe}."


def test_a_recipe_in_the_place_of_an_override(recipe: Path) -> None:
    assert "is a second recipe: give one, before any KEY=VALUE" in problem(None, "steps=1", str(recipe))


def test_bad_values_name_value_reason_and_what_is_expected(recipe: Path) -> None:
    text = problem(recipe, "rollout.workers=0", "rollout.colour=green")
    assert "command line: rollout.workers = 0: expected int > 0." in text
    assert "command line: rollout.colour = 'green'" in text and "expected red | blue." in text


def test_all_problems_are_listed_one_a_line(recipe: Path) -> None:
    recipe.write_text("rollout:\n  workers: many\n  wrkers: 1\nobjective: {kind: klip}\n")
    lines = problem(recipe).splitlines()
    assert len(lines) == 4
    assert lines[0] == f"{recipe}: steps is missing (Training batches). Add it to the recipe, or on the command line: steps=VALUE (int > 0)"
    assert lines[1].startswith(f"{recipe}:2: rollout.workers = 'many'")
    assert lines[2].startswith(f"{recipe}:3: rollout.wrkers = 1: no such key")
    assert lines[3] == f"{recipe}:4: objective.kind = klip: no such kind; the nearest is clip, all are clip, score."


def test_a_section_without_its_tag(recipe: Path) -> None:
    assert problem(recipe, "gate={low: 1}") == "command line: gate doesn't say which kind it is. Add gate.kind."


def test_a_validator_speaks_for_itself(recipe: Path) -> None:
    assert problem(recipe, "steps=13") == "command line: steps = 13: unlucky. Take 12."
    recipe.write_text("steps: 13")
    assert problem(recipe) == f"{recipe}: steps = 13: unlucky. Take 12."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: [1\nb: 2\n", ":2: not valid YAML"),
        ("steps: 1\nsteps: 2\n", ":2: not valid YAML: found duplicate key steps"),
        ("- 1\n", "a recipe is a mapping"),
        ("steps: ${nowhere}\n", "Interpolation key 'nowhere' not found"),
    ],
)
def test_a_file_that_is_no_recipe(recipe: Path, text: str, expected: str) -> None:
    recipe.write_text(text)
    message = problem(recipe)
    assert message.startswith(str(recipe)) and expected in message and "\n" not in message


def test_a_file_that_is_not_there_names_those_that_are(recipe: Path) -> None:
    assert problem(recipe.with_name("other.yaml")) == f"{recipe.with_name('other.yaml')}: no such recipe file. There are: {recipe}."


@pytest.mark.parametrize("override", ["steps", "=3", "steps =3", "steps=[1"])
def test_an_override_that_is_none(recipe: Path, override: str) -> None:
    assert problem(recipe, override).startswith("command line: ")


def test_explain_lists_every_key_with_type_default_and_meaning() -> None:
    lines = {(line.path, str(line.variant or "")): line for line in explain_lines(Run)}
    assert lines["steps", ""].type == "int > 0" and lines["steps", ""].default == "required"
    assert lines["rollout.colour", ""].type == "red | blue" and lines["rollout.colour", ""].default == "red"
    assert lines["objective.low", "kind: clip"].type == "float >= 0"
    assert lines["objective.gate", "kind: score"].description == "Where it stops."
    assert lines["gate.gate", "kind: score"].type == "float | null"
    assert lines["rejection.N.upper", ""].default == "required"
    assert lines["data", ""].type == "path | null" and lines["data", ""].default == "null"
    assert lines["objective", ""].type == "section, kind: clip | score" and lines["objective", ""].default == "kind: clip"
    assert lines["gate", ""].type == "section, kind: clip | score | null"
    assert lines["limit", ""].type == "int > 2 | null"
    assert "rollout.workers: int > 0 = 1\n    Engines." in explain(Run)
    assert "objective.kind" not in explain(Run)  # the section's own line has it
    assert "learner.seed: int = 1234\n" in (text := explain(RunConfig, "learner"))
    assert "learner.dtype: auto | bfloat16_if_fast | float32 | bfloat16 | float16 = auto   [derived in a run unless it is given]\n" in text


def test_explain_one_section() -> None:
    assert explain(Run, "rollout").splitlines()[0].startswith("rollout: ")
    assert "steps" not in explain(Run, "rollout")
    with pytest.raises(ConfigError, match="nearest is rollout"):
        explain(Run, "rolout")


@pytest.mark.parametrize("word", ["=3", ".=3", "rollout.=3", "rollout..workers=3", " steps=3", "steps"])
def test_what_is_no_key_is_refused_as_such(recipe: Path, word: str) -> None:
    assert problem(recipe, word).startswith(f"command line: {word!r} is not a setting: write KEY=VALUE")


def test_a_key_below_a_value_is_refused_where_it_was_given(recipe: Path) -> None:
    assert problem(recipe, "steps.more=3") == "command line: steps.more = 3: steps is 5 there, no section"


def test_explain_of_a_recipe_says_where_each_value_comes_from() -> None:
    done = CliRunner().invoke(app, ["config", str(NANO), "learner.seed=5", "--explain"])
    assert done.exit_code == 0, done.output
    said = {line.partition(":")[0]: line.partition(": ")[2] for line in done.output.splitlines() if not line.startswith(" ")}
    (number,) = (i for i, line in enumerate(NANO.read_text().splitlines(), 1) if line.startswith("steps:"))
    assert said["learner.seed"] == "5   [command line]"
    assert said["steps"].endswith(f"   [{NANO}:{number}]")
    assert said["max_staleness"].endswith("]") and said["dynamic_sampling"] == "false   [default]"
    assert "learner.dtype:   [derived when the run starts]" in done.output and "deadlines.step_s" not in done.output
    one = CliRunner().invoke(app, ["config", str(NANO), "--section", "deadlines"]).output
    assert one.startswith("deadlines.tokens_per_s: 5.0   [default]\n    Slowest rate") and "\nlearner" not in one
