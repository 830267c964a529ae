"""Every argument of SGLang is set by evenkeel, refused by name, or handed on: a new version's can't slip by."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from evenkeel.rollout.engine_settings.engine_arguments import ATTENTION_BACKENDS, HANDED_ON, refusal
from evenkeel.rollout.engine_settings.engine_config import RESERVED_ARGUMENTS, EngineConfig


def test_every_argument_of_sglang_is_set_refused_or_handed_on() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.server_args import ServerArgs

    assert set(ATTENTION_BACKEND_CHOICES) == ATTENTION_BACKENDS
    there = set(ServerArgs.__struct_fields__)
    refused = {name for name in there if refusal(name) is not None}
    assert not refused & RESERVED_ARGUMENTS.keys() and not refused & HANDED_ON and not HANDED_ON & RESERVED_ARGUMENTS.keys()
    assert there - refused - RESERVED_ARGUMENTS.keys() == HANDED_ON, "look at what is new, and put it where it belongs"


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("speculative_algorithm", "EAGLE", "not drawn by evenkeel's sampler"),
        ("speculative_moe_a2a_backend", "deepep", "not drawn by evenkeel's sampler"),
        ("preferred_sampling_params", '{"top_p": 0.9}', r"use rollout\.sampling instead"),
        ("enable_lora", True, "knows no adapter"),
        ("custom_weight_loader", ["a.b"], "weights come from the learner"),
        ("remote_instance_weight_loader_start_seed_via_transfer_engine", True, "weights come from the learner"),  # and a port is opened
        ("enable_attn_tp_input_scattered", True, r"use rollout\.engine\.tensor_parallel instead"),
        ("enable_dense_mlp_attn_tp", True, "has not been compared"),
        ("enable_two_batch_overlap", True, "has not been compared"),
        ("json_model_override_args", '{"rope_theta": 1e6}', "in the engine alone, and the learner trains what the folder's says"),
        ("hicache_storage_backend", "file", "outlive the weights"),
        ("trust_remote_code", True, "code in a model folder is never run"),
        ("nccl_port", 29_500, "of several on a node only one can"),
        ("port", 30_000, "each engine draws free ports"),
        ("host", "10.0.0.5", "every engine would take this address"),
        ("gated_launch_port", 31_000, "every engine would take this address"),
        ("kv_events_config", '{"publisher": "zmq"}', "every engine would take this address"),
        ("cpu_offload_gb", 8, "would not be those that an update writes to"),
    ],
)
def test_what_would_break_the_contract_is_refused_with_what_to_set_instead(name: str, value: object, instead: str) -> None:
    with pytest.raises(ValidationError, match=rf"engine_args\.{name} = .*{instead}"):
        EngineConfig(engine_args={name: value})


def test_a_cache_in_float8_is_mismatch_to_correct() -> None:
    """Tokens are drawn from what is computed with it, and their logprobs are of the same."""
    config = EngineConfig(device="cuda", engine_args={"kv_cache_dtype": "fp8_e4m3"}).on_this_machine()
    given = config.with_context(64).sglang_arguments("folder", 0)
    assert given["kv_cache_dtype"] == "fp8_e4m3"
