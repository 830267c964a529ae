"""An engine of several ranks: which part of each tensor a rank holds, as the ranks report it, and whether it is what was sent.

Every rank is sent whole tensors, and SGLang's own loaders take its part of them. What was taken is compared with a part that is cut here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenkeel.correction.errors import EngineError, SyncError
from evenkeel.engines.weights import WeightBucket, WeightSpec, tensor_checksum

Range = tuple[int, int]
"""First row (or column), and the one after the last."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows, or columns, of a tensor."""

    dimension: int
    """0: rows, 1: columns."""
    size: int
    """Size of that dimension in the whole tensor."""
    ranges: tuple[Range, ...]
    """One range; several if a file's tensor has several matrices stacked in it; none for an expert that other ranks hold."""

    @classmethod
    def parse(cls, text: str) -> WeightPart:
        """text: as `str` makes it, for example "0:128:64-128"."""
        dimension, size, ranges = text.split(":")
        pairs = [one.split("-") for one in ranges.split(",") if one]
        return cls(int(dimension), int(size), tuple((int(first), int(end)) for first, end in pairs))

    def __str__(self) -> str:
        return f"{self.dimension}:{self.size}:{','.join(f'{first}-{end}' for first, end in self.ranges)}"

    def shape_of_whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Args: shape: of the part."""
        return tuple(self.size if dimension == self.dimension else size for dimension, size in enumerate(shape))

    def of(self, whole: Tensor) -> Tensor:
        """The part of a tensor; a view, if it is one range."""
        pieces = [whole.narrow(self.dimension, first, end - first) for first, end in self.ranges or ((0, 0),)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dimension)


def text_of(shape: Sequence[int], dtype: str, part: WeightPart | None) -> str:
    """How a rank reports its part of a tensor: "float32:128,64" if it holds all of it, "float32:128,64@0:128:64-128" if rows 64 to 127,
    and "float32:128,64@0:128:" if none of it.

    Args:
        shape: of what the rank holds.
        dtype: torch's name without "torch.".
    """
    whole = shape if part is None else part.shape_of_whole(shape)
    return f"{dtype}:{','.join(map(str, whole))}" + ("" if part is None else f"@{part}")


@dataclass(frozen=True, slots=True)
class RankParts:
    """What the ranks of an engine hold, together."""

    specs: Mapping[str, WeightSpec]
    """Types and shapes of the whole tensors, by Hugging Face name."""
    by_rank: tuple[Mapping[str, WeightPart], ...]
    """Parts by Hugging Face name; a tensor that is not there is held whole."""

    @classmethod
    def parse(cls, answers: Sequence[Mapping[str, str]], engine: str) -> RankParts:
        """
        Args:
            answers: of each rank, HF name -> `text_of`.
            engine: its name, for messages.
        Raises: EngineError if the ranks are not parts of one model.
        """
        first = {name: text.partition("@")[0] for name, text in answers[0].items()}
        for rank, answer in enumerate(answers):
            others = {name: text.partition("@")[0] for name, text in answer.items()}
            if others != first:
                name = min(name for name in first.keys() | others.keys() if first.get(name) != others.get(name))
                raise EngineError(
                    f"{engine}: {name} is {first.get(name, 'unknown')} to rank 0 and {others.get(name, 'unknown')} to rank {rank}: they "
                    "hold parts of different models. Set rollout.engine.tensor_parallel to a number that divides the model"
                )
        parts = tuple(
            {name: WeightPart.parse(text.partition("@")[2]) for name, text in answer.items() if "@" in text} for answer in answers
        )
        for name in sorted({name for rank in parts for name in rank}):
            _require_whole(name, [rank.get(name) for rank in parts], engine)
        return cls({name: WeightSpec.parse(name, text) for name, text in first.items()}, parts)

    def require_parts(
        self, buckets: Iterable[WeightBucket], held: Sequence[Mapping[str, str]], engine: str, verified: Mapping[str, str]
    ) -> dict[str, str]:
        """Compare what the ranks hold with the same parts of what was sent.

        Args:
            buckets: together the whole model.
            held: of each rank, HF name -> tensor_checksum of its part.
            verified: HF name -> tensor_checksum of a whole tensor in `buckets`, as somebody has computed it; others are computed here.
        Returns: HF name -> tensor_checksum of the whole tensor, as it was sent and as the ranks hold it together.
        Raises: SyncError naming the first tensor and rank that differ.
        """
        found = {}
        for bucket in buckets:
            for name, whole in bucket.tensors().items():
                expected: dict[WeightPart | None, str] = {None: verified.get(name) or tensor_checksum(whole)}
                for rank, (parts, checksums) in enumerate(zip(self.by_rank, held, strict=True)):
                    part = parts.get(name)
                    if part is not None and part not in expected:
                        expected[part] = tensor_checksum(part.of(whole))
                    if checksums.get(name) != expected[part]:
                        raise SyncError(
                            f"{engine}: rank {rank} of {len(held)} holds other bytes of {name} than were sent; the engine gets no work "
                            "until a full sync succeeds"
                        )
                found[name] = expected[None]
        return found


def _require_whole(name: str, parts: Sequence[WeightPart | None], engine: str) -> None:
    """Raises: EngineError unless the parts cover the tensor; several ranks may hold the same one."""
    ranges = sorted({one for part in parts if part is not None for one in part.ranges})
    size = next(part.size for part in parts if part is not None)
    end = 0
    for first, after in ranges:
        if first != end:
            break
        end = after
    if end != size and all(part is not None for part in parts):
        raise EngineError(
            f"{engine}: {name}: its ranks hold {', '.join(str(part) for part in parts)}, which is not all of it once. Set "
            "rollout.engine.tensor_parallel to a number that divides the model"
        )
