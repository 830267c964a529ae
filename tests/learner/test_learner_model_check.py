"""The shapes that a config asks for are those that transformers writes; files that can't be read are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from evenkeel.correction.errors import DataError
from evenkeel.learner.hf.families import FAMILIES
from evenkeel.learner.hf.folder import INDEX_FILE, HFWeights, check_trainable, expected_shapes
from evenkeel.learner.hf.nano import NanoModelConfig, build_nano_model
from evenkeel.learner.weights.export import write_hf_folder
from tests.learner.learner_cases import save_model


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_expected_shapes_are_those_of_the_files(tmp_path: Path, family: str, tie: bool) -> None:
    """Sizes that all differ, so that none stands for another."""
    key_heads = 4 if family == "olmoe" else 2  # it is refused with fewer
    sizes = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": key_heads}
    folder = save_model(tmp_path, family, tie=tie, **sizes)
    assert expected_shapes(check_trainable(folder)) == HFWeights(folder).shapes()
    assert ("lm_head.weight" in expected_shapes(check_trainable(folder))) is not tie


def test_expected_shapes_of_a_nano_model_with_experts(tmp_path: Path) -> None:
    config = NanoModelConfig(layers=1, hidden_size=64, heads=2, key_value_heads=1, head_dim=32, experts=4, tie_word_embeddings=False)
    build_nano_model(tmp_path, ["spell this"], config)
    assert expected_shapes(check_trainable(tmp_path)) == HFWeights(tmp_path).shapes()


def test_a_copy_of_a_tied_head_is_no_surplus(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tie=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    check_trainable(folder)
    save_file(tensors | {"score.weight": tensors["model.norm.weight"].clone()}, path)
    with pytest.raises(DataError, match=r"score\.weight has no place in the model"):
        check_trainable(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    check_trainable(folder)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files | {"model.norm.weight": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(DataError, match=r"model-00002-of-00002\.safetensors: is not there"):
        check_trainable(folder)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files | {"no.such": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(DataError, match=r"model-00001-of-00002\.safetensors: no tensor no\.such in it"):
        check_trainable(folder)
    (folder / INDEX_FILE).write_text("{}")
    with pytest.raises(DataError, match="it has no weight_map"):
        check_trainable(folder)


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    """transformers takes model.safetensors before an index; SGLang the files of the index, and without one every *.safetensors."""
    folder, shard = save_model(tmp_path), tmp_path / "model-00001-of-00002.safetensors"
    one, index = folder / "model.safetensors", folder / INDEX_FILE
    tensors = load_file(one)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, one.name)}))
    check_trainable(folder)  # an index of the one file
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, shard)
    check_trainable(folder)  # and a file that nobody reads
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard.name)}))
    with pytest.raises(DataError, match=rf"two sets of weights, {one.name}, which transformers .* and those of {INDEX_FILE}, .*Remove"):
        check_trainable(folder)
    index.unlink()
    with pytest.raises(DataError, match=rf"two sets of weights, {one.name}, which transformers .* and {shard.name}, which SGLang .*Remove"):
        check_trainable(folder)
    shard.rename(folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").touch()
    check_trainable(folder)  # Mistral's own form alone, which both leave out, as they do what isn't safetensors
    (folder / "consolidated.safetensors").unlink()
    save_file({"lora_A.weight": tensors["model.norm.weight"]}, folder / "adapter_model.safetensors")
    check_trainable(folder)  # no second set


def test_a_folder_that_is_written_over_keeps_no_file_of_the_weights_before(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}))
    write_hf_folder(tensors.items(), {}, folder)
    assert sorted(path.name for path in folder.glob("model*")) == ["model.safetensors"]
    check_trainable(folder)
