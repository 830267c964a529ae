"""Causal attention over packed sequences and their continuations, for Megatron's `core_attention` slot.

Every other operator of the model works on the packed rows as they are. Attention alone needs sequences apart. There are two kinds of calls:

* Sequences: neighbours of equal length are one call on a view of the pack, without padding and without a copy.
* Continuations (answers to a prompt that is computed once): their queries meet the keys of the sequence that they go on from and their own.
  They come in tiles. A short answer is too little for a call's inner loops, so a tile holds several of one prompt, kept apart by a mask;
  a long one is cut into tiles that meet no keys beyond their own end, because a mask saves no work. Tiles of about equal size are one
  padded call. Keys and values are copied for each tile, not for each answer.

Where attention is batch-invariant every text is tiles of its own, sequences too, so that blocks of keys begin where they begin in the text.

Which rows there are, and how they hang together, is decided in inputs.py; a kernel for this slot needs what PackedSequences holds. On a GPU
in half precision torch's variable-length kernel takes all sequences at once; it has no continuations, so that prompts aren't shared there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from evenkeel.engines.operators import whole_blocks
from evenkeel.learner.model.inputs import RowLayout
from evenkeel.learner.model.megatron import PackedSeqParams
from evenkeel.learner.model.routing import Routes

TILE_ROWS = 32
"""Rows of queries that torch's CPU kernel works on at a time: fewer in a tile leave it idle, more meet keys that are masked."""
LONGEST_TILE = 128
"""Rows from which on a continuation is cut: longer tiles compute more scores that are masked, shorter ones copy more keys."""
MOST_PADDING = 1.25
"""Largest ratio of the scores that a padded call computes to the scores that its tiles need."""
MOST_KEYS_WIDENED = 80
"""Keys up to which a call in float32 on a CPU is computed in float64."""
MOST_SCORES = 2**16
"""Attention scores of a batch-invariant call, for each head: it holds them all at once, and they should fit into a core's cache."""


@dataclass(frozen=True, slots=True)
class EqualLengths:
    """Neighbouring sequences of equal length: one call on a view of the packed rows."""

    count: int
    length: int

    @property
    def tokens(self) -> int:
        return self.count * self.length


@dataclass(frozen=True, slots=True)
class TileCall:
    """n tiles, padded to the same size. A tile is some continuations of one sequence, or a part of one."""

    query_rows: Tensor
    """[n, Q] int64: rows of the continuations; row 0 where a tile has fewer."""
    key_rows: Tensor
    """[n, K] int64: rows of the sequence that they go on from, then of the continuations themselves; row 0 where a tile has fewer.
    If batch-invariant, K is a multiple of operators.BLOCK, and the key of position p in the text stands in column p."""
    mask: Tensor
    """[n, 1, Q, K] bool: which keys a query meets. Torch keeps it for the backward pass as a bias in the type of the queries."""


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # Megatron has no types
    """Megatron's description of packed sequences, with what the attention calls need; made once for each micro-batch.

    Megatron uses cu_seqlens for its rotary embedding alone, and is given one sequence, because PolicyModel hands it one angle for each
    row. max_seqlen is the longest real sequence, its continuation included: the length of the table of angles.
    """

    bounds: Tensor | None = None
    """[T + 1] int32: the sequences' bounds among the packed rows."""
    equal_lengths: tuple[EqualLengths, ...] = ()
    """Parts in packed order; together they hold every row of the sequences once. Empty if batch-invariant."""
    tile_calls: tuple[TileCall, ...] = ()
    """Together they hold every other row once: those of the continuations, and if batch-invariant all."""
    row_in_tiles: Tensor | None = None
    """[these rows] int64: where each is found in the outputs of the tile calls, laid end to end."""
    routes: Routes | None = None
    """The experts of these rows, where routers are watched or told what to take."""


def pack(layout: RowLayout, device: torch.device, *, batch_invariant: bool = False) -> tuple[Tensor, PackedSequences]:
    """Positions and attention of a layout.

    Args:
        batch_invariant: make tiles that BatchInvariantAttention can take.
    Returns: [1, R] int64 position of each row in its text, and what the attention needs to know.
    """
    lengths = layout.sequences + layout.continuations
    begins = (0,) * len(layout.sequences) + tuple(layout.sequences[t] for t in layout.continued)
    positions = torch.tensor([place for begin, length in zip(begins, lengths, strict=True) for place in range(begin, begin + length)])
    longest = max(begin + length for begin, length in zip(begins, lengths, strict=True))
    whole = torch.tensor([0, len(positions)], dtype=torch.int32)  # on the host: Megatron reads its numbers there, in every layer
    equal_lengths = () if batch_invariant else tuple(EqualLengths(len(list(same)), length) for length, same in groupby(layout.sequences))
    calls, row_in_tiles = _tile_calls(layout, positions, device, batch_invariant)
    return positions[None].to(device), PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        bounds=torch.tensor([0, *accumulate(layout.sequences)], dtype=torch.int32, device=device),
        equal_lengths=equal_lengths,
        tile_calls=calls,
        row_in_tiles=row_in_tiles,
    )


# Which continuations share a tile, and which tiles share a call


@dataclass(frozen=True, slots=True)
class _Tile:
    before: range
    """Rows of the sequence that is continued."""
    own: range
    """Rows of neighbouring continuations of it, or the beginning of one."""
    queries: range
    """The last of these: all of them unless a continuation is cut."""
    keys: int
    """Rows of both; if batch-invariant padded to a multiple of a block."""

    @property
    def scores(self) -> int:
        return len(self.queries) * self.keys


def _tile_calls(
    layout: RowLayout, positions: Tensor, device: torch.device, batch_invariant: bool
) -> tuple[tuple[TileCall, ...], Tensor | None]:
    """The calls, and where their outputs have each row that they hold."""
    if not (layout.continuations or batch_invariant):
        return (), None
    owners = torch.tensor([-1] * len(layout.sequences) + list(range(len(layout.continuations))))
    owner = torch.repeat_interleave(owners, torch.tensor(layout.sequences + layout.continuations))  # -1: a row of a sequence
    calls, outputs = [], []
    found = _of_similar_size(_single_tiles(layout), MOST_SCORES) if batch_invariant else _of_similar_size(_tiles(layout))
    for tiles in found:
        queries = pad_sequence([torch.tensor(tile.queries) for tile in tiles], batch_first=True, padding_value=-1)
        keys = pad_sequence([torch.tensor([*tile.before, *tile.own]) for tile in tiles], batch_first=True, padding_value=-1)
        keys = F.pad(keys, (0, max(tile.keys for tile in tiles) - keys.shape[1]), value=-1)
        outputs.append(queries.flatten())
        queries = queries.clamp(min=0)  # row 0 stands at position 0 and so meets the first key of any tile: no row of scores is all masked
        query, key = queries[:, :, None], keys[:, None, :]
        is_same_text = (owner[key] < 0) | (owner[key] == owner[query])
        mask = (key >= 0) & is_same_text & (positions[key] <= positions[query])
        calls.append(TileCall(queries.to(device), keys.clamp(min=0).to(device), mask[:, None].to(device)))
    rows = torch.cat(outputs)
    is_real = rows >= 0
    row_in_tiles = torch.empty(int(is_real.sum()), dtype=torch.int64)
    row_in_tiles[rows[is_real] - (len(positions) - len(row_in_tiles))] = is_real.nonzero()[:, 0]
    return tuple(calls), row_in_tiles.to(device)


def _tiles(layout: RowLayout) -> Iterator[_Tile]:
    """Each sequence's short continuations in about equal tiles of about TILE_ROWS, and equal parts of each long one."""
    rows = _rows_of_texts(layout)
    own = zip(layout.continued, rows[len(layout.sequences) :], strict=True)
    for (t, is_long), same in groupby(own, key=lambda pair: (pair[0], len(pair[1]) > LONGEST_TILE)):
        members, shared = [member for _, member in same], len(rows[t])
        if is_long:
            for member in members:
                for part in _equal_parts(len(member), LONGEST_TILE):
                    yield _Tile(rows[t], member[: part.stop], member[part.start : part.stop], shared + part.stop)
            continue
        ends = {member.stop - members[0].start for member in members}
        begin = 0
        for part in _equal_parts(members[-1].stop - members[0].start, TILE_ROWS):
            end = min(end for end in ends if end >= part.stop)  # no continuation is split
            if end > begin:
                whole = range(members[0].start + begin, members[0].start + end)
                yield _Tile(rows[t], whole, whole, shared + len(whole))
                begin = end


def _single_tiles(layout: RowLayout) -> Iterator[_Tile]:
    """Equal parts of each sequence and of each continuation."""
    rows = _rows_of_texts(layout)
    befores = [range(0)] * len(layout.sequences) + [rows[t] for t in layout.continued]
    for before, own in zip(befores, rows, strict=True):
        for part in _equal_parts(len(own), LONGEST_TILE):
            yield _Tile(before, own[: part.stop], own[part.start : part.stop], whole_blocks(len(before) + part.stop))


def _rows_of_texts(layout: RowLayout) -> list[range]:
    """Rows of each sequence, then of each continuation."""
    return [range(a, b) for a, b in pairwise(accumulate(layout.sequences + layout.continuations, initial=0))]


def _equal_parts(total: int, most: int) -> list[range]:
    """Parts of about equal size, as few as possible with at most `most` each."""
    count = math.ceil(total / most)
    return [range(total * i // count, total * (i + 1) // count) for i in range(count)]


def _of_similar_size(tiles: Iterator[_Tile], most_scores: float = math.inf) -> Iterator[list[_Tile]]:
    """Yields tiles in groups, largest first: as many as can be padded to one size without much waste."""
    batch: list[_Tile] = []
    needed = keys = queries = 0
    for tile in sorted(tiles, key=lambda tile: (-tile.keys, -len(tile.queries))):
        keys, queries, needed = max(keys, tile.keys), max(queries, len(tile.queries)), needed + tile.scores
        if batch and (len(batch) + 1) * keys * queries > min(MOST_PADDING * needed, most_scores):
            yield batch
            batch, keys, queries, needed = [], tile.keys, len(tile.queries), tile.scores
        batch.append(tile)
    yield batch


# Kernels


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None) -> Tensor:
    """Causal attention of each sequence to itself, and of each continuation to what it continues and to itself.

    Args:
        query: [R, heads, width]; key, value: [R, groups, width].
    Returns: [R, heads, width].
    """
    sizes = [one.tokens for one in packed.equal_lengths]
    rows = sum(sizes)
    pieces = zip(packed.equal_lengths, *(torch.split(x[:rows], sizes) for x in (query, key, value)), strict=True)
    outputs = [_attend_equal_lengths(one, q, k, v, scale) for one, q, k, v in pieces]
    if packed.row_in_tiles is not None:
        tiles = [_attend_tiles(call, query, key, value, scale) for call in packed.tile_calls]
        outputs.append(torch.cat(tiles).index_select(0, packed.row_in_tiles))
    return torch.cat(outputs)


def _attend_equal_lengths(one: EqualLengths, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention of sequences of one length. Returns: [count * length, heads, width]."""
    q, k, v = (_widened(x, one.length).view(one.count, one.length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return output.transpose(1, 2).flatten(0, 1).to(query.dtype)


def _attend_tiles(call: TileCall, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """[n * Q, heads, width], padding included. Gradients of keys that several tiles meet add up in index_select's backward."""
    rows = ((query, call.query_rows), (key, call.key_rows), (value, call.key_rows))
    q, k, v = (_widened(_rows(x, which), keys=call.key_rows.shape[1]) for x, which in rows)
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=call.mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return output.transpose(1, 2).flatten(0, 1).to(query.dtype)


def _widened(x: Tensor, keys: int) -> Tensor:
    """Float32 on a CPU as float64, where there are few keys: rounded back, it shows nothing of a kernel's order of addition.

    Attention is where engine and learner add in different orders; all else that they compute row by row is nearly always the same to the
    last bit. The engine's kernel computes in float64, too. A difference of 1e-7 in the attention of one layer can
    be one of 1e-5 in a logprob: before, one in forty of the nano recipe's synchronous batches had a token with |log ratio| above 2e-5.
    Attention to many keys is too large a part of a step to compute it at half the speed, in twice the memory.
    """
    return x.double() if keys <= MOST_KEYS_WIDENED and x.device.type == "cpu" and x.dtype == torch.float32 else x


def _rows(x: Tensor, which: Tensor) -> Tensor:
    """[n, heads, L, width]: the rows of x, [R, heads, width], that `which`, [n, L], names."""
    return x.index_select(0, which.flatten()).view(*which.shape, *x.shape[1:]).transpose(1, 2)


def variable_length_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None) -> Tensor:
    """The same by torch's variable-length FlashAttention kernel: CUDA, half precision, no continuations."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = packed.bounds, packed.max_seqlen_q
    assert bounds is not None and packed.row_in_tiles is None
    output = varlen_attn(
        query, key, value, bounds, bounds, longest, longest, window_size=(-1, 0), scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    assert isinstance(output, Tensor)  # a tuple only when return_aux is asked for
    return output


def choose_kernel(device_type: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The attention for a device and a type."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return variable_length_attention if device_type == "cuda" and is_half else packed_attention


def can_share_prompts(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the kernel for a device and a type takes continuations."""
    return choose_kernel(device_type, dtype) is packed_attention


class PackedAttention(torch.nn.Module):
    """Megatron's `core_attention` for packed sequences. It has no weights and no dropout."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: Any, softmax_scale: float | None = None, **_: Any
    ):
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSequences,
        attn_mask_type: Any = None,
        attention_bias: None = None,
    ) -> Tensor:
        kernel = choose_kernel(query.device.type, query.dtype)  # not by what the machine has: a learner on its CPU is possible, too
        return kernel(query, key, value, packed_seq_params, self.scale).flatten(1)
