"""config.yaml of a run shows what ran, and a resume derives anew what followed from other settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.commands.recipe import RecipeKeys, load_config, load_with_keys
from actors.commands.run_settings import changed_derived_settings, changed_settings, not_as_written
from actors.config import RunConfig
from actors.doctor.on_paper import on_paper
from actors.doctor.start_checks import check_on_paper, config_for_model
from actors.record.config_that_ran import config_that_ran
from actors.record.run_folder import RunFolder
from actors.settings.derived import derived
from actors.settings.devices import check_types, unfit_shares
from actors.settings.keys import FormerName
from actors.settings.probe_limits import ProbeLimits
from actors.settings.true_on_policy import refuse_contradictions
from correction.errors import ConfigError
from correction.settings.base import DerivedSettings, dump_with_derived, with_derived_beside_given
from learner.config import LearnerConfig
from learner.hf.hf_folder import INIT_RECORD, side_files
from rollout.engine_settings.engine_config import EngineConfig
from rollout.sglang_plugin.hooks import VARIABLE, PluginSettings
from tests.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SMALL = ROOT / "tests" / "e2e" / "small.yaml"
RANKS = ("", "learner.data_parallel=2 learner.tensor_parallel=1 learner.sequence_parallel=false", "learner.data_parallel=4")
OTHERS = ("", "rollout.engine.context_length=null rollout.slots=7", "learner.dtype=bfloat16", "rollout.engine.max_running_requests=32")
LIMIT = {dtype: ProbeLimits.of(dtype, layers=2).largest for dtype in ("float32", "bfloat16", "float16")}
"""Of the probe, for models of two layers."""
MODES = ("", "true_on_policy=true", "learner.routing_replay=rollout", "weight_sync.max_probe_difference=0.3 ray.num_cpus=11")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of a dense model, and of one with experts."""
    folders = {False: tmp_path_factory.mktemp("qwen3"), True: tmp_path_factory.mktemp("qwen3_moe")}
    return {moe: save_tiny_model(folder, folder.name.rstrip("0"), max_position_embeddings=40_960) for moe, folder in folders.items()}


def resolved(config: RunConfig, *, has_gpu: bool) -> RunConfig:
    """As `evenkeel train` resolves it, on a machine that has GPUs or none; what it would refuse of the model is left aside."""
    return config_for_model(derived(config, has_gpu=has_gpu), config.model, has_weights=True, refused=[], lacking=[])


def small(model: Path, *overrides: str) -> RunConfig:
    return load_config(RunConfig, SMALL, [f"model={model}", *overrides])


def write(folder: Path, config: RunConfig) -> Path:
    """config.yaml of a run, as a run writes it. Returns: its path."""
    folder.mkdir(exist_ok=True)
    RunFolder(folder, None).write_config(config)
    return folder / "config.yaml"


def given_keys(config: Any) -> dict[str, set[str]]:
    """By section: which of the keys that can be derived have been given."""
    found = {type(config).__name__: config.model_fields_set & config.DERIVED} if isinstance(config, DerivedSettings) else {}
    for name in type(config).model_fields:
        inner = getattr(config, name)
        if hasattr(inner, "model_fields_set"):
            found |= {f"{name}.{key}": keys for key, keys in given_keys(inner).items()}
    return found


@settings(max_examples=40, deadline=None)
@given(
    recipe=st.sampled_from([SMALL, *RECIPES]), is_moe=st.booleans(), has_gpu=st.booleans(), elsewhere=st.booleans(),
    words=st.tuples(st.sampled_from(RANKS), st.sampled_from(OTHERS), st.sampled_from(MODES)),
)  # fmt: skip
def test_what_a_run_s_folder_says_is_what_ran(
    models: dict[bool, Path], recipe: Path, is_moe: bool, has_gpu: bool, elsewhere: bool, words: tuple[str, ...]
) -> None:
    """All of it, also if it is derived anew on a machine with other hardware; and what was derived never becomes a given setting."""
    model = models[is_moe]
    try:
        recipe_config = load_config(RunConfig, recipe, [f"model={model}", *" ".join(words).split()])
        ran = resolved(recipe_config, has_gpu=has_gpu)
    except ConfigError:
        return  # float32 on a GPU, for instance
    path = write(model / "run", ran)
    assert config_that_ran(RunFolder.view(model / "run")) == ran
    assert given_keys(config_that_ran(RunFolder.view(model / "run"))) == given_keys(ran) == given_keys(recipe_config)
    assert resolved(load_config(RunConfig, path), has_gpu=elsewhere) == ran
    assert changed_settings(ran, load_config(RunConfig, path)) == changed_derived_settings(ran, ran) == {}


@pytest.mark.parametrize("has_gpu", [True, False])
def test_nothing_that_was_decided_stands_there_as_open(models: dict[bool, Path], tmp_path: Path, has_gpu: bool) -> None:
    """What was null or auto until a run's parts asked for it. On GPUs SGLang sizes the KV cache, and a rank chooses its layers."""
    words = ["rollout.engine.context_length=null", "correction.preset=tis-token"]
    config = resolved(small(models[False], *words), has_gpu=has_gpu)
    written = yaml.safe_load(write(tmp_path, config).read_text())
    requests, context = config.rollout.engine.max_running_requests, config.rollout.engine.resolved_context
    shown = {
        "rollout.slots": written["rollout"]["derived"]["slots"],
        "context": written["rollout"]["engine"]["derived"]["context_length"],
        "cache": written["rollout"]["engine"]["derived"]["max_total_tokens"],
        "probe": written["weight_sync"]["derived"]["max_probe_difference"],
        "cpus": written["ray"]["derived"]["num_cpus"],
        "init": (written["init"]["learner"]["device"], written["init"]["learner"]["derived"]["dtype"]),
        "layers": written["learner"]["derived"]["layers"],
        "share": written["rollout"]["engine"]["derived"]["gpu_share"],
    }
    assert shown == {
        "rollout.slots": 2 * requests // 4,
        "context": context,
        "cache": None if has_gpu else min(65_536, requests * context),
        "probe": LIMIT["bfloat16" if has_gpu else "float32"],
        "cpus": 3,
        "init": ("cuda", "bfloat16") if has_gpu else ("cpu", "float32"),
        "layers": "auto" if has_gpu else "local",
        "share": 1.0,
    }
    assert written["learner"]["device"] == written["rollout"]["engine"]["device"] == ("cuda" if has_gpu else "cpu")
    limits = ProbeLimits.of_run(config)
    assert limits.median == limits.largest / 10, "one that is derived doesn't replace the limit of the median"


def on_gpus(models: dict[bool, Path], folder: Path, *overrides: str) -> Path:
    """config.yaml of a run on GPUs, two ranks of which share the optimizer."""
    recipe = load_config(RunConfig, ROOT / "recipes" / "nano_spell_backward.yaml", [f"model={models[False]}", *overrides])
    return write(folder, resolved(recipe, has_gpu=True))


TWO = ("learner.data_parallel=2", "learner.gpus_per_rank=1", "rollout.gpus_per_worker=1")


def test_a_resume_on_another_device_has_the_types_of_that_device(models: dict[bool, Path], tmp_path: Path) -> None:
    path = on_gpus(models, tmp_path)
    words = ["learner.device=cpu", "rollout.engine.device=cpu", "rollout.engine.max_running_requests=8"]
    config = resolved(load_config(RunConfig, path, words), has_gpu=True)
    learner, engine = config.learner, config.rollout.engine
    assert (learner.dtype, engine.dtype, engine.weight_group_backend) == ("float32", "float32", "gloo")
    assert (learner.tokens_per_microbatch, learner.layers, engine.gpu_share) == (2048, "local", 1.0)
    assert (config.rollout.slots, engine.max_total_tokens, config.weight_sync.max_probe_difference) == (2, 8 * 64, LIMIT["float32"])
    as_it_was = resolved(load_config(RunConfig, path), has_gpu=False)
    assert (as_it_was.learner.device, as_it_was.rollout.engine.dtype) == ("cuda", "bfloat16"), "not where it happens to be resumed"


def test_a_resume_with_other_ranks_or_shares_derives_what_goes_with_them(models: dict[bool, Path], tmp_path: Path) -> None:
    path = on_gpus(models, tmp_path, *TWO)
    assert config_that_ran(RunFolder.view(tmp_path)).learner.distributed_optimizer
    one = resolved(load_config(RunConfig, path, ["learner.data_parallel=1", "rollout.gpus_per_worker=0.4"]), has_gpu=True)
    assert not one.learner.distributed_optimizer and one.rollout.engine.gpu_share == 0.4 and one.logical_cpus == one.ray.num_cpus == 3
    kept = resolved(load_config(RunConfig, path, ["learner.data_parallel=1", "learner.distributed_optimizer=true"]), has_gpu=True)
    assert kept.learner.distributed_optimizer, "given, it stays"


def test_what_is_derived_and_goes_with_nothing_is_refused_as_if_it_were_given(models: dict[bool, Path], tmp_path: Path) -> None:
    path = on_gpus(models, tmp_path)
    with pytest.raises(ConfigError, match=r"rollout\.engine\.dtype = float32 with device = cuda"):
        derived(load_config(RunConfig, path, ["learner.device=cpu"]), has_gpu=True)


def test_an_engine_s_share_of_a_gpu_may_be_less_than_its_worker_s_but_not_more(models: dict[bool, Path]) -> None:
    """gpus_per_worker is what Ray has reserved; the rest of the GPU is somebody else's."""
    for share, refused in ((0.3, False), (0.4, False), (0.5, True)):
        config = derived(small(models[False], "rollout.gpus_per_worker=0.4", f"rollout.engine.gpu_share={share}"), has_gpu=True)
        assert config.rollout.engine.gpu_share == share
        assert [f"gpu_share = {share}" in error.reason for error in unfit_shares(config)] == [True] * refused


def test_null_has_a_setting_derived_again(models: dict[bool, Path]) -> None:
    """In the folder of an earlier version all values count as given: this is how one of them follows the others again."""
    given = small(models[False], "learner.tokens_per_microbatch=1000", "deadlines.step_s=7")
    again = small(models[False], "learner.tokens_per_microbatch=null", "deadlines.step_s=null")
    assert given.learner.is_given("tokens_per_microbatch") and given.deadlines.is_given("step_s")
    assert not again.learner.is_given("tokens_per_microbatch") and not again.deadlines.is_given("step_s")


def test_what_stands_under_derived_is_named_where_it_is_no_setting(models: dict[bool, Path], tmp_path: Path) -> None:
    path = write(tmp_path, resolved(small(models[False]), has_gpu=False))
    written = yaml.safe_load(path.read_text())
    for value in ("int3", None):
        written["learner"]["derived"]["dtype"] = value
        path.write_text(yaml.safe_dump(written))
        line = 1 + path.read_text().splitlines().index(f"    dtype: {value or 'null'}")
        with pytest.raises(ConfigError, match=rf"config\.yaml:{line}: learner\.derived\.dtype: not settings .*: Input should .*Remove it"):
            config_that_ran(RunFolder(path.parent))
    path.write_text(yaml.safe_dump(written | {"learner": {"derived": 5}}))
    with pytest.raises(ConfigError, match=r"config\.yaml:\d+: learner: derived = 5: under derived a run shows .*remove it"):
        load_config(RunConfig, path)


_OF_ENGINE = "rollout.engine.deadlines"
DERIVED_ON_THE_COMMAND_LINE = [
    ("rollout.derived.slots=3", "rollout.derived.slots", "set rollout.slots itself"),
    ("rollout.derived={slots: 3}", "rollout.derived.slots", "set rollout.slots itself"),
    ("rollout={workers: 1, derived: {slots: 3}}", "rollout.derived.slots", "set rollout.slots itself"),
    ("rollout.engine={threads: 1, derived: {dtype: float16}}", "rollout.engine.derived.dtype", "set rollout.engine.dtype itself"),
    ("rollout={engine: {deadlines: {derived: {start_s: 9}}}}", f"{_OF_ENGINE}.derived.start_s", f"set {_OF_ENGINE}.start_s itself"),
    ("learner={fixed_order: true, derived: {dtype: float16}}", "learner.derived.dtype", "set learner.dtype itself"),
    ("learner.derived.batch_invariant.x=3", "learner.derived.batch_invariant.x", "set learner.batch_invariant itself"),
    ("learner.derived.fixed_order=true", "learner.derived.fixed_order", "set learner.batch_invariant itself"),
    ("learner.derived.no_setting=1", "learner.derived.no_setting", "leave it out"),
    ("learner={derived: {}}", "learner.derived", "leave it out"),
    ("learner.derived=5", "learner.derived", "leave it out"),
]


@pytest.mark.parametrize(("word", "key", "remedy"), DERIVED_ON_THE_COMMAND_LINE)
def test_a_derived_value_on_the_command_line_is_refused_by_name(models: dict[bool, Path], word: str, key: str, remedy: str) -> None:
    """Whoever writes it there wants it, and it would be passed over."""
    with pytest.raises(ConfigError) as caught:
        small(models[False], word)
    assert str(caught.value) == f"command line: {key}: that shows what a run has derived; {remedy}"


@pytest.mark.parametrize("word", ["rollout.task.options.derived=3", "rollout.engine.engine_args={derived: 3}", "ray.env.derived=x"])
def test_a_free_key_may_have_that_name(models: dict[bool, Path], word: str) -> None:
    assert small(models[False], word)


def test_an_engine_of_several_ranks_has_no_share(models: dict[bool, Path]) -> None:
    ranks = ("rollout.engine.tensor_parallel=2", "learner.batch_invariant=false")
    (refused,) = unfit_shares(derived(small(models[False], "rollout.engine.gpu_share=0.5", *ranks), has_gpu=True))
    assert "gpu_share = 0.5 with tensor_parallel = 2" in refused.reason
    assert not list(unfit_shares(derived(small(models[False], *ranks), has_gpu=True)))


def test_who_compares_runs_finds_a_setting_in_one_place(models: dict[bool, Path]) -> None:
    """Whether a recipe gave it or the run derived it."""
    ways = [small(models[False]), small(models[False], "learner.dtype=float32", "rollout.slots=16")]
    one, other = (with_derived_beside_given(dump_with_derived(derived(config, has_gpu=False))) for config in ways)
    assert one["learner"] == other["learner"] and one["rollout"]["slots"] == other["rollout"]["slots"] > 0
    assert "derived" not in str(one)


def as_before(written: Any) -> Any:
    """config.yaml as versions wrote it that counted all but deadlines as given: null where a value was found later."""
    if not isinstance(written, dict):
        return written
    found = {key: as_before(value) for key, value in written.items()}
    shown = found.pop("derived", {})
    late = {"slots", "context_length", "max_total_tokens", "max_probe_difference", "num_cpus"}
    deadlines = {key: value for key, value in shown.items() if key.endswith("_s")}
    found |= {key: None if key in late else value for key, value in shown.items() if key not in deadlines}
    return found | ({"derived": deadlines} if deadlines else {})


@pytest.mark.parametrize("mode", ["", "true_on_policy=true", "learner.data_parallel=2"])
def test_a_run_of_an_earlier_version_goes_on_with_all_that_it_had(models: dict[bool, Path], tmp_path: Path, mode: str) -> None:
    """Its values count as given; nulls are derived."""
    ran = resolved(small(models[False], "rollout.engine.context_length=null", *mode.split()), has_gpu=False)
    path = write(tmp_path, ran)
    path.write_text(yaml.safe_dump(as_before(yaml.safe_load(path.read_text()))))
    old = config_that_ran(RunFolder.view(tmp_path))
    assert old.learner.dtype == "float32" and old.learner.is_given("dtype") and not old.rollout.is_given("slots")
    assert resolved(load_config(RunConfig, path), has_gpu=True) == ran
    assert changed_settings(old, load_config(RunConfig, path)) == changed_derived_settings(old, ran) == {}
    kept = derived(load_config(RunConfig, path, ["learner.threads=2", "rollout.engine.batch_invariant=false"]), has_gpu=True)
    assert (kept.learner.dtype, kept.learner.layers) == ("float32", "local")


REFUSED_OF_OLD = [
    ("", ["true_on_policy=true"], ["learner.batch_invariant and rollout.engine.batch_invariant"]),
    ("", ["true_on_policy=true", "learner.batch_invariant=true"], ["rollout.engine.batch_invariant"]),
    ("true_on_policy=true", ["true_on_policy=false"], ["learner.batch_invariant and rollout.engine.batch_invariant"]),
    ("true_on_policy=true", ["learner.tensor_parallel=2"], ["rollout.engine.projection_parts"]),
    ("", ["learner.dtype=bfloat16"], ["rollout.engine.dtype"]),
]


@pytest.mark.parametrize(("ran", "words", "keys"), REFUSED_OF_OLD)
def test_what_a_refusal_says_helps_in_the_folder_of_an_earlier_version(
    models: dict[bool, Path], tmp_path: Path, ran: str, words: list[str], keys: list[str]
) -> None:
    """There a setting that was derived stands as given, and nobody can leave it out on the command line: null has it follow."""

    def checked(config: RunConfig) -> RunConfig:
        config = config_for_model(derived(config, has_gpu=False), config.model, has_weights=True)
        check_types(config)
        return config

    path = write(tmp_path, checked(small(models[False], *ran.split())))
    path.write_text(yaml.safe_dump(as_before(yaml.safe_load(path.read_text()))))
    overrides = list(words)
    for key in keys:
        with pytest.raises(ConfigError, match=rf"{key}.*{key} to .*\bnull") as caught:
            checked(load_config(RunConfig, path, overrides))
        assert "out" not in caught.value.remedy.split()
        overrides += [f"{name}=null" for name in key.split(" and ")]
    assert checked(load_config(RunConfig, path, overrides)) == checked(small(models[False], *ran.split(), *words))


def test_a_learning_rate_that_nobody_gave_is_one_for_the_kind_of_model(models: dict[bool, Path], tmp_path: Path) -> None:
    """1e-4 takes a pretrained model apart. A checkpoint has the files of its model's folder, so a resume finds the same."""
    folder = tmp_path / "model"
    shutil.copytree(models[False], folder)
    pretrained, from_nothing = (1e-6, "a pretrained model"), (1e-4, "a model made from nothing")
    for record, (rate, kind) in (("", pretrained), ('{"source": {"name": "x"}}', pretrained), ('{"source": null}', from_nothing)):
        if record:
            (folder / INIT_RECORD).write_text(record)
            assert INIT_RECORD in side_files(folder)
        config, facts = check_on_paper(derived(small(folder, "learner.learning_rate=null"), has_gpu=False))
        said = [str(one) for one in on_paper(facts, config) if str(one).startswith("learner.learning_rate")]
        assert config.learner.learning_rate == rate
        assert len(said) == 1 and said[0].startswith(f"learner.learning_rate = {rate:g}, the default for {kind}")
        assert resolved(small(folder, "learner.learning_rate=0.5"), has_gpu=False).learner.learning_rate == 0.5
    (folder / INIT_RECORD).unlink()
    with pytest.raises(ConfigError, match="min_learning_rate = 5e-05 is above learning_rate = 1e-06"):
        falling = derived(small(folder, "learner.learning_rate=null", "learner.min_learning_rate=5e-5"), has_gpu=False)
        config_for_model(falling, folder, has_weights=True)


def test_a_contradiction_is_told_without_the_model(models: dict[bool, Path]) -> None:
    """evenkeel doctor asks of a run's folder alone."""
    with pytest.raises(ConfigError, match=r"projection_parts: 3 with true_on_policy: true and learner\.tensor_parallel: 1:"):
        refuse_contradictions(small(models[False], "true_on_policy=true", "rollout.engine.projection_parts=3"))
    refuse_contradictions(small(models[False], "rollout.engine.projection_parts=3"))


def test_a_former_name_in_a_run_s_folder_is_a_given_setting(models: dict[bool, Path], tmp_path: Path) -> None:
    """Whatever stands under derived; on the command line either name replaces it, and what is written has the present one, alone."""
    path = write(tmp_path, resolved(small(models[False], "true_on_policy=true"), has_gpu=False))
    written = yaml.safe_load(path.read_text())
    for section in (written["learner"], written["rollout"]["engine"]):
        section["fixed_order"] = section["derived"]["batch_invariant"]
    path.write_text(yaml.safe_dump(written))
    ran, again = config_that_ran(RunFolder.view(tmp_path)), load_config(RunConfig, path)
    for config in (ran, again):
        assert all(side.batch_invariant and side.is_given("batch_invariant") for side in (config.learner, config.rollout.engine))
    sides, lines = ("rollout.engine", "learner"), path.read_text().splitlines()
    keys = RecipeKeys.read(RunConfig, path)
    at = [int(name.place.removeprefix(f"{path}:")) for name in keys.former]
    assert sorted(at) == [number for number, line in enumerate(lines, 1) if "fixed_order" in line]
    assert [(name.former, name.present) for name in keys.former] == [(f"{side}.fixed_order", f"{side}.batch_invariant") for side in sides]
    said = "run.yaml:3: learner.fixed_order is called learner.batch_invariant now"
    assert str(FormerName("run.yaml:3", "learner.fixed_order", "learner.batch_invariant")) == said
    now = resolved(again, has_gpu=False)
    assert changed_settings(ran, now) == changed_derived_settings(ran, now) == {}
    for name in ("batch_invariant", "fixed_order"):
        words = ["true_on_policy=false", f"learner.{name}=false", f"rollout.engine.{name}=null"]
        other = resolved(load_config(RunConfig, path, words), has_gpu=False)
        assert not other.learner.batch_invariant and not other.rollout.engine.is_given("batch_invariant")
    text = write(tmp_path, now).read_text()
    assert "fixed_order" not in text and RecipeKeys.read(RunConfig, path).former == () and config_that_ran(RunFolder.view(tmp_path)) == now


def test_a_recipe_s_derived_values_are_no_settings_and_others_are_told(models: dict[bool, Path], tmp_path: Path) -> None:
    """A recipe is copied from a run's folder, and its values hold where they follow again; written by hand they would be passed over."""
    ran = resolved(small(models[False]), has_gpu=False)
    path = write(tmp_path, ran)
    assert not_as_written(RecipeKeys.read(RunConfig, path), resolved(load_config(RunConfig, path), has_gpu=False)) == []
    written = yaml.safe_load(path.read_text())
    written["rollout"]["derived"] = {"slots": 3, "slotz": 4}
    path.write_text(yaml.safe_dump(written))
    config, keys = load_with_keys(RunConfig, path)
    path.unlink()  # a start reads it once
    now = resolved(config, has_gpu=False)
    assert now == ran
    remedy = "To keep a value, move it out of `derived`: rollout.slots"
    assert not_as_written(keys, now) == [
        f"{path}: what it shows under derived is derived anew: rollout.slots 3 -> 16. {remedy}",
        f"{path}: under derived it shows what is no setting: rollout.slotz",
    ]
    given = resolved(small(models[False], "rollout.slots=5"), has_gpu=False)
    assert not_as_written(keys, given)[:-1] == [], "given beside it, it isn't meant"


def test_of_a_recipe_from_a_gpu_no_deadlines_are_told_and_nothing_that_was_open(models: dict[bool, Path], tmp_path: Path) -> None:
    """They say nothing on a CPU: deadlines follow from the model's bytes, and layers that were auto are only decided."""
    path = on_gpus(models, tmp_path)
    shown = yaml.safe_load(path.read_text())
    shown["rollout"]["engine"]["deadlines"]["derived"]["control_s"] = 62.0  # of a larger model
    path.write_text(yaml.safe_dump(shown))
    config, keys = load_with_keys(RunConfig, path, ["learner.device=cpu", "rollout.engine.device=cpu"])
    now = resolved(config, has_gpu=False)
    assert now.rollout.engine.deadlines.control_s < 61 and keys.derived["rollout.engine.deadlines.control_s"] == 62
    assert (shown["learner"]["derived"]["layers"], now.learner.layers) == ("auto", "local")
    (said,) = not_as_written(keys, now)
    assert "learner.dtype bfloat16 -> float32" in said and "_s " not in said and "layers" not in said


def test_a_dollar_reference_under_derived_may_lack_what_the_command_line_gives(models: dict[bool, Path], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(SMALL.read_text()) | {"weight_sync": {"derived": {"max_probe_difference": "${model}"}}}))
    config, keys = load_with_keys(RunConfig, path, [f"model={models[False]}"])
    assert config.model == models[False] and keys.derived == {"weight_sync.max_probe_difference": "${model}"}


def test_changes_are_told_against_what_ran(models: dict[bool, Path], tmp_path: Path) -> None:
    """A setting that is given now, and was derived, has changed only if it is another; what follows is told apart."""
    path = on_gpus(models, tmp_path)
    ran = config_that_ran(RunFolder.view(tmp_path))
    now = load_config(RunConfig, path, ["learner.dtype=float16", "rollout.slots=128", "learner.tokens_per_microbatch=8192"])
    assert changed_settings(ran, now) == {"learner.dtype": ("bfloat16", "float16")}
    follows = changed_derived_settings(ran, resolved(now, has_gpu=True))
    limits = LIMIT["bfloat16"], LIMIT["float16"]
    assert follows == {"rollout.engine.dtype": ("bfloat16", "float16"), "weight_sync.max_probe_difference": limits}
    without = load_config(RunConfig, write(tmp_path, now), ["learner.dtype=auto"])
    assert changed_settings(now, without) == {"learner.dtype": ("float16", "auto")}


def test_an_engine_s_processes_get_what_was_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their settings travel as JSON: without derived values an engine of true on-policy would compute as any other."""
    engine = EngineConfig(device="cpu").derived({"dtype": "float32", "batch_invariant": True, "projection_parts": 3})
    monkeypatch.setenv(VARIABLE, PluginSettings(engine_id="x", engine=engine).as_variable())
    assert PluginSettings.from_environment().engine == engine


def test_only_keys_that_are_said_to_be_derived_can_be() -> None:
    with pytest.raises(ValueError, match="LearnerConfig: seed: not among the keys that are derived"):
        LearnerConfig().derived({"seed": 3})
    once = LearnerConfig(threads=2).derived({"dtype": "bfloat16"}).derived({"batch_invariant": True})
    assert (once.dtype, once.batch_invariant, once.model_fields_set) == ("bfloat16", True, {"threads"})
    assert once.as_given() == LearnerConfig(threads=2) and "derived" not in once.model_dump()
    assert dump_with_derived(once)["derived"].keys() == LearnerConfig.DERIVED
