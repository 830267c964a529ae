"""What travels in a weight update, and the checks before sending: SGLang answers success for an unknown name, and dies of a wrong shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from correction.engines.weight_spec import WeightSpec
from correction.errors import SyncError


@dataclass(frozen=True, slots=True)
class UpdateReceipt:
    """An engine's answer to a weight update: it serves this version now."""

    version: int
    mode: str
    """retract or in_place."""
    buckets: int
    tensors: int
    bytes: int
    paused_s: float
    """From pause to continue: no token was sampled meanwhile."""


class UpdateCheck:
    """Follows one update's buckets: every tensor known, of the held shape and dtype, sent once, and none left out."""

    def __init__(self, engine_name: str, version: int, held: Mapping[str, WeightSpec]) -> None:
        self._place = f"{engine_name}: weights v{version}"
        self._held = held
        self._seen: set[str] = set()
        self._buckets = 0
        self._bytes = 0

    def admit(self, specs: Iterable[WeightSpec]) -> None:
        """Check one bucket. Raises: SyncError that names the tensor; nothing of the bucket may be sent then."""
        specs = tuple(specs)
        names = [spec.name for spec in specs]
        for spec in specs:
            held = self._held.get(spec.name)
            if held is None:
                raise SyncError(f"{self._place}: {spec.name} ({spec}): {self._why_unknown(spec.name)}")
            if (spec.shape, spec.dtype) != (held.shape, held.dtype):
                raise SyncError(
                    f"{self._place}: {spec.name} is {spec}, the engine holds {held}. Export the weights in the engine's shapes and dtype"
                )
            if spec.name in self._seen or names.count(spec.name) > 1:
                raise SyncError(f"{self._place}: {spec.name} comes twice in one update. Send each tensor once")
        self._seen.update(names)
        self._buckets += 1
        self._bytes += sum(spec.nbytes for spec in specs)

    def finish(self) -> None:
        """Raises: SyncError if tensors are missing: an engine must not serve two versions at once."""
        missing = sorted(self._held.keys() - self._seen)
        if missing:
            raise SyncError(
                f"{self._place}: {len(missing)} of {len(self._held)} tensors were not sent, the first is {missing[0]}. "
                "An update carries the whole model"
            )

    def receipt(self, version: int, mode: str, paused_s: float) -> UpdateReceipt:
        return UpdateReceipt(version, mode, self._buckets, len(self._seen), self._bytes, paused_s)

    def _why_unknown(self, name: str) -> str:
        if name == "lm_head.weight":
            return "the model ties its head to the embedding, so the engine holds model.embed_tokens.weight only. Leave the head out"
        close = [held for held in self._held if held.rpartition(".")[0].endswith(name.rpartition(".")[0].rpartition(".")[2])]
        hint = f", for example {close[0]}" if close else ""
        return f"the engine holds no tensor of this name{hint}. Use the names of the model's Hugging Face folder"
