"""Megatron's model says what Hugging Face's says, packed or not, and gives the weights back bit for bit.

1. Logits of every supported family equal Hugging Face's to 1e-5 in float32, heads tied and untied.
2. A sequence's logprobs don't depend on what it is packed with, nor on the order in which sequences are packed.
3. Loading and saving is exact, and transformers loads the result.
4. What can't be trained is refused by name.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evenkeel.correction.errors import DataError
from evenkeel.engines.weights import WeightSpec, tensor_checksum
from evenkeel.learner.hf import families
from evenkeel.learner.hf.folder import read_config
from evenkeel.learner.model import model
from evenkeel.learner.model.attention import pack
from evenkeel.learner.model.inputs import RowLayout
from evenkeel.learner.training.step import forward_hidden
from evenkeel.learner.weights.convert import bind
from lab.weight_buckets import weight_buckets
from tests.learner.learner_cases import hf_model, hf_values, learner_on, random_batch, save_model, weights
from tests.tiny_models import LLAMA3_ROPE

FAMILIES = [
    *[("qwen3", True), ("qwen3", False), ("qwen2", True), ("llama", False), ("mistral", False), ("olmo2", False), ("olmo2", True)],
    *[("glm4", False), ("qwen3_moe", False), ("mixtral", False), ("olmoe", False)],
]


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16_384}),
    ("glm4", {"attention_bias": False}),
    ("mistral", {"head_dim": 24}),
]
"""Options of a config.json that change what is computed."""


def test_every_family_is_compared() -> None:
    assert {family for family, _ in FAMILIES} == set(families.FAMILIES)


@pytest.mark.parametrize(("family", "tie", "shape"), [(*one, {}) for one in FAMILIES] + [(name, False, shape) for name, shape in OPTIONS])
def test_logits_equal_hugging_face(tmp_path: Path, family: str, tie: bool, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron leaves its matrices unset, here NaN: whatever the folder didn't fill would be seen."""
    monkeypatch.setattr(model, "leave_unset", lambda weight: torch.nn.init.constant_(weight, torch.nan))
    folder = save_model(tmp_path / "m", family, tie=tie, **shape)
    batch = random_batch()
    with learner_on(folder) as learner, torch.no_grad():
        policy = learner._policies[0]
        unset = [name for name, tensor in itertools.chain(policy.named_parameters(), policy.named_buffers()) if not tensor.isfinite().all()]
        assert not unset
        ours = forward_hidden(policy, batch.token_ids, RowLayout(tuple(batch.lengths.tolist())))[0] @ policy.head_weight.t()
        bounds = batch.offsets.tolist()
        reference = hf_model(folder)
        theirs = torch.cat([reference(batch.token_ids[a:b][None]).logits[0] for a, b in itertools.pairwise(bounds)])
    assert theirs.abs().max() > 2  # not a comparison of zeros
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_hugging_face_under_the_temperature(tmp_path: Path, temperature: float) -> None:
    folder = save_model(tmp_path / "m")
    batch = random_batch(temperature=temperature)
    with learner_on(folder, tokens_per_microbatch=100, logprob_chunk_tokens=7) as learner:
        ours = learner.logprobs(batch)
    with torch.no_grad():
        theirs, _ = hf_values(hf_model(folder), batch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert torch.equal(ours[~batch.loss_mask], torch.zeros(int((~batch.loss_mask).sum())))


def test_what_the_host_reads_of_a_pack_stays_on_the_host() -> None:
    """Megatron reads these numbers three times in each layer; on a device each would make the host wait for all that came before."""
    positions, packed = pack(RowLayout((3, 5)), torch.device("meta"))
    assert (positions.device.type, packed.cu_seqlens_q.device.type, packed.cu_seqlens_kv.device.type) == ("meta", "cpu", "cpu")


def test_packing_changes_nothing(tmp_path: Path) -> None:
    batch = random_batch(longest=60)
    with learner_on(save_model(tmp_path / "m")) as learner:
        together = learner.logprobs(batch)
        alone = torch.cat([learner.logprobs(batch.select([i])) for i in range(batch.num_sequences)])
        order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(0)).tolist()
        shuffled = learner.logprobs(batch.select(order))
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-6)
    torch.testing.assert_close(together[batch.token_index(order)], shuffled, rtol=0, atol=2e-6)


def test_neighbours_of_equal_length_are_one_run() -> None:
    _, packed = pack(RowLayout((3, 3, 3, 5, 3)), torch.device("cpu"))
    assert [(one.count, one.length) for one in packed.equal_lengths] == [(3, 3), (1, 5), (1, 3)]


@pytest.mark.parametrize("max_seqlen_is_total", [False, True])
def test_positions_start_anew_in_each_sequence(tmp_path: Path, max_seqlen_is_total: bool) -> None:
    """Megatron reads its rotary table as one for the whole pack when it is exactly as long as the pack; only a lone sequence is."""
    folder = save_model(tmp_path / "m")
    lengths = [12] if max_seqlen_is_total else [12, 6, 6]
    ids = torch.arange(sum(lengths)) % 96
    batch = replace(
        random_batch(),
        token_ids=ids,
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        loss_mask=torch.cat([torch.arange(n) > 0 for n in lengths]),
        behavior_logprobs=torch.zeros(len(ids)),
        advantages=torch.zeros(len(ids)),
        weight_versions=torch.zeros(len(ids), dtype=torch.int32),
        group_ids=torch.zeros(len(lengths), dtype=torch.int64),
    )
    with learner_on(folder) as learner, torch.no_grad():
        torch.testing.assert_close(learner.logprobs(batch), hf_values(hf_model(folder), batch)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "tie"), FAMILIES)
def test_weights_come_back_bit_for_bit(tmp_path: Path, family: str, tie: bool) -> None:
    folder = save_model(tmp_path / "m", family, tie=tie)
    (folder / "tokenizer.json").write_text("{}")
    with learner_on(folder) as learner:
        learner.save_hf(tmp_path / "out")
        learner.save_hf(tmp_path / "out")  # again, in place
        checksums = learner.weight_checksums()
        buckets = list(weight_buckets(learner, bucket_bytes=10_000))
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert checksums == {name: tensor_checksum(tensor) for name, tensor in before.items()}
    assert len(buckets) > 3 and all(bucket.nbytes <= 10_000 or len(bucket.specs) == 1 for bucket in buckets)
    specs = [spec for bucket in buckets for spec in bucket.specs]
    assert specs == [WeightSpec(spec.name, "float32", tuple(before[spec.name].shape)) for spec in specs]
    assert len(specs) == len(before)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    ids = torch.arange(9)[None]
    assert torch.equal(hf_model(folder)(ids).logits, hf_model(tmp_path / "out")(ids).logits)


def test_a_parameter_that_no_rule_fills_is_refused(tmp_path: Path) -> None:
    """It would stay as its memory was."""
    with learner_on(save_model(tmp_path / "m")) as learner:
        policy, family = learner._policies[0], families.FAMILIES["qwen3"]
        assert len(bind(policy, family)) == len(list(policy.parameters()))
        with pytest.raises(DataError, match=r"no rule for Megatron's parameter decoder\.final_layernorm\.weight"):
            bind(policy, replace(family, rules=tuple(rule for rule in family.rules if rule.megatron != "decoder.final_layernorm.weight")))


def test_a_bucket_is_a_snapshot(tmp_path: Path) -> None:
    with learner_on(save_model(tmp_path / "m")) as learner:
        before = weights(learner)
        copies = {name: tensor.clone() for name, tensor in before.items()}
        with torch.no_grad():
            for parameter in learner._policies[0].parameters():
                parameter.add_(1.0)
    assert all(torch.equal(before[name], copies[name]) for name in before)


@pytest.mark.parametrize("family", ["qwen3", "glm4"])
def test_an_export_of_one_rank_copies_queries_keys_and_values_alone(tmp_path: Path, family: str) -> None:
    """Their rows lie apart in Megatron's tensor. All else is sent from where it is trained."""
    with learner_on(save_model(tmp_path / "m", family, tie=False)) as learner:
        trained = {p.untyped_storage().data_ptr() for policy in learner._policies for p in policy.parameters()}
        sent = [(name, one.untyped_storage().data_ptr()) for piece in learner.weights() for name, one in piece.items()]
        copied = {name.rsplit(".", 2)[1] for name, memory in sent if memory not in trained}
        assert copied == {"q_proj", "k_proj", "v_proj"} and {"gate_proj", "gate_up_proj"} & {name.rsplit(".", 2)[-2] for name, _ in sent}


def test_several_shards_are_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "m")
    monkeypatch.setattr("evenkeel.learner.weights.export.SHARD_BYTES", 20_000)
    with learner_on(folder) as learner:
        learner.save_hf(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    with learner_on(tmp_path / "out") as learner:
        found = weights(learner)
    assert all(torch.equal(tensor, found[name]) for name, tensor in load_file(folder / "model.safetensors").items())
    hf_model(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2 can't be trained; supported are glm4, llama"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type = yarn"),
        ({"intermediate_size": 64}, "gate_proj.*shape"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    folder = save_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    if "num_hidden_layers" in change:
        config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(DataError, match=message), learner_on(folder):
        pass


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mistral", {"sliding_window": 64}, "sliding_window = 64 of mistral has no counterpart in the learner, which does without it"),
        ("llama", {"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 2.0}}, "high_freq_factor = 2.0 .*supports 4.0"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "linear.*supports default and llama3"),
        ("mixtral", {"head_dim": 24}, "head_dim = 24"),
        ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv = 8\.0"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("olmoe", {"rms_norm_eps": 1e-6}, "rms_norm_eps = 1e-06 .* supports 1e-05"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads = 2 .* supports num_attention_heads"),
        ("glm4", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}, "partial_rotary_factor"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = sliding_attention"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
    ],
)
def test_options_of_families_that_stand_in_the_way(tmp_path: Path, family: str, change: dict[str, Any], message: str) -> None:
    folder = save_model(tmp_path / "m", family, tie=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(DataError, match=message):
        families.family_of(read_config(folder))


def test_a_window_that_shuts_nothing_out_is_none(tmp_path: Path) -> None:
    families.family_of(read_config(save_model(tmp_path / "m", "mistral", tie=False, sliding_window=256, max_position_embeddings=256)))


@pytest.mark.parametrize("kind", sorted(families.OBSTACLES))
def test_known_families_are_refused_with_the_option_in_the_way(kind: str) -> None:
    """Each is one that transformers knows and this learner does not."""
    from transformers import CONFIG_MAPPING

    with pytest.raises(DataError, match=f"model_type = {kind} can't be trained because of "):
        families.family_of(CONFIG_MAPPING[kind]())


def test_folders_without_config_or_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json"), learner_on(tmp_path):
        pass
    folder = save_model(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="safetensors"), learner_on(folder):
        pass
    save_file(tensors | {"score.weight": torch.zeros(1, 32)}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"score\.weight"), learner_on(folder):
        pass
