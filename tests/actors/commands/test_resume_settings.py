"""A resume with other settings, as far as something follows from them."""

from __future__ import annotations

import pytest

from actors.commands.resume_point import find_resume_point, run_config, with_settings
from actors.commands.run_settings import listed
from actors.config import DeadlinesConfig
from actors.record.run_folder import RunFolder
from actors.settings.deadlines import with_deadlines
from actors.settings.derived import derived
from correction.errors import ConfigError
from tests.actors.commands.finished_run import keep_in_checkpoint, resumed, state

BFLOAT16 = "learner.dtype=bfloat16"
OF_OTHER_ENGINES = [
    ([BFLOAT16], "settings that follow from others, and have changed: rollout.engine.dtype float32 -> bfloat16"),
    (["rollout.engine.dtype=bfloat16"], "settings other than the run's own so far: rollout.engine.dtype float32 -> bfloat16"),
    (["rollout.engine.device=cuda", BFLOAT16], "settings other than the run's own so far: rollout.engine.device cpu -> cuda"),
]


@pytest.mark.parametrize(("words", "said"), OF_OTHER_ENGINES)
def test_groups_of_engines_of_another_kind_are_sampled_again(folder: RunFolder, words: list[str], said: str) -> None:
    """Also where nobody has named what follows: a type that is the learner's."""
    folder.write_config(derived(run_config(folder, ()), has_gpu=False))
    point = resumed(folder, words)
    assert (len(point.state.queue.finished), len(point.state.queue.in_flight)) == (0, 2)
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
    folder.write_config(derived(run_config(folder, GIVEN_AS_BEFORE if was_given else ()), has_gpu=False))
    point = resumed(folder, [override])
    assert point.state.queue == state(2).queue and point.notes == ()


@pytest.mark.parametrize("words", [[], ["rollout.engine.device=cpu"]])
def test_groups_of_a_device_that_is_not_known_are_sampled_again(folder: RunFolder, words: list[str]) -> None:
    """config.yaml was edited to auto, and the checkpoint has no settings of its own: they may be a GPU's."""
    ran = derived(run_config(folder, ()), has_gpu=False)
    engine = ran.rollout.engine.model_copy(update={"device": "auto"})
    folder.write_config(ran.model_copy(update={"rollout": ran.rollout.model_copy(update={"engine": engine})}))
    point = resumed(folder, words)
    assert point.state.queue.finished == ()
    assert any("run's own so far: rollout.engine.device auto -> cpu" in text for _, text in point.notes)


def test_an_open_device_that_becomes_another_one_is_told(folder: RunFolder) -> None:
    """auto on a machine that has GPUs by now; types follow."""
    folder.write_config(derived(run_config(folder, ()), has_gpu=False))
    config, point = find_resume_point(folder, ["rollout.engine.device=auto", "learner.device=auto"])
    assert point is not None
    point = with_settings(folder, point, derived(config, has_gpu=True))
    assert point.state.queue.finished == ()
    (given,) = (text for _, text in point.notes if "run's own" in text)
    assert "learner.device cpu -> cuda" in given and "rollout.engine.device cpu -> cuda" in given


def test_a_raise_that_never_ran_can_be_taken_back(folder: RunFolder) -> None:
    """A resume with more staleness ended before it saved: the checkpoint's groups are as young as before."""
    keep_in_checkpoint(folder, ran := run_config(folder, ()))
    folder.write_config(run_config(folder, [f"max_staleness={ran.max_staleness + 2}"]))
    point = resumed(folder, [f"max_staleness={ran.max_staleness}"])
    assert not [text for _, text in point.notes if "max_staleness" in text], "it is what it was when the checkpoint was saved"
    point = resumed(folder, ())
    raised = f"max_staleness {ran.max_staleness} -> {ran.max_staleness + 2}"
    assert [raised in text for _, text in point.notes] == [True]
    with pytest.raises(ConfigError, match=f"ran with {ran.max_staleness}"):
        find_resume_point(folder, [f"max_staleness={ran.max_staleness - 1}"])


def test_a_checkpoint_is_read_with_the_deadlines_that_the_run_had(folder: RunFolder) -> None:
    """Derived from a large model: what is read before they are derived anew must not be late by the defaults."""
    ran = with_deadlines(run_config(folder, ()).model_copy(update={"deadlines": DeadlinesConfig()}), 10**12)
    folder.write_config(ran)
    config, _ = find_resume_point(folder, ["deadlines.step_s=77"])
    assert config.deadlines.disk_s == ran.deadlines.disk_s > 10 * DeadlinesConfig().disk_s and config.deadlines.step_s == 77
    assert not config.deadlines.is_given("checkpoint_s"), "the next derivation replaces it"


def test_changes_are_told_in_the_words_of_yaml() -> None:
    changed = {"true_on_policy": (False, True), "rollout.slots": (None, 3), "learner.dtype": ("float32", "bfloat16"), "a": ([True], {})}
    said = "true_on_policy false -> true; rollout.slots empty -> 3; learner.dtype float32 -> bfloat16; a [true] -> {}"
    assert listed(changed) == said
