"""`doctor` and `plan` tell what `train` would stop at, by the same checks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.cli import app
from evenkeel.correction.errors import ConfigError, DataError, EvenkeelError
from evenkeel.doctor.facts import PaperFacts
from evenkeel.doctor.gather import paper_facts
from evenkeel.doctor.on_paper import on_paper
from evenkeel.doctor.start_checks import check_on_paper
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.families import OBSTACLES, OTHER_MODEL
from evenkeel.plan.layouts import Gpus, layouts
from evenkeel.plan.shape import ModelShape
from evenkeel.preparation import check_inputs, prepare
from evenkeel.recipe import load_config
from tests.actors.known_models import QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B, save_config
from tests.tiny_models import save_tiny_model, save_tiny_tokenizer

RECIPES = Path(__file__).parents[3] / "recipes"
SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
H100 = Gpus.parse("H100x8")
OLMO2 = {**QWEN3_8B, "model_type": "olmo2"}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}
WINDOW = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}
FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}}
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}}
GROUPS = "learner.routing_replay=rollout rollout.engine.tensor_parallel=8 rollout.engine.attention_data_parallel=4 rollout.workers=2"
SCORED = "rollout.reward={kind: exact_match}"


def test_a_resume_looks_at_the_folder_that_it_goes_on_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it has been copied, and wherever the resume is called: where a new run would be made is of no interest."""
    model = save_config(tmp_path, QWEN3_8B)
    config = with_devices(load_config(RunConfig, RECIPES / "qwen3_8b_8gpu.yaml", ["run_dir=/nobodys/runs/one"]), has_gpu=False)
    monkeypatch.setattr("os.access", lambda *_: False)
    looked_at: list[Path] = []
    monkeypatch.setattr("shutil.disk_usage", lambda path: looked_at.append(Path(path)) or SimpleNamespace(free=1))
    assert paper_facts(config, model).closed_folder == "/"
    assert paper_facts(config, model, is_resumed=True).closed_folder == ""
    assert looked_at == [Path("/"), model]


def test_names_of_modules_are_looked_for_where_a_reward_is_and_where_python_looks_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("evenkeel.py", "rollout.py", "socket.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    model = save_config(tmp_path, QWEN3_8B)
    gym, own = (with_devices(load_config(RunConfig, recipe, []), has_gpu=False) for recipe in (RECIPES / "nano_spell_backward.yaml", SMALL))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert paper_facts(gym, model).taken_names == ()
    assert paper_facts(own, model).taken_names == (f"{tmp_path}/evenkeel.py", f"{tmp_path}/socket.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # evenkeel's own are found first even so
    found = paper_facts(own, model)
    assert (found.taken_names, found.stand_ins) == ((), (f"{tmp_path}/socket.py",))


@pytest.mark.parametrize(
    ("name", "model", "gpus"),
    [
        ("qwen3_0.6b_1gpu", QWEN3_06B, "A10Gx1"),
        ("qwen3_0.6b_1gpu", QWEN3_06B, "22GBx1"),  # what torch sees of it
        ("qwen3_0.6b_1gpu", QWEN3_06B, "L4x1"),
        ("qwen3_0.6b_1gpu", QWEN3_06B, "RTX4090x1"),
        ("qwen3_0.6b_1gpu", QWEN3_06B, "RTX3090x1"),
        ("qwen3_0.6b_1gpu", QWEN3_06B, "A6000x1"),
        ("qwen3_8b_8gpu", QWEN3_8B, "H100x8"),
        ("qwen3_30b_a3b_4nodes", QWEN3_30B_A3B, "H200x8x4"),
    ],
)
def test_nothing_is_found_against_a_recipe_on_the_gpus_that_it_names(name: str, model: dict[str, Any], gpus: str, tmp_path: Path) -> None:
    words = ["doctor", str(RECIPES / f"{name}.yaml"), f"model={save_config(tmp_path, model)}", "--gpus", gpus, "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert [one for one in json.loads(done.stdout)["findings"] if one["level"] != "note"] == []


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_gpus_without_kernels_are_refused_by_their_name_alone(command: str, tmp_path: Path) -> None:
    words = [command, str(RECIPES / "qwen3_0.6b_1gpu.yaml"), f"model={save_config(tmp_path, QWEN3_06B)}", "--gpus", "T4x1", "--json"]
    found = json.loads(CliRunner().invoke(app, words).stdout)["findings"]
    assert any(one["level"] == "fail" and "GPUs of sm_75 are too old" in one["sentence"] for one in found), found


@pytest.mark.parametrize(("model", "is_shared"), [(QWEN3_30B_A3B, True), (QWEN3_8B, False)])
def test_the_model_decides_whether_a_pair_s_optimizer_is_shared(model: dict[str, Any], is_shared: bool, tmp_path: Path) -> None:
    """Two tensor-parallel ranks hold the same experts, and of a dense model nothing twice."""
    words = [f"model={save_config(tmp_path, model)}", *["learner.data_parallel=1", "learner.expert_parallel=1"]]
    config = with_devices(load_config(RunConfig, RECIPES / "qwen3_30b_a3b_4nodes.yaml", words), has_gpu=True)
    assert check_on_paper(config, meant=[H100])[0].learner.distributed_optimizer is is_shared


@pytest.mark.parametrize(
    ("model", "overrides", "said", "setting"),
    [
        (QWEN3_8B, "true_on_policy=true", "rollout.engine.device = cuda: the batch-invariant operators", "true_on_policy: false"),
        (QWEN3_30B_A3B, "true_on_policy=true", "model: qwen3_moe has 128 experts: rows grouped by expert", "true_on_policy: false"),
        (QWEN3_8B, "true_on_policy=true learner.float32_head=true", "learner.float32_head: true: the engines don't", "Set it to false"),
        (OLMO2, "", "learner.tensor_parallel = 2: olmo2 normalises queries and keys over the channels of all heads", "Set it to 1, and"),
        (QWEN3_8B | WINDOW, "", "use_sliding_window = True of qwen3 has no counterpart in the learner", "Set model to another"),
        (QWEN3_8B | {"rope_parameters": YARN}, "", "rope_type = yarn of qwen3 has no counterpart", "Set model to another"),
        (QWEN3_30B_A3B, GROUPS, "rollout.engine.attention_data_parallel = 4 with learner.routing_replay", "attention_data_parallel"),
        (QWEN3_8B | FP8, "", "quantization_config = fp8 of qwen3 has no counterpart in the learner, which does", "Set model to another"),
        (QWEN3_8B | AWQ, "", "quantization_config = awq of qwen3 has no counterpart in the learner, which does", "Set model to another"),
    ],
)
def test_of_gpus_that_aren_t_here(tmp_path: Path, model: dict[str, Any], overrides: str, said: str, setting: str) -> None:
    """From config.json alone."""
    words = [f"model={save_config(tmp_path, model)}", *overrides.split()]
    config = with_devices(load_config(RunConfig, RECIPES / "qwen3_8b_8gpu.yaml", words), has_gpu=True)
    config, facts = check_on_paper(config, meant=[H100])
    found = [one for one in on_paper(facts, config) if one.severity == "fail" and said in one.sentence]
    assert [setting in one.setting for one in found] == [True], facts.refused


@pytest.mark.parametrize("words", [["doctor", "--gpus", "H100x8"], ["plan"]])
def test_both_commands_ask(tmp_path: Path, words: list[str]) -> None:
    model = save_config(tmp_path, QWEN3_8B | WINDOW)
    done = CliRunner().invoke(app, [*words, str(RECIPES / "qwen3_8b_8gpu.yaml"), f"model={model}"])
    assert "use_sliding_window = True of qwen3" in done.stdout and "1 failure: the run can't work like this" in done.stdout, done.output


@pytest.mark.parametrize("words", [["doctor", "--gpus", "H100x8"], ["plan"], ["doctor"]])
def test_what_leaves_devices_and_types_undecided_is_told_of_both_sides_in_json_too(words: list[str]) -> None:
    """A learner on the CPU computes in float32, for which TransformerEngine has no use, and engines on a GPU don't take it."""
    recipe = [str(RECIPES / "qwen3_8b_8gpu.yaml"), "learner.device=cpu", "learner.layers=transformer_engine", "ray.address=null"]
    done = CliRunner().invoke(app, [*words, *recipe, "--json"])
    found = json.loads(done.stdout)["findings"]
    of_both = ("layers = transformer_engine: ", "rollout.engine.dtype = float32 with device = cuda")
    assert [(one["level"], text in one["sentence"]) for one, text in zip(found, of_both, strict=True)] == [("fail", True)] * 2, found
    assert done.exit_code == 1


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An override: the task is a file of twenty questions, where a recipe's would be read from the hub."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(20)))
    return f"rollout.task={{kind: file, path: {path}, held_out_size: 2}}"


@pytest.mark.parametrize("words", [["doctor", "--gpus", "H100x8"], ["plan"], ["doctor"]])
def test_a_model_that_isn_t_there_is_a_finding(words: list[str], rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenkeel.actors.settings.devices.visible_gpus", lambda: 8)
    words = [*words, str(RECIPES / "qwen3_8b_8gpu.yaml"), f"model={tmp_path / 'none'}", rows]
    done = CliRunner().invoke(app, [*words, "--json"])
    found, *rest = json.loads(done.stdout)["findings"]
    assert {one["level"] for one in rest} == {"note"} and "they need the config.json of a model" in rest[0]["sentence"]
    assert len(rest) == (2 if words[1].endswith(".yaml") and words[0] == "doctor" else 1), "here its questions have been read"
    assert "none: no such folder. Name a" in found["sentence"] and found["level"] == "fail" and done.exit_code == 1
    in_words = CliRunner().invoke(app, words)
    assert in_words.stdout.rstrip().endswith("1 failure: the run can't work like this")


@pytest.mark.parametrize("words", [["doctor", "--gpus", "H100x8"], ["plan"], ["doctor"]])
@pytest.mark.parametrize("kind", sorted(OBSTACLES))
def test_a_known_family_is_refused_with_the_option_in_the_way_as_train_refuses_it(
    words: list[str], kind: str, rows: str, tmp_path: Path
) -> None:
    """Not with the list of families alone: what a later version would have to learn is in the option."""
    model = save_config(tmp_path, QWEN3_8B | {"model_type": kind})
    done = CliRunner().invoke(app, [*words, str(RECIPES / "qwen3_8b_8gpu.yaml"), f"model={model}", rows, "--json"])
    found = next(one for one in json.loads(done.stdout)["findings"] if "model_type" in one["sentence"])
    assert f"model_type = {kind} can't be trained because of {OBSTACLES[kind]}; supported are glm4" in found["sentence"]
    assert (found["level"], found["setting"], done.exit_code) == ("fail", OTHER_MODEL, 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(save_tiny_tokenizer(tmp_path_factory.mktemp("models") / "whole"))


def without(folder: Path, whole: Path, pattern: str = "", **options: Any) -> Path:
    """A copy without some files, and with other options in its config.json."""
    left_out = set(whole.glob(pattern)) if pattern else set()
    folder.mkdir()
    for path in set(whole.iterdir()) - left_out:
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(json.loads((whole / "config.json").read_text()) | options))
    return folder


@pytest.mark.parametrize(
    ("pattern", "options", "overrides", "said", "remedy"),
    [
        ("*.safetensors", {}, [], r"no \*\.safetensors in it", "save the weights in that format (save_pretrained does)"),
        ("", {"intermediate_size": 96}, [], "its config.json and its safetensors describe different models", "Put back those that belong"),
        ("", WINDOW, [], "use_sliding_window = True of qwen3", "Set model to another one"),
        ("", FP8, [], "quantization_config = fp8 of qwen3", "Set model to another one"),
        ("", {}, ["true_on_policy=true", "learner.threads=4"], "learner.threads = 4: with more than 2", "Or set true_on_policy: false"),
    ],
)
def test_of_a_run_on_this_machine(
    tmp_path: Path, whole: Path, pattern: str, options: dict[str, Any], overrides: list[str], said: str, remedy: str
) -> None:
    """In the words in which `train` would refuse it, and apart from them what to change."""
    model = without(tmp_path / "model", whole, pattern, **options)
    config = load_config(RunConfig, SMALL, [f"model={model}", f"run_dir={tmp_path}", SCORED, *overrides])
    config_of_run, facts = check_on_paper(with_devices(config, has_gpu=False))
    with pytest.raises(EvenkeelError, match=said) as stopped:
        prepare(config)
    (refusal,) = (*facts.refused, *facts.lacking)
    assert (str(refusal), refusal.remedy) == (str(stopped.value), stopped.value.remedy)
    (found,) = [one for one in on_paper(facts, config_of_run) if one.severity == "fail"]
    assert found.setting.startswith(remedy) and str(found) == str(refusal)


def test_a_folder_without_weights_and_tokenizer_and_a_task_without_rows_are_each_named(tmp_path: Path, whole: Path) -> None:
    model = without(tmp_path / "model", whole, "[!c]*")
    config = load_config(RunConfig, SMALL, [f"model={model}", SCORED, "rollout.task={kind: file, path: none.jsonl}"])
    config, facts = check_on_paper(with_devices(config, has_gpu=False))
    (failed,) = [one.sentence for one in on_paper(facts, config) if one.severity == "fail"]
    lacking: list[EvenkeelError] = []
    assert check_inputs(config, model, lacking=lacking).task is None
    found = "\n".join([failed, *map(str, lacking)])
    assert all(text in found for text in ("no *.safetensors in it", "no tokenizer", "none.jsonl: no such file"))


def test_nothing_is_said_of_a_whole_folder_and_the_run_gets_what_train_resolves(whole: Path, tmp_path: Path) -> None:
    config = load_config(RunConfig, SMALL, [f"model={whole}", f"run_dir={tmp_path}", SCORED, "true_on_policy=true"])
    config, facts = check_on_paper(with_devices(config, has_gpu=False))
    assert facts.refused == facts.lacking == () and [one for one in on_paper(facts, config) if one.severity == "fail"] == []
    assert config.learner.batch_invariant and config.rollout.engine.batch_invariant


def test_a_door_beyond_loopback_is_said_to_have_no_tls(whole: Path) -> None:
    """And one on loopback isn't."""
    words = [f"model={whole}", "rollout.reward={kind: agent}"]
    said = "rollout.agent.bind = node: the agents' door listens beyond loopback, and there is no TLS"
    for bind, count in (("node", 1), ("'::1'", 0)):
        config = load_config(RunConfig, SMALL, [*words, f"rollout.agent={{command: [python], bind: {bind}}}"])
        assert [str(one).startswith(said) for one in check_inputs(config, None).found if "TLS" in str(one)] == [True] * count


def test_the_context_is_decided_by_the_model_s_folder_and_a_longer_one_is_refused(whole: Path, tmp_path: Path) -> None:
    """Once, for all that asks for it: SGLang's arguments, the longest prompt, and what memory is planned for."""
    words = [f"model={whole}", f"run_dir={tmp_path}", SCORED]
    of_model = ModelShape.read(whole).context
    for given, found in (("null", of_model), ("100", 100)):
        config = with_devices(load_config(RunConfig, SMALL, [*words, f"rollout.engine.context_length={given}"]), has_gpu=False)
        config, _ = check_on_paper(config)
        engine = config.rollout.engine
        assert (engine.resolved_context, engine.sglang_arguments("m", 0)["context_length"]) == (found, found)
        assert engine.max_total_tokens == min(65_536, engine.max_running_requests * found)
        assert config.rollout.longest_prompt(config.rollout.only_entry) == found - config.rollout.sampling.max_tokens - 2
    longer = [f"rollout.engine.context_length={of_model + 1}"]
    for more, said in ((longer, "more than the model's context"), ([f"rollout.sampling.max_tokens={of_model}"], "no room for a prompt")):
        context = [] if more is longer else ["rollout.engine.context_length=null"]
        config = with_devices(load_config(RunConfig, SMALL, [*words, *context, *more]), has_gpu=False)
        told = [one.sentence for one in on_paper(*reversed(check_on_paper(config))) if one.severity == "fail"]
        assert [said in one for one in told] == [True]


def test_doctor_judges_the_deadlines_that_the_run_will_have(tmp_path: Path, whole: Path) -> None:
    """From the bytes of the weights in the folder, which no config.json tells. Without weights: from those that config.json means."""
    words = [f"run_dir={tmp_path}", "rollout.reward={kind: reasoning_gym}", "rollout.sampling.max_tokens=8", "deadlines.bytes_per_s=100"]
    config = load_config(RunConfig, SMALL, [*words, f"model={whole}"])
    told, facts = check_on_paper(with_devices(config, has_gpu=False))
    runs, _, _ = prepare(config)
    assert (told.deadlines, told.rollout.engine.deadlines) == (runs.deadlines, runs.rollout.engine.deadlines)
    size = sum(path.stat().st_size for path in whole.glob("*.safetensors"))
    assert told.rollout.engine.deadlines.update_s == pytest.approx(120 + size / 100)
    bare = load_config(RunConfig, SMALL, [*words, f"model={without(tmp_path / 'bare', whole, '*.safetensors')}"])
    meant, _ = check_on_paper(with_devices(bare, has_gpu=False))
    assert meant.rollout.engine.deadlines.update_s == pytest.approx(120 + facts.shape.weight_bytes("bfloat16") / 100)


def test_what_is_no_folder_is_told_how_the_hub_s_are_named(tmp_path: Path) -> None:
    name, relative = "hf:ORGANISATION/NAME", Path("Qwen/Qwen3-0.6B")
    meant = "hf:Qwen/Qwen3-0.6B if that is its name there"
    for folder, reason, hub in (
        (relative, "no such folder", meant),
        (relative.absolute(), "no such folder", meant),
        (tmp_path / "none", "no such folder", name),
        (tmp_path, "it has no config.json", name),
    ):
        with pytest.raises(DataError, match=f"model = {folder}: {reason}. .* or a model on the hub as {hub};"):
            ModelShape.read(folder)


def test_no_layout_is_offered_that_the_learner_refuses() -> None:
    """OLMo 2 normalises over all heads: no tensor parallelism."""
    found = layouts(ModelShape.of(OLMO2), LearnerConfig(dtype="bfloat16").on_this_machine(), 4, H100.memory, longest=1, loads_other=False)
    assert found and {one.config.tensor_parallel for one in found} == {1}


def test_a_reason_without_a_remedy_is_a_sentence_alone() -> None:
    config = with_devices(load_config(RunConfig, RECIPES / "qwen3_8b_8gpu.yaml", []), has_gpu=True)
    refused = (DataError("it can't be; so it is. Really"), DataError("it is so", remedy="do this"), ConfigError("a; b", remedy="Set c: d"))
    facts = PaperFacts(ModelShape.of(QWEN3_8B), (H100.memory,), refused=refused)
    found = [(one.sentence, one.setting) for one in on_paper(facts, config)]
    assert found == [("it can't be; so it is. Really", ""), ("it is so", "do this"), ("a; b", "Set c: d")]


def test_without_the_model_all_is_said_that_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, with an empty cache: who then gets config.json would meet the rest one by one."""

    def away(_: Path) -> Path:
        raise DataError("not in the cache")

    monkeypatch.setattr("evenkeel.doctor.start_checks.config_folder", away)
    wrong = ["rollout.engine.tensor_parallel=2", "rollout.engine.engine_args.nonsense=1", "learner.gpus_per_rank=0.5"]
    for command in ("plan", "doctor"):
        done = CliRunner().invoke(app, [command, str(RECIPES / "qwen3_8b_8gpu.yaml"), *wrong, "--gpus", "H100x8", "--json"])
        found = [(one["level"], one["sentence"], one["setting"]) for one in json.loads(done.stdout)["findings"]]
        assert done.exit_code == 1 and found[0][:2] == ("fail", "not in the cache")
        for part in ("the run asks for 10 GPUs", "engine_args.nonsense: SGLang has no such argument", "learner.gpus_per_rank = 0.5 with 4"):
            assert any(level == "fail" and part in sentence for level, sentence, _ in found), (part, found)
        level, sentence, setting = found[-1]
        assert level == "note" and "they need the config.json of a model that can be trained" in sentence
        assert "hf download Qwen/Qwen3-8B config.json" in setting


def test_without_the_model_this_machine_s_gpus_are_counted_all_the_same(rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `train` counts them, and as `--gpus` has those of other machines counted."""
    on_gpus = [rows, "learner.device=cuda", "rollout.engine.device=cuda", "ray.address=null", f"model={tmp_path}", "--json"]
    for there, is_short in ((0, True), (7, True), (8, False)):
        monkeypatch.setattr("evenkeel.actors.settings.devices.visible_gpus", lambda there=there: there)
        done = CliRunner().invoke(app, ["doctor", str(RECIPES / "qwen3_8b_8gpu.yaml"), *on_gpus])
        said = [one["sentence"] for one in json.loads(done.stdout)["findings"] if one["level"] == "fail"]
        assert "it has no config.json" in said[0] and any("8 GPUs are needed, one for each" in one for one in said) is is_short, said
    shares = ["learner.gpus_per_rank=0.4", "learner.tensor_parallel=1", "learner.sequence_parallel=false"]
    done = CliRunner().invoke(app, ["doctor", str(RECIPES / "qwen3_8b_8gpu.yaml"), *on_gpus, *shares])
    said = [one["sentence"] for one in json.loads(done.stdout)["findings"]]
    assert len(said) == len(set(said)) and any("two of them would fit on one GPU" in one for one in said), "no reason is told twice"


@pytest.mark.parametrize("has_file", [False, True])
def test_how_to_get_config_json_is_said_only_where_it_lacks(has_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of the hub that can't be trained the file is there: getting it again changes nothing."""

    def find(_: Path) -> Path:
        if has_file:
            return save_config(tmp_path, QWEN3_8B | {"model_type": "gemma3_text"})
        raise DataError("not in the cache")

    monkeypatch.setattr("evenkeel.doctor.start_checks.config_folder", find)
    words = [str(RECIPES / "qwen3_8b_8gpu.yaml"), "model=hf:google/gemma-3-12b", "--gpus", "H100x8", "--json"]
    first, *_, note = json.loads(CliRunner().invoke(app, ["doctor", *words]).stdout)["findings"]
    assert ("can't be trained because of" in first["sentence"]) is has_file and "they need the config.json" in note["sentence"]
    assert ("hf download google/gemma-3-12b config.json" in note["setting"]) is not has_file


def test_without_the_model_a_missing_file_of_questions_is_said_too(tmp_path: Path) -> None:
    words = ["doctor", str(RECIPES / "qwen3_30b_a3b_4nodes.yaml"), f"model={tmp_path}", "ray.address=null", "--json"]
    done = CliRunner().invoke(app, [*words, "learner.device=cpu", "rollout.engine.device=cpu", f"rollout.task.path={tmp_path}/q.jsonl"])
    said = [one["sentence"] for one in json.loads(done.stdout)["findings"]]
    assert "it has no config.json" in said[0] and any("q.jsonl" in sentence for sentence in said), said
