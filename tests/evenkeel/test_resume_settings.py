"""A resume with other settings, as far as something follows from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenkeel.actors.config import DeadlinesConfig, RunConfig
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.settings.resolve import with_deadlines, with_devices
from evenkeel.correction.errors import ConfigError
from evenkeel.recipe import as_recipe, load_config
from evenkeel.resume_point import changed_settings, find_resume_point, listed, run_recipe, with_settings
from evenkeel.training import train_run
from tests.evenkeel.finished_run import give_words, keep_in_checkpoint, resumed, state

BFLOAT16 = "learner.dtype=bfloat16"
OF_OTHER_ENGINES = [
    ([BFLOAT16], "settings that follow from others, and have changed: rollout.engine.dtype float32 -> bfloat16"),
    (["rollout.engine.dtype=bfloat16"], "settings other than the run's own so far: rollout.engine.dtype float32 -> bfloat16"),
    (["rollout.engine.device=cuda", BFLOAT16], "settings other than the run's own so far: rollout.engine.device cpu -> cuda"),
]


@pytest.mark.parametrize(("words", "said"), OF_OTHER_ENGINES)
def test_groups_of_engines_of_another_kind_are_sampled_again(folder: RunFolder, words: list[str], said: str) -> None:
    """Also where nobody has named what follows: a type that is the learner's."""
    point = resumed(folder, words)
    assert (len(point.state.book.finished), len(point.state.book.in_flight)) == (0, 2)
    assert any(said in text for _, text in point.notes)


GIVEN_AS_BEFORE = [
    "rollout.engine.dtype=float32",
    "learner.batch_invariant=false",
    "rollout.engine.batch_invariant=false",
    "rollout.slots=16",
]
LEFT_OPEN = [
    "rollout.engine.device=auto",
    "learner.device=auto",
    "rollout.engine.dtype=null",
    "rollout.engine.dtype=auto",
    "learner.layers=null",
    "rollout.engine.batch_invariant=null",
    "rollout.engine.projection_parts=null",
    "rollout.slots=null",
]


@pytest.mark.parametrize("was_given", [False, True])
@pytest.mark.parametrize("override", ["learner.device=cpu", *GIVEN_AS_BEFORE, *LEFT_OPEN])
def test_another_way_to_the_same_settings_changes_nothing(folder: RunFolder, override: str, was_given: bool) -> None:
    """auto and null come to what ran, whether that was given or derived: the groups stay, and there is nothing to say."""
    give_words(folder, *(GIVEN_AS_BEFORE if was_given else ()))
    point = resumed(folder, [override])
    assert point.state.book == state(2).book and point.notes == ()


def test_an_open_device_that_becomes_another_one_is_told(folder: RunFolder) -> None:
    """auto on a machine that has GPUs by now. The type would follow, and with it all that is trained: nobody has asked for that."""
    found = find_resume_point(folder, words := ["rollout.engine.device=auto", "learner.device=auto"])
    assert found.point is not None
    with pytest.raises(ConfigError) as caught:
        with_settings(folder, found.point, found.recipe, with_devices(found.recipe.config, has_gpu=True))
    said = f"learner.dtype = bfloat16, but {folder.path} ran with float32: nobody has asked for that"
    assert str(caught.value).startswith(said) and "Add learner.dtype=float32 to go on as before" in str(caught.value)
    found = find_resume_point(folder, [*words, BFLOAT16])
    assert found.point is not None
    point = with_settings(folder, found.point, found.recipe, with_devices(found.recipe.config, has_gpu=True))
    assert point.state.book.finished == ()
    (given,) = (text for _, text in point.notes if "run's own" in text)
    assert "learner.device cpu -> cuda" in given and "rollout.engine.device cpu -> cuda" in given


def test_a_run_goes_on_on_its_devices_whatever_is_there_now(folder: RunFolder) -> None:
    """The nodes with the GPUs of an autoscaled cluster come later than the head: without one the types would be a CPU's."""
    recipe = run_recipe(folder, ["learner.device=auto", "rollout.engine.device=auto"]).config
    folder.write_recipe(as_recipe(recipe))
    folder.write_config(with_devices(recipe, has_gpu=True))
    config = with_devices(find_resume_point(folder, ()).recipe.config, has_gpu=False)
    assert (config.learner.device, config.rollout.engine.device, config.learner.dtype) == ("cuda", "cuda", "bfloat16")


def test_a_recipe_that_somebody_has_changed_is_told_as_words_on_the_command_line_are(folder: RunFolder) -> None:
    path = folder.recipe_path
    path.write_text(path.read_text().replace("learning_rate: 0.001", "learning_rate: 0.002"))
    assert "learner.learning_rate 0.001 -> 0.002" in " ".join(text for _, text in resumed(folder, ()).notes)


@pytest.mark.parametrize("content", [None, "", "model: m\nsteps: 9\n"])
def test_a_folder_without_a_whole_recipe_is_refused_before_anything_is_written(folder: RunFolder, content: str | None) -> None:
    """As earlier versions wrote it, or as a full disk has left it: what is missing would silently be a default."""
    folder.close()
    folder.recipe_path.unlink()
    if content is not None:
        folder.recipe_path.write_text(content)
    with folder.metrics_path.open("a") as file:
        file.write('{"torn')
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    with pytest.raises(ConfigError, match=r"recipe\.yaml(:| is) (missing|damaged).*start a new run from its weights") as caught:
        train_run(None, [], folder.path)
    assert "\n" not in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before


def test_a_raise_that_never_ran_can_be_taken_back(folder: RunFolder) -> None:
    """A resume with more staleness ended before it saved: the checkpoint's groups are as young as before."""
    keep_in_checkpoint(folder, ran := give_words(folder))
    give_words(folder, f"max_staleness={ran.max_staleness + 2}")
    point = resumed(folder, [f"max_staleness={ran.max_staleness}"])
    assert not [text for _, text in point.notes if "max_staleness" in text], "it is what it was when the checkpoint was saved"
    point = resumed(folder, ())
    raised = f"max_staleness {ran.max_staleness} -> {ran.max_staleness + 2}"
    assert [raised in text for _, text in point.notes] == [True]
    with pytest.raises(ConfigError, match=f"ran with {ran.max_staleness}"):
        find_resume_point(folder, [f"max_staleness={ran.max_staleness - 1}"])


def test_a_checkpoint_is_read_with_the_deadlines_that_the_run_had(folder: RunFolder) -> None:
    """Derived from a large model: what is read before they are derived anew must not be late by the defaults."""
    ran = with_deadlines(run_recipe(folder, ()).config, 10**12)
    folder.write_config(ran)
    found = find_resume_point(folder, ["deadlines.start_s=77"])
    assert found.deadlines == ran.deadlines and found.deadlines.disk_s > 10 * DeadlinesConfig().disk_s
    assert found.recipe.config.deadlines == DeadlinesConfig(start_s=77)


def test_changes_are_told_in_the_words_of_yaml() -> None:
    changed = {"true_on_policy": (False, True), "rollout.slots": (None, 3), "learner.dtype": ("float32", "bfloat16"), "a": ([True], {})}
    said = "true_on_policy false -> true; rollout.slots empty -> 3; learner.dtype float32 -> bfloat16; a [true] -> {}"
    assert listed(changed) == said


def test_settings_of_several_tasks_are_compared_key_by_key() -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "nano_two_tasks.yaml"
    then = load_config(RunConfig, recipe).model_dump(mode="json")
    other = load_config(RunConfig, recipe, ["rollout.tasks.1.weight=3", "rollout.tasks.0.task.seed=4"])
    assert changed_settings(then, other) == {"rollout.tasks.1.weight": (1.0, 3.0), "rollout.tasks.0.task.seed": (0, 4)}
