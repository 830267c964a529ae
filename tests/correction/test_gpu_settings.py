"""The GPU settings of the contract, taken by the packages whose switches they name. Nothing is computed on a GPU.

What the packages read from the environment, and which operators their kernels replace, can't be asked without a GPU: it is not tested.
"""

from __future__ import annotations

import inspect

import pytest

from correction.engines.contract import Contract
from correction.engines.gpu import gpu_settings


def test_one_rank_and_two() -> None:
    alone, split = (gpu_settings(Contract("qwen3", ranks)) for ranks in (1, 2))
    assert (alone.engine_arguments["tp_size"], alone.transformer_config["tensor_model_parallel_size"]) == (1, 1)
    assert (split.engine_arguments["tp_size"], split.transformer_config["tensor_model_parallel_size"]) == (2, 2)
    assert alone.learner_environment == {} and split.learner_environment["NCCL_ALGO"] == "allreduce:tree"


def test_megatron_takes_the_settings_and_no_other_attention() -> None:
    from learner.megatron import TransformerConfig

    backends = type(TransformerConfig.attention_backend)
    settings = gpu_settings(Contract("qwen3")).transformer_config
    sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "params_dtype": "bfloat16"}
    config = TransformerConfig(**sizes, **settings | {"attention_backend": backends[settings["attention_backend"]]})
    assert config.batch_invariant_mode
    with pytest.raises(AssertionError, match="Batch invariant mode only supports FlashAttention"):
        TransformerConfig(**sizes, **settings | {"attention_backend": backends.fused})


def test_sglang_has_the_arguments() -> None:
    from sglang.srt.arg_groups.choices import RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    settings = gpu_settings(Contract("qwen3", 2))
    assert settings.engine_arguments.keys() <= inspect.signature(ServerArgs).parameters.keys()
    assert settings.engine_arguments["attention_backend"] in RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND, "with its prefix cache"
    channels = str(envs.SGLANG_DETERMINISTIC_NCCL_NCHANNELS.default)
    assert settings.learner_environment["NCCL_MIN_NCHANNELS"] == settings.learner_environment["NCCL_MAX_NCHANNELS"] == channels
