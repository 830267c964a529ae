"""Batch-invariant operators: a row's bits don't depend on its neighbours, on padding, or on one or two threads; the values are the usual.

1. linear, head, SiLU, log-softmax, norms: any row count gives the same rows.
2. Attention: prefill of any length, in any cut, and decode in any batch agree bit for bit.
3. Values and gradients are those of torch's own operators, to rounding.
4. Torch's own operators fail the same comparisons: the tests can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evenkeel.engines import operators
from evenkeel.engines.operators import whole_blocks

ROW_COUNTS = [*range(1, 18), 23, 31, 32, 33, 63, 64, 65, 100, 127, 129, 200, 333, 511, 777, 1000]
SHAPES = [(64, 64), (192, 1152), (576, 192), (192, 151), (896, 1024), (2048, 96)]
GROUPS, HEADS, SIZE = 2, 2, 48


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    yield request.param
    torch.set_num_threads(before)


def counts_that_differ(operator: Callable[[Tensor], Tensor], x: Tensor) -> list[int]:
    """Row counts at which the first rows are other than those of all rows with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = operator(x)
    torch.set_num_threads(threads)
    return [rows for rows in ROW_COUNTS if not torch.equal(operator(x[:rows]), whole[:rows])]


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_linear_rows(inner: int, outer: int) -> None:
    x, weight, bias = torch.randn(1000, inner), torch.randn(outer, inner), torch.randn(outer)
    assert counts_that_differ(lambda x: operators.linear(x, weight), x) == []
    assert counts_that_differ(lambda x: operators.linear(x, weight, bias), x) == []
    assert counts_that_differ(lambda x: F.linear(x, weight), x), "torch's own depends on the count"
    torch.testing.assert_close(operators.linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [7, 96, 97, 128])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.7])
def test_head_rows_and_padded_vocabulary(vocabulary: int, temperature: float) -> None:
    """SGLang's head has rows of padding up to a multiple of 64 and a tensor of temperatures, the learner's has neither."""
    hidden, weight = torch.randn(1000, 64), torch.randn(vocabulary, 64)

    def logprobs(x: Tensor) -> Tensor:
        return operators.log_softmax(operators.head_logits(x, weight), temperature)

    assert counts_that_differ(logprobs, hidden) == []
    padded = torch.cat([weight, torch.randn(whole_blocks(vocabulary) - vocabulary, 64)])
    engine = operators.linear(hidden, padded)[:, :vocabulary]
    assert torch.equal(operators.log_softmax(engine, torch.full((1000, 1), temperature)), logprobs(hidden))
    torch.testing.assert_close(logprobs(hidden), torch.log_softmax(hidden @ weight.T / temperature, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [48, 77, 96, 576])
def test_silu_rows_and_layouts(width: int, threads: int) -> None:
    x = torch.randn(1000, 2 * width) * 4
    assert counts_that_differ(lambda x: operators.silu(x[:, :width]), x) == []
    assert torch.equal(operators.silu(x[:, :width]), operators.silu(x[:, :width].contiguous()))
    torch.testing.assert_close(operators.silu(x), F.silu(x), rtol=1e-6, atol=1e-6)
    if width == 77:
        assert counts_that_differ(lambda x: F.silu(x[:, :width].contiguous()), x), "torch's own has another exp for the last elements"


def test_silu_of_extremes() -> None:
    x = torch.tensor([-1000.0, -89.0, -0.0, 0.0, 89.0, 1000.0], requires_grad=True)
    y = operators.silu(x)
    assert torch.equal(y.detach(), torch.tensor([0.0, 0.0, 0.0, 0.0, 89.0, 1000.0]))
    y.sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 0.0, 0.5, 0.5, 1.0, 1.0])) if x.grad is not None else False


@pytest.mark.parametrize("width", [16, 48, 64, 192])
def test_norms_and_angles_are_row_independent_as_they_are(width: int) -> None:
    x = torch.randn(1000, width) * 3
    assert counts_that_differ(lambda x: operators.rms_norm(x, torch.arange(width) / width, 1e-6)[0], x) == []
    assert counts_that_differ(lambda x: torch.cos(x * 50), x) == []
    assert counts_that_differ(lambda x: torch.log_softmax(x, -1), x) == []


def test_a_product_in_two_parts_is_the_sum_of_two_ranks() -> None:
    x, weight, bias = torch.randn(1000, 96), torch.randn(192, 96), torch.randn(192)
    ranks = [operators.linear(x[:, a:b].contiguous(), weight[:, a:b].contiguous()) for a, b in ((0, 48), (48, 96))]
    in_parts = operators.linear(x, weight, bias, parts=2)
    assert torch.equal(in_parts, ranks[0] + ranks[1] + bias) and torch.equal(ranks[0] + ranks[1], ranks[1] + ranks[0])
    assert not torch.equal(in_parts, operators.linear(x, weight, bias))
    assert counts_that_differ(lambda x: operators.linear(x, weight, parts=2), x) == []
    assert torch.equal(torch.cat([operators.linear(x, half) for half in weight.chunk(2)], 1), operators.linear(x, weight)), "columns"


def test_half_precision_is_float32_rounded_once() -> None:
    x, weight, gate = (torch.randn(*shape).bfloat16() for shape in ((1000, 96), (192, 96), (1000, 77)))
    assert counts_that_differ(lambda x: operators.linear(x, weight), x) == []
    assert counts_that_differ(operators.silu, gate) == []
    assert torch.equal(operators.linear(x, weight), operators.linear(x.float(), weight.float()).bfloat16())
    assert torch.equal(operators.silu(gate), operators.silu(gate.float()).bfloat16())
    q, k, v = (x.bfloat16() for x in sequence(130))
    found = prefill(q, k, v, 130)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, prefill(q.float(), k.float(), v.float(), 130).bfloat16())
    assert operators.head_logits(x, weight).dtype is torch.float32


def sequence(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """query [1, G, R, length, D], key and value [1, G, whole blocks, D], what is beyond the length being noise."""
    room = whole_blocks(length)
    return torch.randn(1, GROUPS, HEADS, length, SIZE), torch.randn(1, GROUPS, room, SIZE), torch.randn(1, GROUPS, room, SIZE)


LENGTH = 700
SCALE = SIZE**-0.5


def prefill(q: Tensor, k: Tensor, v: Tensor, length: int, first: int = 0) -> Tensor:
    room = whole_blocks(length)
    return operators.causal_attention(q[:, :, :, first:length], k[:, :, :room], v[:, :, :room], SCALE, first=first)[0]


def test_prefill_of_any_length_and_cut() -> None:
    q, k, v = sequence(LENGTH)
    whole = prefill(q, k, v, LENGTH)
    for length in (1, 2, 3, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 699):
        assert torch.equal(prefill(q, k, v, length), whole[:, :, :, :length]), length
        for cached in {0, length // 2, length - 1}:
            assert torch.equal(prefill(q, k, v, length, cached), whole[:, :, :, cached:length]), (length, cached)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_decode_in_any_batch_equals_prefill(batch: int) -> None:
    q, k, v = sequence(LENGTH)
    whole = prefill(q, k, v, LENGTH)
    lengths = torch.randint(1, LENGTH + 1, (batch,))
    room = whole_blocks(int(lengths.max()))
    seen = torch.arange(room)[None] < lengths[:, None]
    keys, values = (x[:, :, :room].expand(batch, -1, -1, -1).clone() for x in (k, v))
    keys.transpose(1, 2)[~seen] = 7.0  # finite, and of no meaning
    queries, bias = q[0, :, :, lengths - 1].movedim(2, 0)[:, :, :, None], operators.key_bias(seen)[:, None, None, None]
    out, _ = operators.attention(queries, keys, values, bias, SCALE)
    for i, length in enumerate(lengths.tolist()):
        assert torch.equal(out[i, :, :, 0], whole[0, :, :, length - 1]), (i, length)


def test_sdpa_would_differ() -> None:
    """The negative control of the two above: torch's own rows depend on the length."""
    q, k, v = sequence(LENGTH)

    def sdpa(length: int) -> Tensor:
        query = q[:, :, :, :length].flatten(1, 2)
        return F.scaled_dot_product_attention(query, k[:, :, :length], v[:, :, :length], is_causal=True, enable_gqa=True)

    whole = sdpa(LENGTH)
    assert any(not torch.equal(sdpa(length), whole[:, :, :length]) for length in (1, 5, 65, 300, 513))
    torch.testing.assert_close(prefill(q, k, v, LENGTH).flatten(1, 2), whole, rtol=1e-4, atol=1e-5)


def test_gradients_of_linear_and_silu() -> None:
    """Finite differences in float64."""
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 6), (4, 6), (4,)))
    assert torch.autograd.gradcheck(operators.linear, (x, weight, bias))
    assert torch.autograd.gradcheck(operators.silu, (x,))
