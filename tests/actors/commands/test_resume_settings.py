"""A resume with other settings, as far as something follows from them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from actors.commands.resume_point import find_resume_point, run_config, with_derived_settings
from actors.config import DeadlinesConfig, RunConfig
from actors.record.run_folder import RunFolder
from actors.settings.deadlines import with_deadlines
from actors.settings.derived import derived
from correction.errors import ConfigError
from tests.actors.commands.finished_run import keep_in_checkpoint


def test_groups_of_engines_with_another_derived_type_are_sampled_again(folder: RunFolder) -> None:
    """The learner's type is given now, and the engines' follows: nobody has named it, and the finished groups are of the other one."""

    def resolved(overrides: Sequence[str]) -> RunConfig:
        return derived(run_config(folder, overrides), has_gpu=False)

    folder.write_config(resolved([]))
    for overrides, kept in ((["learner.threads=2"], True), (["learner.dtype=bfloat16"], False)):
        _, point = find_resume_point(folder, overrides)
        assert point is not None and len(point.state.queue.finished) == 1, "what follows isn't known yet"
        point = with_derived_settings(folder, point, resolved(overrides))
        assert len(point.state.queue.finished) == kept and len(point.state.queue.in_flight) == 2 - kept
        said = [text for _, text in point.notes if "follow from others" in text]
        assert len(said) == (not kept) and all("rollout.engine.dtype float32 -> bfloat16" in text for text in said)


def test_a_raise_that_never_ran_can_be_taken_back(folder: RunFolder) -> None:
    """A resume with more staleness ended before it saved: the checkpoint's groups are as young as before."""
    keep_in_checkpoint(folder, ran := run_config(folder, ()))
    folder.write_config(run_config(folder, [f"max_staleness={ran.max_staleness + 2}"]))
    config, point = find_resume_point(folder, [f"max_staleness={ran.max_staleness}"])
    assert point is not None and config.max_staleness == ran.max_staleness
    assert not [text for _, text in point.notes if "max_staleness" in text], "it is what it was when the checkpoint was saved"
    _, point = find_resume_point(folder, ())
    raised = f"max_staleness {ran.max_staleness} -> {ran.max_staleness + 2}"
    assert point is not None and [raised in text for _, text in point.notes] == [True]
    with pytest.raises(ConfigError, match=f"ran with {ran.max_staleness}"):
        find_resume_point(folder, [f"max_staleness={ran.max_staleness - 1}"])


def test_a_checkpoint_is_read_with_the_deadlines_that_the_run_had(folder: RunFolder) -> None:
    """Derived from a large model: what is read before they are derived anew must not be late by the defaults."""
    ran = with_deadlines(run_config(folder, ()).model_copy(update={"deadlines": DeadlinesConfig()}), 10**12)
    folder.write_config(ran)
    config, _ = find_resume_point(folder, ["deadlines.step_s=77"])
    assert config.deadlines.disk_s == ran.deadlines.disk_s > 10 * DeadlinesConfig().disk_s and config.deadlines.step_s == 77
    assert not config.deadlines.is_given("checkpoint_s"), "the next derivation replaces it"
