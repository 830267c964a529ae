"""Every recipe loads; what two packages must agree on is checked where they are composed; batch arithmetic in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.resolve import with_equal_operators
from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.errors import ConfigError
from evenkeel.explain import inner_models
from evenkeel.init_model import read_record
from evenkeel.learner.config import LearnerConfig
from evenkeel.recipe import load_config

ROOT = Path(__file__).parents[3]
RECIPES = [*sorted(ROOT.glob("recipes/*.yaml")), ROOT / "tests/e2e/small.yaml"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(recipe: Path) -> None:
    config = load_config(RunConfig, recipe)
    assert config.steps >= 1 and config.groups_per_step % config.learner.optimizer_steps_per_batch == 0


def small(*overrides: str) -> RunConfig:
    return load_config(RunConfig, ROOT / "tests/e2e/small.yaml", overrides)


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A model and all those inside it, the variants of unions too."""
    yield model
    for field in model.model_fields.values():
        for _, inner in inner_models(field.annotation, ""):
            yield from sections(inner)


def numbers(model: type[BaseModel]) -> Iterator[tuple[str, bool]]:
    """Fields that take numbers, and whether they come in a list."""
    for name, field in model.model_fields.items():
        if re.search(r"\b(int|float)\b", str(field.annotation)) and "dict" not in str(field.annotation):
            yield name, "tuple" in str(field.annotation)


def test_no_number_of_any_section_may_be_infinite_or_beyond_all_measure() -> None:
    """Whatever else is missing of its section, the field itself is complained of."""
    seen = set()
    for model in set(sections(RunConfig)):
        for name, is_list in numbers(model):
            seen.add(f"{model.__module__.split('.')[1]}: {name}")
            for value in (math.inf, -math.inf, math.nan, 10**20, -(10**20)):
                with pytest.raises(ValidationError) as caught:
                    model.model_validate({name: [value] * 2 if is_list else value})
                assert name in {error["loc"][0] for error in caught.value.errors() if error["loc"]}, f"{model.__name__}.{name} = {value}"
    assert {"actors: steps", "learner: learning_rate", "learner: betas", "correction: upper_by_staleness", "rollout: start_s"} <= seen


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.learning_rate=2", "learner.learning_rate = 2: expected float >= 0 and <= 1.0."),
        ("learner.betas=[0.9,1.0]", r"learner.betas: \(0.9, 1.0\): an average needs factors of at least 0 and below 1"),
        ("steps=1000000001", "steps = 1000000001: expected int > 0 and <= 1000000000."),
        ("max_staleness=1 weight_sync.every_steps=3", "engines' is 2 steps old.*Set max_staleness to 2 or more"),
        ("max_staleness=1001", "max_staleness = 1001: expected int >= 0 and <= 1000."),
        ("rollout.sampling.temperature=101", "temperature = 101: expected float > 0 and <= 100.0."),
        ("name=" + "n" * 300, "name = 'nnn.*: string should have at most 100 characters"),
        ('name=""', "name = '': string should have at least 1 character"),
        ("correction.objective.kind=score correction.objective.clip_low=0.1", "clip_low belongs to kind: clip, but .* is score"),
    ],
)
def test_sizes_and_rates_that_make_no_sense(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small(*override.split())


def test_minibatches_have_to_be_of_equal_size() -> None:
    assert small("learner.optimizer_steps_per_batch=2").learner.optimizer_steps_per_batch == 2
    with pytest.raises(ConfigError, match=r"groups_per_step = 10 is not a multiple of .*= 4: .* Use 8 groups"):
        small("groups_per_step=10", "learner.optimizer_steps_per_batch=4")
    with pytest.raises(ConfigError, match="Use 4 groups"):
        small("groups_per_step=3", "learner.optimizer_steps_per_batch=4")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            "steps=7 groups_per_step=6 max_staleness=2 learner.optimizer_steps_per_batch=3 rollout.sampling.samples_per_group=5",
            "7 steps, each on 6 prompts x 5 samples = 30 trajectories of up to 48 tokens in 3 optimizer steps of 10; "
            "at most 18 prompts are under way, so no token is more than 2 versions old.",
        ),
        (
            "steps=1 max_staleness=1 learner.epochs_per_batch=2",
            "1 step on 4 prompts x 4 samples = 16 trajectories of up to 48 tokens in 2 optimizer steps of 16 (2 passes "
            "over the batch); at most 8 prompts are under way, so no token is more than 1 version old.",
        ),
        (
            "steps=1 max_staleness=1",
            "1 step on 4 prompts x 4 samples = 16 trajectories of up to 48 tokens in one optimizer step; "
            "at most 8 prompts are under way, so no token is more than 1 version old.",
        ),
    ],
)
def test_batch_arithmetic(overrides: str, sentence: str) -> None:
    assert small(*overrides.split()).batch_arithmetic() == sentence


def test_a_run_config_survives_its_own_file(tmp_path: Path) -> None:
    """What a run writes down is read again: equal to the last field, presets and unions included."""
    from evenkeel.actors.record.config_that_ran import config_that_ran
    from evenkeel.actors.record.run_folder import RunFolder

    config = small("correction.preset=icepop", "run_dir=" + str(tmp_path / "run"))
    with RunFolder.create(tmp_path / "run", "x") as folder:
        folder.write_config(config)
        assert config_that_ran(folder) == config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("monitor.on_alarm=switch_preset", r"monitor.on_alarm = switch_preset needs a preset\. Set monitor.preset"),
        ("monitor.preset=icepop", "monitor.on_alarm = none: nothing would switch to it"),
        ("monitor.on_alarm=switch_preset monitor.preset=icepopp", "monitor.preset = icepopp: .*no such preset. Did you mean icepop"),
        ("monitor.on_alarm=switch_preset monitor.preset=dppo-topk-tv", "dppo-topk-tv: it needs the engines' top-K logprobs"),
        ("monitor.on_alarm=tighten correction.preset=pg", "monitor.on_alarm = tighten: correction has no bound"),
        ("monitor.on_alarm=panic", r"monitor.on_alarm = 'panic': expected none \| switch_preset \| tighten \| stop"),
        ("monitor.thresholds.alarm_grwth=3", "the nearest is monitor.thresholds.alarm_growth"),
    ],
)
def test_an_alarm_action_that_could_not_be_done_is_refused_at_the_start(overrides: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small(*overrides.split())


def test_a_replacement_has_to_fit_the_run_as_if_it_had_begun_with_it() -> None:
    """Whatever RunConfig refuses of `correction` it refuses of the replacement: here a validator that dislikes icepop."""

    def no_icepop(self: RunConfig) -> RunConfig:
        if self.correction.preset == "icepop":
            raise ConfigError("no icepop on Sundays")
        return self

    class Strict(RunConfig):
        sunday = model_validator(mode="after")(no_icepop)

    recipe = ROOT / "tests/e2e/small.yaml"
    load_config(Strict, recipe, ["monitor.on_alarm=switch_preset", "monitor.preset=mis-token"])
    with pytest.raises(ConfigError, match=r"monitor.preset = icepop: no icepop on Sundays"):
        load_config(Strict, recipe, ["monitor.on_alarm=switch_preset", "monitor.preset=icepop"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("preset=prime-tv",), False),
        (("preset=prime-ipo",), False),
        (("preset=prime-tv", "kl.anchor=reference", "kl.coefficient=0.002"), True),
        (("kl.coefficient=0.1",), True),
    ],
)
def test_a_reference_policy_is_kept_only_for_a_penalty_on_it_or_a_report(overrides: tuple[str, ...], expected: bool) -> None:
    words = [f"correction.{override}" for override in overrides]
    assert small(*words).needs_reference is expected
    assert small(*words, "learner.report_kl_every=3").needs_reference


def test_what_an_alarm_goes_on_with() -> None:
    def after(*overrides: str) -> CorrectionConfig | None:
        run = small(*overrides)
        return run.monitor.after_alarm(run.correction)

    assert after() is None and after("monitor.on_alarm=stop") is None
    switched = after("monitor.on_alarm=switch_preset", "monitor.preset=mis-full")
    assert switched is not None and switched.preset == "mis-full" and switched.veto is not None
    tightened = after("monitor.on_alarm=tighten", "monitor.tighten_factor=0.25")  # tis-token: at most 2
    assert tightened is not None and tightened.importance.upper == pytest.approx(2**0.25)


def test_replaying_the_proximal_forwards_routing_needs_that_forward() -> None:
    """With one optimizer step a batch it is skipped, and in bypass there is none."""
    assert small("learner.routing_replay=recompute", "learner.optimizer_steps_per_batch=2").learner.routing_replay == "recompute"
    for other in (["learner.optimizer_steps_per_batch=1"], ["learner.optimizer_steps_per_batch=2", "correction.preset=bypass"]):
        with pytest.raises(ConfigError, match=r"routing_replay = recompute with . optimizer steps? per batch.*no proximal forward"):
            small("learner.routing_replay=recompute", *other)


def test_the_engines_tell_their_routing_where_it_is_replayed() -> None:
    assert with_equal_operators(small("learner.routing_replay=rollout"), {}).rollout.engine.return_routed_experts
    assert not with_equal_operators(small(), {}).rollout.engine.return_routed_experts


def test_a_balancing_loss_with_a_late_factor_is_refused() -> None:
    """Where importance weights are known before training it is fine, for that the forward runs first; interpolated ones are not."""
    normalised = ["learner.moe_aux_loss_coefficient=0.01", "correction.normalize.population=all"]
    assert small(*normalised).learner.moe_aux_loss_coefficient == 0.01
    with pytest.raises(ConfigError, match=r"moe_aux_loss_coefficient = 0\.01 with this correction: normaliser.*scale"):
        small(*normalised, "correction.proximal=interpolate")


def test_a_balancing_loss_has_the_forward_run_first() -> None:
    """Without one the mean weight is a factor on the gradient, and the batch is deferred; two optimizer steps need the forward anyway."""
    correction = CorrectionConfig.model_validate({"preset": "tis-token", "normalize": {"population": "all"}})
    for settings, needs in (({}, False), ({"moe_aux_loss_coefficient": 0.01}, True), ({"optimizer_steps_per_batch": 2}, True)):
        learner = LearnerConfig.model_validate(settings)
        assert (learner.needs_proximal_forward(correction), learner.defers(correction)) == (needs, not needs)


def test_a_record_of_another_version_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "evenkeel_init.json").write_text('{"init": {"sequences": 3}}')
    with pytest.raises(ConfigError, match=r"evenkeel_init.json: not what this version writes .* Make the model anew"):
        read_record(tmp_path)


def test_advantages_by_turn_need_an_environment() -> None:
    with pytest.raises(ConfigError, match=r"advantage.level = turn without an environment: nothing returns rewards by turn"):
        small("correction.advantage.level=turn")
    config = load_config(RunConfig, ROOT / "recipes/nano_calculator.yaml", ["correction.advantage.level=turn"])
    assert config.correction.advantage.of_group == CorrectionConfig(preset="tis-token").advantage.of_group
