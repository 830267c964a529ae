"""Whether both engines computed the same: sampled against trained logprobs, bit by bit, where at equal weights true on-policy allows no
difference; and whether two processes compute alike at all."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from evenkeel.correction.batch import PackedBatch
from evenkeel.correction.errors import ConfigError, EngineError
from evenkeel.engines import operators


@dataclass(frozen=True, slots=True)
class Difference:
    """One token whose two logprobs differ."""

    sequence: int
    """Index in the batch."""
    position: int
    """Index in the sequence, its prompt included."""
    token_id: int
    version: int
    """Version of the weights that sampled the token, and that the learner holds."""
    behavior: float
    target: float

    def __str__(self) -> str:
        return (
            f"token {self.token_id} at position {self.position} of sequence {self.sequence}, weights v{self.version}: "
            f"sampled with logprob {self.behavior!r}, the learner says {self.target!r}"
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a batch's comparison found."""

    tokens: int
    """Compared: in the loss mask, sampled by the very weights that the learner holds."""
    differing: int
    largest_difference: float
    """Nats; infinite if one side is not a number."""
    first: Difference | None

    @property
    def equal_share(self) -> float:
        """1 if nothing was compared."""
        return 1.0 - self.differing / self.tokens if self.tokens else 1.0


def compare(batch: PackedBatch, target_logprobs: Tensor) -> Agreement:
    """Compare the tokens of staleness 0; the others' logprobs are of other weights.

    Args:
        target_logprobs: [N] float32, the learner's, at the weights of batch.learner_version.
    """
    is_compared = batch.loss_mask & (batch.weight_versions == batch.learner_version)
    behavior, target = batch.behavior_logprobs.float(), target_logprobs.float().to(batch.behavior_logprobs.device)
    # By value: the two zeros are one logprob, and not-a-number equals nothing.
    differing = (is_compared & (behavior != target)).nonzero()[:, 0]
    if len(differing) == 0:
        return Agreement(int(is_compared.sum()), 0, 0.0, None)
    gaps = (behavior[differing].double() - target[differing].double()).abs().nan_to_num(nan=torch.inf)
    index = int(differing[0])
    sequence = int(torch.searchsorted(batch.offsets, index, right=True)) - 1
    first = Difference(
        sequence=sequence,
        position=index - int(batch.offsets[sequence]),
        token_id=int(batch.token_ids[index]),
        version=int(batch.weight_versions[index]),
        behavior=float(behavior[index]),
        target=float(target[index]),
    )
    return Agreement(int(is_compared.sum()), len(differing), float(gaps.max()), first)


# Whether two processes compute alike: kernels are chosen by the processor, and with them the order of additions.

WIDTHS = ((64, 256), (192, 1152), (1536, 256))
"""Inner and outer sizes of the products that are tried."""


@dataclass(frozen=True, slots=True)
class Processor:
    """What a process computes with."""

    model: str
    """Name of the processor."""
    capability: str
    """Instruction set that torch uses, e.g. AVX512."""
    torch: str
    sample: str
    """Hash of what the operators make of fixed numbers."""

    @classmethod
    def of_this_process(cls) -> Processor:
        """Tries the operators, a few milliseconds.

        Raises: ConfigError if a row depends on its neighbours here, with this process's number of threads.
        """
        return cls(_name(), torch.backends.cpu.get_cpu_capability(), torch.__version__, _sample())

    def require_same(self, other: Processor, *, this: str, that: str) -> None:
        """Raises: EngineError naming what differs between the two processes."""
        mine, theirs = asdict(self), asdict(other)
        different = [f"{name}: {mine[name]} against {theirs[name]}" for name in mine if mine[name] != theirs[name]]
        if different:
            raise EngineError(
                f"true_on_policy: {this} and {that} don't compute alike ({'; '.join(different)}), so that equal bits can't be expected. "
                "Run both on the same kind of processor with the same torch, or set true_on_policy: false"
            )


def _sample() -> str:
    """Hash over the operators' results; the same for any number of threads."""
    digest = hashlib.sha256()
    for inner, outer in WIDTHS:
        x, weight = _numbers(300, inner), _numbers(outer, inner)
        whole = operators.linear(x, weight)
        for rows in (1, 2, 3, 5, 7, 9, 11, 13, 64, 65, 100, 131, 257):
            _require_equal(operators.linear(x[:rows], weight), whole[:rows], f"a product of {rows} rows, {inner} to {outer}")
        halves = [operators.linear(x, half) for half in weight.chunk(2)]
        _require_equal(torch.cat(halves, -1), whole, f"a product of half the columns, {inner} to {outer // 2}")
        _add(digest, operators.log_softmax(operators.silu(whole), 0.7))
    query, key, value = _numbers(400, 4, 48), _numbers(448, 2, 48), _numbers(448, 2, 48)
    whole = _attention(query, key, value, 0, 400)
    for first, last in ((0, 1), (0, 65), (64, 300), (130, 131), (399, 400)):
        _require_equal(_attention(query, key, value, first, last), whole[first:last], f"attention of the queries {first} to {last}")
    _add(digest, whole)
    return digest.hexdigest()[:16]


def _attention(query: Tensor, key: Tensor, value: Tensor, first: int, last: int) -> Tensor:
    """[last - first, 4, 48] of queries [400, 4, 48] and keys [448, 2, 48]."""
    rows = query[first:last].view(1, last - first, 2, 2, 48).permute(0, 2, 3, 1, 4)
    length = operators.whole_blocks(last)
    keys, values = (x[:length].transpose(0, 1)[None] for x in (key, value))
    return operators.causal_attention(rows, keys, values, 0.144, first=first)[0][0].permute(2, 0, 1, 3).reshape(last - first, 4, 48)


def _numbers(*shape: int) -> Tensor:
    """Numbers of about unit size, the same everywhere: integers of a fixed generator, scaled exactly."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-(2**20), 2**20, shape, generator=generator).float() / 2**19


def _add(digest: hashlib._Hash, tensor: Tensor) -> None:
    digest.update(tensor.contiguous().numpy().tobytes())


def _require_equal(found: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        raise ConfigError(
            f"true_on_policy: {what} depends on the other rows on this processor ({_name()}, {torch.get_num_threads()} threads): "
            "sampled and trained logprobs could not be equal. Try one thread, or set true_on_policy: false"
        )


@cache
def _name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    parts = [named.get(key, "") for key in ("model name", "cpu family", "model", "stepping")]
    return " ".join(filter(None, parts)) or platform.processor() or platform.machine()
