"""config.yaml of a run says what ran, in plain values, whatever was given and whatever followed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.actors.config import RunConfig
from evenkeel.actors.record.config_that_ran import config_that_ran
from evenkeel.actors.record.run_folder import RunFolder
from evenkeel.actors.settings.devices import unfit_shares
from evenkeel.actors.settings.probe_limits import ProbeLimits
from evenkeel.actors.settings.resolve import refuse_contradictions, with_devices
from evenkeel.correction.errors import ConfigError
from evenkeel.doctor.on_paper import on_paper
from evenkeel.doctor.start_checks import check_on_paper, config_for_model
from evenkeel.learner.hf.folder import INIT_RECORD, side_files
from evenkeel.recipe import as_recipe, load_config, read_recipe
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from evenkeel.rollout.sglang_plugin.hooks import VARIABLE, PluginSettings
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
    return config_for_model(with_devices(config, has_gpu=has_gpu), config.model, has_weights=True, refused=[], lacking=[])


def small(model: Path, *overrides: str) -> RunConfig:
    return load_config(RunConfig, SMALL, [f"model={model}", *overrides])


def write(folder: Path, config: RunConfig) -> Path:
    """config.yaml of a run, as a run writes it. Returns: its path."""
    folder.mkdir(exist_ok=True)
    RunFolder(folder, None).write_config(config)
    return folder / "config.yaml"


@settings(max_examples=40, deadline=None)
@given(
    recipe=st.sampled_from([SMALL, *RECIPES]), is_moe=st.booleans(), has_gpu=st.booleans(), elsewhere=st.booleans(),
    words=st.tuples(st.sampled_from(RANKS), st.sampled_from(OTHERS), st.sampled_from(MODES)),
)  # fmt: skip
def test_what_a_run_s_folder_says_is_what_ran(
    models: dict[bool, Path], recipe: Path, is_moe: bool, has_gpu: bool, elsewhere: bool, words: tuple[str, ...]
) -> None:
    """config.yaml has plain values: read on a machine with other hardware they are the same, and so is what is made of the recipe again,
    or of the recipe with all of its defaults."""
    model = models[is_moe]
    try:
        read = read_recipe(RunConfig, recipe, [f"model={model}", *" ".join(words).split()])
        ran = resolved(read.config, has_gpu=has_gpu)
    except ConfigError:
        return  # float32 on a GPU, for instance
    write(model / "run", ran)
    again = config_that_ran(RunFolder.view(model / "run"))
    assert again == ran == resolved(again, has_gpu=elsewhere)
    for content in (read.given, as_recipe(read.config)):
        (path := model / "again.yaml").write_text(yaml.safe_dump(content))
        assert resolved(load_config(RunConfig, path), has_gpu=has_gpu) == ran


@pytest.mark.parametrize("has_gpu", [True, False])
def test_nothing_that_was_decided_stands_there_as_open(models: dict[bool, Path], tmp_path: Path, has_gpu: bool) -> None:
    """What was null or auto until a run's parts asked for it. On GPUs SGLang sizes the KV cache, and a rank chooses its layers."""
    words = ["rollout.engine.context_length=null", "correction.preset=tis-token"]
    config = resolved(small(models[False], *words), has_gpu=has_gpu)
    written = yaml.safe_load(write(tmp_path, config).read_text())
    requests, context = config.rollout.engine.max_running_requests, config.rollout.engine.resolved_context
    shown = {
        "rollout.slots": written["rollout"]["slots"],
        "context": written["rollout"]["engine"]["context_length"],
        "cache": written["rollout"]["engine"]["max_total_tokens"],
        "probe": written["weight_sync"]["max_probe_difference"],
        "cpus": written["ray"]["num_cpus"],
        "init": (written["init"]["learner"]["device"], written["init"]["learner"]["dtype"]),
        "layers": written["learner"]["layers"],
        "share": written["rollout"]["engine"]["gpu_share"],
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


def test_a_limit_of_the_probe_that_is_given_holds_alone(models: dict[bool, Path]) -> None:
    limits = ProbeLimits.of_run(resolved(small(models[False], "weight_sync.max_probe_difference=0.3"), has_gpu=False))
    assert (limits.largest, limits.median) == (0.3, float("inf"))


def test_an_engine_s_share_of_a_gpu_may_be_less_than_its_worker_s_but_not_more(models: dict[bool, Path]) -> None:
    """gpus_per_worker is what Ray has reserved; the rest of the GPU is somebody else's."""
    for share, refused in ((0.3, False), (0.4, False), (0.5, True)):
        config = with_devices(small(models[False], "rollout.gpus_per_worker=0.4", f"rollout.engine.gpu_share={share}"), has_gpu=True)
        assert config.rollout.engine.gpu_share == share
        assert [f"gpu_share = {share}" in error.reason for error in unfit_shares(config)] == [True] * refused


def test_null_has_a_setting_derived_again(models: dict[bool, Path]) -> None:
    """What a recipe gives, the command line takes away: as a refusal of it advises."""
    given = ["ray.num_cpus=9", "deadlines.start_s=7", "learner.batch_invariant=true", "rollout.slots=3"]
    keys = [word.partition("=")[0] for word in given]
    with pytest.raises(ConfigError, match=r"learner\.batch_invariant: true with true_on_policy: false.*or to null: then it follows"):
        resolved_strictly(small(models[False], *given))
    again = small(models[False], *given, *(f"{key}=null" for key in keys))
    assert resolved_strictly(again) == resolved_strictly(small(models[False]))
    assert resolved(small(models[False], *given), has_gpu=False) != resolved(small(models[False]), has_gpu=False)


def resolved_strictly(config: RunConfig) -> RunConfig:
    return config_for_model(with_devices(config, has_gpu=False), config.model, has_weights=True)


NOT_IN_A_RECIPE = [
    ("deadlines.step_s=3", "deadlines.step_s = 3"),
    ("deadlines={start_s: 5, sync_s: 3}", "deadlines.sync_s = 3"),
    ("rollout.engine={threads: 1, deadlines: {update_s: 3}}", "rollout.engine.deadlines.update_s = 3"),
    ("learner.collective_timeout_s=3", "learner.collective_timeout_s = 3"),
]


@pytest.mark.parametrize(("word", "said"), NOT_IN_A_RECIPE)
def test_what_a_run_always_derives_is_refused_by_name_in_a_recipe(models: dict[bool, Path], word: str, said: str) -> None:
    """config.yaml of a run has it; there it is what ran."""
    with pytest.raises(ConfigError) as caught:
        small(models[False], word)
    assert str(caught.value).startswith(f"command line: {said}: no key of a recipe, a run derives it (")


def test_a_run_s_config_yaml_is_no_recipe(models: dict[bool, Path], tmp_path: Path) -> None:
    """One sentence, and not one for each key that no recipe has."""
    path = write(tmp_path, resolved(small(models[False]), has_gpu=False))
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, path)
    assert str(caught.value) == f"{path}: that is what a run has run with, resolved; its recipe is {tmp_path / 'recipe.yaml'}"


def test_an_engine_of_several_ranks_has_no_share(models: dict[bool, Path]) -> None:
    ranks = ("rollout.engine.tensor_parallel=2", "learner.batch_invariant=false")
    (refused,) = unfit_shares(with_devices(small(models[False], "rollout.engine.gpu_share=0.5", *ranks), has_gpu=True))
    assert "gpu_share = 0.5 with tensor_parallel = 2" in refused.reason
    assert not list(unfit_shares(with_devices(small(models[False], *ranks), has_gpu=True)))


def test_a_learning_rate_that_nobody_gave_is_one_for_the_kind_of_model(models: dict[bool, Path], tmp_path: Path) -> None:
    """1e-4 takes a pretrained model apart. A checkpoint has the files of its model's folder, so a resume finds the same."""
    folder = tmp_path / "model"
    shutil.copytree(models[False], folder)
    pretrained, from_nothing = (1e-6, "a pretrained model"), (1e-4, "a model made from nothing")
    for record, (rate, kind) in (("", pretrained), ('{"source": {"name": "x"}}', pretrained), ('{"source": null}', from_nothing)):
        if record:
            (folder / INIT_RECORD).write_text(record)
            assert INIT_RECORD in side_files(folder)
        config, facts = check_on_paper(with_devices(small(folder, "learner.learning_rate=null"), has_gpu=False))
        said = [str(one) for one in on_paper(facts, config) if str(one).startswith("learner.learning_rate")]
        assert config.learner.learning_rate == rate
        assert len(said) == 1 and said[0].startswith(f"learner.learning_rate = {rate:g}, the default for {kind}")
        assert resolved(small(folder, "learner.learning_rate=0.5"), has_gpu=False).learner.learning_rate == 0.5
    (folder / INIT_RECORD).unlink()
    with pytest.raises(ConfigError, match="min_learning_rate = 5e-05 is above learning_rate = 1e-06"):
        falling = with_devices(small(folder, "learner.learning_rate=null", "learner.min_learning_rate=5e-5"), has_gpu=False)
        config_for_model(falling, folder, has_weights=True)


def test_a_contradiction_is_told_without_the_model(models: dict[bool, Path]) -> None:
    """evenkeel doctor asks of a run's folder alone."""
    with pytest.raises(ConfigError, match=r"projection_parts: 3 with true_on_policy: true and learner\.tensor_parallel: 1:"):
        refuse_contradictions(small(models[False], "true_on_policy=true", "rollout.engine.projection_parts=3"))
    refuse_contradictions(small(models[False], "rollout.engine.projection_parts=3"))


def test_an_engine_s_processes_get_what_was_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their settings travel as JSON: without derived values an engine of true on-policy would compute as any other."""
    engine = EngineConfig(device="cpu", dtype="float32", batch_invariant=True, projection_parts=3).with_context(64)
    monkeypatch.setenv(VARIABLE, PluginSettings(engine_id="x", engine=engine).as_variable())
    assert PluginSettings.from_environment().engine == engine
