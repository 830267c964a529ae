"""The GPU settings of the contract, against the packages whose switches they name. Nothing is computed on a GPU."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from correction.engines.contract import Contract
from correction.engines.gpu import gpu_settings


def installed(path: str) -> Path:
    """A file or folder of an installed package, without importing the package."""
    name, _, rest = path.partition("/")
    spec = find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / rest


SGLANG_KERNELS = installed("sglang/srt/batch_invariant_ops/batch_invariant_ops.py").read_text()
MEGATRON_KERNELS = installed("megatron/core/transformer/custom_layers/batch_invariant_kernels.py").read_text()


def test_one_rank_and_two() -> None:
    alone, split = (gpu_settings(Contract("qwen3", ranks)) for ranks in (1, 2))
    assert (alone.engine_arguments["tp_size"], alone.transformer_config["tensor_model_parallel_size"]) == (1, 1)
    assert (split.engine_arguments["tp_size"], split.transformer_config["tensor_model_parallel_size"]) == (2, 2)
    assert alone.learner_environment == {} and split.learner_environment["NCCL_ALGO"] == "allreduce:tree"


def test_megatron_has_the_switch_and_insists_on_its_attention() -> None:
    from learner.megatron import TransformerConfig

    settings = gpu_settings(Contract("qwen3")).transformer_config
    assert settings.keys() <= {field.name for field in fields(TransformerConfig)}
    check, backend = inspect.getsource(TransformerConfig.__post_init__), settings["attention_backend"]
    assert re.search(rf"if self\.batch_invariant_mode:\s+assert \(\s+self\.attention_backend == AttnBackend\.{backend}\b", check)


def test_sglang_has_the_switches() -> None:
    settings = gpu_settings(Contract("qwen3", 2))
    files = {path.name: path.read_text() for path in installed("sglang/srt/arg_groups").rglob("*.py")}
    arguments = {name for text in files.values() for name in re.findall(r"^    (\w+): ", text, re.M)}
    assert settings.engine_arguments.keys() <= arguments
    choices = re.search(r"RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND = \[(.*?)\]", files["choices.py"])
    assert choices is not None and f'"{settings.engine_arguments["attention_backend"]}"' in choices[1]
    assert all(variable in SGLANG_KERNELS for variable in settings.engine_environment)
    assert all(variable in files["attention_hook.py"] for variable in settings.learner_environment)
    channels = f"SGLANG_DETERMINISTIC_NCCL_NCHANNELS = EnvInt({settings.learner_environment['NCCL_MIN_NCHANNELS']})"
    assert channels in installed("sglang/srt/environ.py").read_text()


def test_both_sides_replace_the_same_operators_of_torch() -> None:
    """And SGLang some more, which a dense model's learner does not call."""
    found = (set(re.findall(r'_LIB\.impl\(\s*"aten::([\w.]+)"', kernels)) for kernels in (SGLANG_KERNELS, MEGATRON_KERNELS))
    engine, learner = found
    assert learner == {"mm", "addmm", "_log_softmax", "mean.dim"} <= engine
    assert "bmm" in engine - learner
