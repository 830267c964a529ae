"""What the contract refuses, by name; the comparison of logprobs; the check of the processor."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.errors import ConfigError, EngineError
from evenkeel.engines import operators
from evenkeel.engines.agreement import Processor, compare
from evenkeel.engines.contract import Contract, SideSettings

MODEL = {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
ENGINE = SideSettings(name="rollout.engine", device="cpu", dtype="float32", threads=1)
LEARNER = SideSettings(name="learner", device="cpu", dtype="float32", threads=2)


def test_what_can_be_honoured() -> None:
    left_over = {"num_experts": 8}  # no layer of a dense family has them
    assert Contract.of(MODEL | left_over, ENGINE, LEARNER) == Contract.of(MODEL, ENGINE, LEARNER)
    for family in ("qwen3", "qwen2", "llama"):
        contract = Contract.of(MODEL | {"model_type": family}, ENGINE, LEARNER)
        assert contract.learner_settings == {"batch_invariant": True, "dtype": "float32"}
        assert contract.engine_settings == contract.learner_settings | {"projection_parts": 1}
    for dtype, ranks in (("float32", 4), ("bfloat16", 2)):
        engine, learner = (dataclasses.replace(side, dtype=dtype) for side in (ENGINE, LEARNER))
        split = Contract.of(MODEL, engine, dataclasses.replace(learner, tensor_parallel=ranks))
        assert split.engine_settings["projection_parts"] == ranks, "the engine adds what the learner's ranks add"


@pytest.mark.parametrize(
    ("model", "engine", "learner", "message"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 8}, {}, {}, "qwen3_moe has 8 experts.*router"),
        ({"model_type": "gpt2"}, {}, {}, "model_type = gpt2.*qwen3, qwen2, llama"),
        ({"use_sliding_window": True}, {}, {}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn"}}, {}, {}, "rope_type = yarn"),
        ({}, {"dtype": "float16"}, {}, r"rollout\.engine\.dtype = float16: only float32 and bfloat16 have been compared"),
        ({}, {}, {"dtype": "bfloat16"}, r"rollout\.engine\.dtype = float32, learner\.dtype = bfloat16: set both"),
        ({}, {"device": "cuda"}, {}, r"rollout\.engine\.device = cuda.*deterministic"),
        ({}, {}, {"tensor_parallel": 2, "sequence_parallel": True}, r"learner\.sequence_parallel = true"),
        ({}, {"tensor_parallel": 2}, {}, r"rollout\.engine\.tensor_parallel = 2: .*bits are not the learner's"),
        ({}, {"threads": 4}, {}, r"rollout\.engine\.threads = 4"),
        ({}, {"attention_backend": "stock"}, {}, "attention_backend = stock"),
        ({}, {"weight_update_mode": "in_place"}, {}, "in_place.*retract"),
        ({}, {"arguments": {"quantization": "fp8"}}, {}, r"engine_args\.quantization"),
    ],
)
def test_what_is_refused_by_name(model: dict[str, Any], engine: dict[str, Any], learner: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Contract.of(MODEL | model, dataclasses.replace(ENGINE, **engine), dataclasses.replace(LEARNER, **learner))


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"gpt2.*rollout\.engine\.threads.*learner\.dtype"):
        Contract.of({"model_type": "gpt2"}, dataclasses.replace(ENGINE, threads=3), dataclasses.replace(LEARNER, dtype="bfloat16"))


def batch() -> PackedBatch:
    """Two sequences of 3 tokens; the third token of the second is of an older version."""
    return PackedBatch(
        token_ids=torch.tensor([1, 2, 3, 4, 5, 6]),
        offsets=torch.tensor([0, 3, 6]),
        loss_mask=torch.tensor([False, True, True, False, True, True]),
        behavior_logprobs=torch.tensor([9.0, -1.0, -2.0, 9.0, -3.0, -4.0]),
        advantages=torch.zeros(6),
        weight_versions=torch.tensor([-1, 7, 7, -1, 7, 6], dtype=torch.int32),
        group_ids=torch.zeros(2, dtype=torch.int64),
        learner_version=7,
    )


def test_only_tokens_of_the_learners_version_are_compared() -> None:
    agreement = compare(batch(), torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0, -5.0]))
    assert (agreement.tokens, agreement.differing, agreement.equal_share, agreement.largest_difference) == (3, 0, 1.0, 0.0)
    assert agreement.first is None


def test_one_bit_is_found_and_named() -> None:
    target = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0, -5.0])
    target[4] = torch.nextafter(target[4], torch.tensor(0.0))
    agreement = compare(batch(), target)
    assert (agreement.tokens, agreement.differing) == (3, 1)
    assert agreement.equal_share == pytest.approx(2 / 3)
    assert agreement.largest_difference == 2.0**-22  # the spacing of float32 between 2 and 4
    assert agreement.first is not None
    assert (agreement.first.sequence, agreement.first.position, agreement.first.token_id, agreement.first.version) == (1, 1, 5, 7)
    assert "token 5 at position 1 of sequence 1, weights v7" in str(agreement.first) and "-3.0" in str(agreement.first)


def test_not_a_number_equals_nothing() -> None:
    agreement = compare(batch(), torch.tensor([0.0, torch.nan, -2.0, 0.0, -3.0, -4.0]))
    assert (agreement.differing, agreement.largest_difference) == (1, float("inf"))


def test_nothing_to_compare() -> None:
    agreement = compare(dataclasses.replace(batch(), learner_version=9), torch.zeros(6))
    assert (agreement.tokens, agreement.equal_share, agreement.first) == (0, 1.0, None)


def test_the_processor_computes_alike_with_one_and_two_threads() -> None:
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(Processor.of_this_process())
    torch.set_num_threads(before)
    found[0].require_same(found[1], this="one thread", that="two")
    other = dataclasses.replace(found[0], sample="0")
    with pytest.raises(EngineError, match=r"rollout worker 0 and the learner don't compute alike \(sample: "):
        found[0].require_same(other, this="rollout worker 0", that="the learner")


def test_a_processor_on_which_rows_depend_on_their_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding this processor's products of 1 to 3 rows are other than those of many."""
    monkeypatch.setattr(operators, "pad_rows", lambda x: x)
    with pytest.raises(ConfigError, match="a product of 1 rows"):
        Processor.of_this_process()
