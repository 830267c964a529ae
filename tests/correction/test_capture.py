"""Comparing what two engines made of the same tokens."""

from __future__ import annotations

import math

import pytest
import torch

from evenkeel.correction.errors import EngineError
from evenkeel.engines.capture import FUSED, CapturedRows, OperatorPlace, compare_captures, sequence_start

LOGITS = OperatorPlace("logits")


def rows(tokens: list[int], values: list[float]) -> CapturedRows:
    return CapturedRows(torch.tensor(tokens), torch.tensor(values)[:, None])


def test_rows_are_matched_by_token_and_each_place_in_the_order_of_computation() -> None:
    """The engine has token 4 twice (prefilled again), and once otherwise; the learner lacks token 9."""
    norm, down = OperatorPlace("norm", 10), OperatorPlace("down", 2)
    engine = {LOGITS: rows([1], [2.0]), norm: rows([4, 1, 4, 9], [0.5, 1.0, 0.75, 3.0]), down: rows([1], [0.0])}
    learner = {LOGITS: rows([1], [2.5]), norm: rows([1, 4], [1.0, 0.5]), down: rows([1], [-0.0])}
    found = compare_captures(engine, learner)
    assert [str(gap.place) for gap in found] == ["layers.2.down", "layers.10.norm", "logits"]
    assert [(gap.rows, gap.differing, gap.largest, gap.first_token) for gap in found] == [
        (1, 0, 0.0, None), (3, 1, 0.25, 4), (1, 1, 0.5, 1),
    ]  # fmt: skip


def test_not_a_number_is_an_infinite_difference() -> None:
    embedding = OperatorPlace("embedding")
    (gap,) = compare_captures({embedding: rows([0], [math.nan])}, {embedding: rows([0], [math.nan])})
    assert (gap.differing, gap.largest) == (1, math.inf)


def test_places_of_one_side_and_captures_without_a_common_token_are_refused() -> None:
    with pytest.raises(EngineError, match=r"1 place in SGLang alone, 0 in Megatron alone, the first is layers\.0\.q_norm: "):
        compare_captures({OperatorPlace("q_norm", 0): rows([0], [1.0])}, {})
    with pytest.raises(EngineError, match="no common tokens"):
        compare_captures({LOGITS: rows([0], [1.0])}, {LOGITS: rows([1], [1.0])})


def test_what_the_engine_computes_in_one_kernel_is_compared_at_the_next_place() -> None:
    """SGLang on a GPU shows no norms of queries and keys; the learner always does. On a CPU, and of any other place, both have to."""
    learner = {OperatorPlace(name, 0): rows([0], [1.0]) for name in ("q_norm", "k_norm", "rotary_q", "norm")}
    engine = {place: value for place, value in learner.items() if place.operator in ("rotary_q", "norm")}
    assert [str(gap.place) for gap in compare_captures(engine, learner, FUSED)] == ["layers.0.norm", "layers.0.rotary_q"]
    with pytest.raises(EngineError, match=r"0 places in SGLang alone, 2 in Megatron alone, the first is layers\.0\.q_norm: "):
        compare_captures(engine, learner)
    with pytest.raises(EngineError, match=r"1 in Megatron alone, the first is layers\.0\.rotary_q"):
        compare_captures({OperatorPlace("norm", 0): rows([0], [1.0])}, learner, FUSED)


def test_a_sequence_is_found_by_some_of_its_tokens() -> None:
    sequences = [[5, 6, 7], [5, 6, 8, 9]]
    assert sequence_start(sequences, [0, 2], [5, 8]) == 3
    assert sequence_start(sequences, [0, 1], [5, 6]) == 0
    assert sequence_start(sequences, [3], [7]) is None
