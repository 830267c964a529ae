"""What a run needs, compared with what is measured and what the models' makers publish."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evenkeel.actors.config import RunConfig
from evenkeel.actors.settings.resolve import with_devices
from evenkeel.correction.correct import correct
from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.engines.weights import in_float8
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.hf.families import FAMILIES
from evenkeel.learner.hf.folder import expected_shapes, read_config
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model.attention import RowLayout, pack
from evenkeel.learner.model_fit import check_model, layout_obstacles, setting_obstacles
from evenkeel.learner.training.logprobs import head_logprobs
from evenkeel.plan.hosts import PACKED, checkpoint_bytes, traffic
from evenkeel.plan.layouts import Gpus, layouts
from evenkeel.plan.memory import engine_memory, head_bytes, layer_activations, rank_memory, state_bytes
from evenkeel.plan.shape import ModelShape
from evenkeel.recipe import load_config
from tests.actors.known_models import LLAMA_31_8B, QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B, QWEN25_7B, save_config
from tests.learner.learner_cases import TIS, learner_on, off_policy_batch, random_batch
from tests.learner.test_learner_logprobs import peaks
from tests.tiny_models import save_tiny_model

RECIPES = Path(__file__).parents[3] / "recipes"
GB = 10**9


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN3_06B, 596_049_920),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_30B_A3B, 30_532_122_624),
        (LLAMA_31_8B, 8_030_261_248),
        (QWEN25_7B, 7_615_616_512),
    ],
)
def test_parameters_as_published(config: dict[str, Any], parameters: int) -> None:
    """The sum of the elements in the files on the hub (tied heads once)."""
    assert ModelShape.of(config).parameters == parameters


def test_figures_of_two_well_known_runs() -> None:
    """Qwen3-8B on two pairs: 8.2 GB of weights, 16.4 of gradients, 49.1 of Adam and masters a rank, half of these if they are shared.
    Qwen3-30B-A3B over 16 ranks: 18,867 tensors, 98,304 bytes a token in the cache, 61 GB, 46.9 GB a rank where others need 72.0."""
    dense, experts = ModelShape.of(QWEN3_8B), ModelShape.of(QWEN3_30B_A3B)
    pairs: dict[str, Any] = {"dtype": "bfloat16", "tensor_parallel": 2, "data_parallel": 2}
    apart, shared = (state_bytes(dense, LearnerConfig(**pairs, distributed_optimizer=one).on_this_machine()) for one in (False, True))
    assert [round(size / GB, 1) for size in apart] == [8.2, 16.4, 49.1]
    assert (round(sum(apart) / GB, 1), round(sum(shared) / GB, 1)) == (73.7, 49.1)
    spread: dict[str, Any] = {
        "dtype": "bfloat16", "tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2, "expert_parallel": 4,
        "data_parallel": 4,
    }  # fmt: skip
    apart, shared = (state_bytes(experts, LearnerConfig(**spread, distributed_optimizer=one).on_this_machine()) for one in (False, True))
    assert (sum(apart) / GB, sum(shared) / GB) == pytest.approx((72.0, 46.9), rel=0.005), "which left out the routers"
    assert (experts.tensors, experts.key_value_bytes("bfloat16")) == (18_867, 98_304)
    assert round(experts.weight_bytes("bfloat16") / GB) == 61


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [True, False])
def test_every_parameter_and_tensor_is_counted(tmp_path: Path, family: str, tie: bool) -> None:
    if FAMILIES[family].experts and tie:
        pytest.skip("SGLang's has a head of its own")
    folder = save_tiny_model(tmp_path, family, tie=tie)
    shapes = expected_shapes(read_config(folder))
    shape = ModelShape.read(folder)
    assert shape.parameters == sum(torch.Size(one).numel() for one in shapes.values())
    assert shape.tensors == len(shapes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("words", [512, 97])
def test_the_largest_tensor_is_the_embedding_or_a_projection(tmp_path: Path, family: str, words: int) -> None:
    """Of a file in which gate and up projection are one tensor, both together."""
    folder = save_tiny_model(tmp_path, family, tie=False, vocab_size=words)
    shapes = expected_shapes(read_config(folder))
    assert ModelShape.read(folder).largest_tensor_bytes("float32") == 4 * max(torch.Size(one).numel() for one in shapes.values())


def held(learner: LearnerRank) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer, by what the tensors of this rank say."""
    parameters = [parameter for policy in learner._policies for parameter in policy.parameters()]
    states = [learner.optimizer.state_of(parameter)[1] for parameter in parameters]
    optimizer = sum(value.nbytes for state in states for value in state.values() if value.dim())
    return sum(p.nbytes for p in parameters), sum(p.main_grad.nbytes for p in parameters), optimizer


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_gradients_optimizer_and_checkpoint_to_the_byte(tmp_path: Path, family: str, dtype: str) -> None:
    folder = save_tiny_model(tmp_path, family, tie=False, pad_token_id=None)
    config = LearnerConfig(dtype=dtype, device="cpu")  # type: ignore[arg-type]
    with learner_on(folder, dtype=dtype, device="cpu") as learner:
        learner.step(correct(off_policy_batch(learner), TIS), TIS, step=0)
        measured, on_disk = held(learner), learner.checkpoint_bytes()
    shape = ModelShape.read(folder)
    assert state_bytes(shape, config) == measured
    run = recipe("qwen3_8b_8gpu", folder, "learner.device=cpu", "rollout.engine.device=cpu", f"learner.dtype={dtype}", has_gpu=False)
    assert 0 <= on_disk - checkpoint_bytes(shape, run) < 0.001 * on_disk, "and a scalar for each parameter"


def kept_for_backward(learner: LearnerRank, tokens: int) -> int:
    """Bytes that autograd keeps of a forward pass on this rank, weights aside."""
    storages: dict[int, tuple[int, Tensor]] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in learner._policies[0].parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no other takes its place
        return tensor

    positions, packed = pack(RowLayout((tokens,)), torch.device("cpu"))
    ids = torch.randint(0, 500, (1, tokens))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        learner._require().chunks[0](input_ids=ids, position_ids=positions, attention_mask=None, packed_seq_params=packed)
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "olmo2", "glm4", "qwen3_moe", "mixtral"])
def test_activations_are_what_autograd_keeps(tmp_path: Path, family: str, dtype: str, recompute: bool) -> None:
    """Of one layer more, on a CPU, whose layers are the local ones."""
    settings: dict[str, Any] = {"dtype": dtype, "recompute_activations": recompute}
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160} | ({} if family == "mixtral" else {"head_dim": 16})
    folders = [save_tiny_model(tmp_path / str(n), family, tie=False, num_hidden_layers=n, **sizes) for n in (1, 2)]
    measured = []
    for folder in folders:
        with learner_on(folder, device="cpu", **settings) as learner:
            measured.append(kept_for_backward(learner, 256))
    expected = layer_activations(ModelShape.read(folders[0]), LearnerConfig(device="cpu", **settings).on_this_machine()) * 256
    assert measured[1] - measured[0] == pytest.approx(expected, rel=0.03)


def in_float32(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return head_logprobs(hidden.float(), weight.float(), targets, **options)


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "float32_head": True}])
@pytest.mark.parametrize(("tokens", "width", "rows", "chunk"), [(600, 16, 512, 48), (90, 64, 1000, 32), (16, 64, 1000, 32)])
def test_the_head_takes_what_is_alive_at_most(tokens: int, width: int, rows: int, chunk: int, settings: dict[str, Any]) -> None:
    """Of both passes, on each of two ranks; in addition there are some numbers of the tokens of a chunk."""
    config = LearnerConfig(device="cpu", tensor_parallel=2, logprob_chunk_tokens=chunk, **settings)
    shape = replace(ModelShape.of(QWEN3_06B), hidden=width, vocabulary=2 * rows)
    head = in_float32 if config.float32_head else head_logprobs
    _, measured = peaks(head, config.torch_dtype, tokens, width, rows, chunk_tokens=chunk)
    planned = head_bytes(shape, config, tokens, has_entropy_loss=True)
    assert planned <= measured <= planned + 100 * chunk


def test_what_the_ranks_share() -> None:
    """Two ways to cut a model hold it once: a stage's parameters add up, and so do those of tensor-parallel ranks but for the norms."""
    shape = ModelShape.of(QWEN3_8B)
    assert sum(shared for shared, _ in shape.split(1, 4, 1)) == shape.parameters
    whole, half = shape.split(1, 1, 1)[0][0], shape.split(2, 1, 1)[0][0]
    norms = shape.layers * (2 * 4096 + 2 * 128) + 4096
    assert 2 * half - whole == norms
    experts = ModelShape.of(QWEN3_30B_A3B)
    assert experts.split(1, 1, 8)[0][1] * 8 == experts.split(1, 1, 1)[0][1]


def recipe(name: str, model: Path, *overrides: str, has_gpu: bool = True) -> RunConfig:
    return with_devices(load_config(RunConfig, RECIPES / f"{name}.yaml", [f"model={model}", *overrides]), has_gpu=has_gpu)


def test_an_engine_s_gpu(tmp_path: Path) -> None:
    """On 80 GB; what SGLang leaves of it is in test_engine_memory.py."""
    gpu = Gpus.parse("H100x8")
    memory = engine_memory(ModelShape.of(QWEN3_30B_A3B), recipe("qwen3_8b_8gpu", save_config(tmp_path, QWEN3_30B_A3B)).rollout, gpu.memory)
    assert 93_500 < memory.tokens < 94_500, "94 thousand tokens next to 61 GB of weights"
    assert memory.longest_requests == memory.tokens // 10_240


def test_weights_in_float8_to_the_byte(tmp_path: Path) -> None:
    """What is sent of a model with blocks at edges; of Qwen3-8B, whose projections are 85 % of it, 58 % of bfloat16's bytes."""
    shape = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    folder = save_tiny_model(tmp_path / "m", tie=False, **shape)
    with learner_on(folder, dtype="bfloat16") as learner:
        sent = [one for piece in learner.weights() for one in in_float8(piece).values()]
    sizes = ModelShape.read(folder)
    assert sizes.weight_bytes("bfloat16", float8=True) == sum(one.nbytes for one in sent)
    assert sizes.largest_tensor_bytes("bfloat16", float8=True) == max(one.nbytes for one in sent) == 2 * 512 * 192
    assert replace(sizes, vocabulary=97).largest_tensor_bytes("bfloat16", float8=True) == 384 * 192, "a byte an entry"
    config = recipe("qwen3_8b_8gpu", save_config(tmp_path / "8b", QWEN3_8B), "rollout.engine.quantization=float8_block")
    large = ModelShape.of(QWEN3_8B)
    size = large.weight_bytes("bfloat16", float8=True)
    assert traffic(large, config).version == engine_memory(large, config.rollout, 80 << 30).weights == size
    assert 0.57 < size / large.weight_bytes("bfloat16") < 0.59
    both = 2 * large.hidden * (2 * large.layers + 1) + 2 * 2 * large.layers * large.head_width
    assert 2 * large.weight_bytes("bfloat16", 2, float8=True) - size == both, "norms are on both ranks, the blocks are shared"


@pytest.mark.parametrize(("family", "width"), [("qwen3_moe", "moe_intermediate_size"), ("mixtral", "intermediate_size")])
def test_experts_in_float8_to_the_byte(tmp_path: Path, family: str, width: str) -> None:
    """What is sent of eight experts, their routers in bfloat16; of Qwen3-30B-A3B, 95 % of which are experts, 51 % of bfloat16's bytes."""
    folder = save_tiny_model(tmp_path / "m", family, tie=False, hidden_size=192, num_attention_heads=6, **{width: 256})
    with learner_on(folder, dtype="bfloat16") as learner:
        sent = {name: one for piece in learner.weights() for name, one in in_float8(piece).items()}
    assert sum(one.dtype is torch.float8_e4m3fn for one in sent.values()) == 2 * (4 + 3 * 8)
    assert {one.dtype for name, one in sent.items() if name.endswith(".gate.weight")} == {torch.bfloat16}
    assert ModelShape.read(folder).weight_bytes("bfloat16", float8=True) == sum(one.nbytes for one in sent.values())
    large = ModelShape.of(QWEN3_30B_A3B)
    size = large.weight_bytes("bfloat16", float8=True)
    assert 0.51 < size / large.weight_bytes("bfloat16") < 0.52
    whole_on_both = 2 * large.layers * (large.hidden * (2 + large.experts) + 2 * large.head_width) + 2 * large.hidden
    assert 2 * large.weight_bytes("bfloat16", 2, float8=True) - size == whole_on_both, "norms and routers; blocks of experts are shared"


def test_an_engine_on_several_gpus_has_its_weights_cut_and_room_for_more_tokens(tmp_path: Path) -> None:
    """Each of two ranks has half of every matrix and of the key heads; norms, routers and small rest are on both. Of four key heads eight
    ranks have one each: two the same. SGLang leaves an eighth of a GiB for each rank, and larger graphs from four on."""
    gpu, shape = Gpus.parse("H100x8"), ModelShape.of(QWEN3_30B_A3B)
    rollout = recipe("qwen3_8b_8gpu", save_config(tmp_path, QWEN3_30B_A3B)).rollout
    engines = [rollout.engine.model_copy(update={"tensor_parallel": ranks}) for ranks in (1, 2, 8)]
    one, two, eight = (engine_memory(shape, rollout.model_copy(update={"engine": engine}), gpu.memory) for engine in engines)
    whole_on_both = 2 * shape.layers * (shape.hidden * (2 + shape.experts) + 2 * shape.head_width) + 2 * shape.hidden
    assert 2 * two.weights - one.weights == whole_on_both, "in bfloat16"
    assert (two.token_bytes, eight.token_bytes) == (one.token_bytes // 2, one.token_bytes // 4)
    assert two.tokens > 7 * one.tokens, "94 thousand next to 61 GB, 800 thousand next to 31 GB"
    both = rollout.engine.model_copy(update={"tensor_parallel": 8, "attention_data_parallel": 2})
    grouped = engine_memory(shape, rollout.model_copy(update={"engine": both}), gpu.memory)
    queries = 2 * shape.layers * shape.hidden * 2 * shape.heads // 8 * shape.head_width  # of a key head each rank has one either way
    assert grouped.weights - eight.weights == queries + 2 * shape.vocabulary * shape.hidden * 7 // 8
    assert grouped.token_bytes == eight.token_bytes and grouped.tokens > 1.8 * eight.tokens, "which no other rank has"


def test_a_batch_is_as_large_as_its_tensors() -> None:
    batch = random_batch(groups=200)
    per_token = [value for value in vars_of(batch) if value.dim() and value.shape[0] == batch.num_tokens]
    measured = sum(one.nbytes for one in per_token) / batch.num_tokens
    assert measured + 4 == PACKED, "with proximal logprobs"


def vars_of(batch: Any) -> list[Tensor]:
    return [value for name in batch.__dataclass_fields__ if isinstance(value := getattr(batch, name), Tensor)]


def test_layouts_that_fit_come_first_and_divide_the_model() -> None:
    shape, gpu = ModelShape.of(QWEN3_8B), Gpus.parse("H100x8").memory
    found = layouts(shape, LearnerConfig(device="cuda", dtype="bfloat16"), 4, gpu, longest=8192, loads_other=False)
    assert found and [one.fits for one in found] == sorted((one.fits for one in found), reverse=True)
    assert {one.config.world_size for one in found} == {4}
    assert not any(any(layout_obstacles(one.config, shape.sizes)) for one in found)
    assert found[0].memory == rank_memory(shape, found[0].config, longest=8192)
    experts = layouts(ModelShape.of(QWEN3_30B_A3B), LearnerConfig(device="cuda", dtype="bfloat16"), 4, gpu, longest=8192, loads_other=False)
    assert 1 in {one.config.data_parallel for one in experts if one.config.distributed_optimizer}, "pairs that hold the same experts"
    assert all(one.config.distributed_optimizer == one.config.has_copies(has_experts=True) for one in experts)
    odd = replace(shape, heads=6, key_heads=3)
    undivided = layouts(odd, LearnerConfig(device="cuda", dtype="bfloat16"), 4, gpu, longest=1, loads_other=False)
    assert {one.config.tensor_parallel for one in undivided} == {1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel = 3: num_attention_heads = 32, num_key_value_heads = 8 in"),
        ({"pipeline_parallel": 5}, "= 5 doesn't divide the model's 36 layers"),
        ({"expert_parallel": 2, "data_parallel": 2}, "expert_parallel = 2: qwen3 has no experts"),
    ],
)
def test_why_a_layout_can_t_be(settings: dict[str, Any], said: str) -> None:
    assert any(said in one.reason and one.remedy for one in layout_obstacles(LearnerConfig(**settings), ModelShape.of(QWEN3_8B).sizes))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mixtral", "olmoe"])
def test_a_config_json_says_what_the_learner_refuses_of_its_model(tmp_path: Path, family: str) -> None:
    """In the same words, with the same numbers: 3 ranks or stages divide neither 4 heads, 2 layers, nor 8 experts."""
    folder = save_tiny_model(tmp_path / "m", family, tie=False)
    config = LearnerConfig(tensor_parallel=3, pipeline_parallel=3, expert_parallel=3, dtype="float16", moe_aux_loss_coefficient=0.01)
    said, planned = (
        [str(one) for rule in (layout_obstacles, setting_obstacles) for one in rule(config, model)]
        for model in (read_config(folder), ModelShape.read(folder).sizes)
    )
    assert said == planned and len(said) == {"qwen3": 4, "olmoe": 6}.get(family, 5), said


def test_a_dense_model_with_left_over_experts_is_dense(tmp_path: Path) -> None:
    """Its config.json may keep sizes that its family doesn't know: learner and plan both ignore them."""
    folder = save_tiny_model(tmp_path / "m", "qwen3", tie=False)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts": 6}))
    assert read_config(folder).num_experts == 6
    for model in (read_config(folder), ModelShape.read(folder).sizes):
        check_model(LearnerConfig(tensor_parallel=2, dtype="float16"), model)
        with pytest.raises(ConfigError, match="expert_parallel = 2: qwen3 has no experts"):
            check_model(LearnerConfig(expert_parallel=2, data_parallel=2), model)


def test_gpus_by_name_and_by_memory() -> None:
    assert Gpus.parse("H100x8") == Gpus("H100", 81_559 << 20, 8, 1)
    assert (Gpus.parse("h200x8x4").count, Gpus.parse("24GBx1").memory) == (32, 24 << 30)
    assert Gpus.parse("rtx3090x4") == Gpus("RTX3090", 24_576 << 20, 4, 1), "an x in a name is none of a number"
    for wrong in ("H100y8", "Z9x8", "", "H100x0", "H100x8x0"):
        with pytest.raises(ConfigError, match="write NAMExGPUS"):
            Gpus.parse(wrong)


def test_a_family_that_isn_t_trained_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="model_type = gpt2 can't be trained; supported are glm4"):
        ModelShape.read(save_config(tmp_path, {"model_type": "gpt2"}))
    with pytest.raises(DataError, match="it doesn't say 'hidden_size'"):
        ModelShape.read(save_config(tmp_path, {key: value for key, value in QWEN3_8B.items() if key != "hidden_size"}))
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"no config\.json can be read from it"):
        ModelShape.read(tmp_path)
