"""Engines with a part of the operators of true on-policy, that are told what to sample: for real_mismatch.py.

They get a second plugin, this module, by SGLang's own entry points, from a folder that is on the path only then. One engine takes turns, so
that its costs can be compared, too. SGLang imports it while Megatron can't be imported: nothing of the learner is here.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VARIABLE = "EVENKEEL_MISMATCH_PLUGIN"
"""Holds the folder of the switch."""


class Switch:
    """Which operators the engines that are started inside have, and what they sample; both may change while no request is under way."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "switch.json"
        self.turn()

    def turn(self, aligned: Collection[str] = (), forced: Mapping[int, Sequence[int]] | None = None) -> None:
        """
        Args:
            aligned: of mismatch_operators.OPERATORS; the engine ignores those that are the learner's alone.
            forced: seed of a request -> the token ids of its prompt and answer, which it then "samples".
        """
        told = {str(seed): list(ids) for seed, ids in (forced or {}).items()}
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"aligned": sorted(aligned), "forced": told}))
        new.replace(self._file)


@contextmanager
def switched_engines() -> Iterator[Switch]:
    """Engines that are started inside follow the switch."""
    with tempfile.TemporaryDirectory() as name:
        package = Path(name) / "evenkeel_mismatch-0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: evenkeel-mismatch\nVersion: 0\n")
        (package / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nmismatch = {__name__}:register\n")
        switch = Switch(Path(name))
        sys.path.append(name)  # after evenkeel's own: what is registered last counts
        os.environ[VARIABLE] = name
        try:
            yield switch
        finally:
            del os.environ[VARIABLE]
            sys.path.remove(name)


class _Switched:
    """The state of an engine's scheduler."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "switch.json"
        self._read = ""
        self.aligned: frozenset[str] = frozenset()
        self.forced: dict[int, Tensor] = {}

    def follow(self, scheduler: Any, *_: Any, **__: Any) -> None:
        """Before a request enters the queue. Keys that other operators have computed are forgotten."""
        text = self._file.read_text()
        if text != self._read:
            found = json.loads(text)
            self._read, self.aligned = text, frozenset(found["aligned"])
            self.forced = {int(seed): torch.tensor(ids) for seed, ids in found["forced"].items()}
            scheduler.flush_cache()

    def either(self, operator: str, aligned: Any) -> Any:
        """A hook around SGLang's own."""
        return lambda original, *inputs, **options: (aligned if operator in self.aligned else original)(*inputs, **options)


def register() -> None:
    """Entry point `sglang.srt.plugins` of that folder."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from evenkeel.rollout.sglang_plugin import batch_invariant, seeded_sampler
    from evenkeel.rollout.sglang_plugin.attention import STOCK_NAME, BatchedAttentionBackend

    switch = _Switched(Path(os.environ[VARIABLE]))
    for operator, (target, function) in batch_invariant.replacements(1).items():
        HookRegistry.register(target, switch.either(operator, function), HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", switch.follow, HookType.BEFORE)

    class EitherAttention(BatchedAttentionBackend):
        def __init__(self, runner: Any) -> None:
            super().__init__(runner)
            self.exact = batch_invariant.BatchInvariantAttentionBackend(runner)

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            if "attention" in switch.aligned:
                self.exact.init_forward_metadata(forward_batch)

        def forward_decode(self, *inputs: Any, **options: Any) -> Tensor:
            chosen: Any = self.exact if "attention" in switch.aligned else super()
            output: Tensor = chosen.forward_decode(*inputs, **options)
            return output

        def forward_extend(self, *inputs: Any, **options: Any) -> Tensor:
            chosen: Any = self.exact if "attention" in switch.aligned else super()
            output: Tensor = chosen.forward_extend(*inputs, **options)
            return output

    register_attention_backend(STOCK_NAME)(lambda runner: EitherAttention(runner))
    drawn = seeded_sampler.SeededSampler.draw  # the compiled one, where the engine has it

    def draw(probabilities: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        found = drawn(probabilities, seeds, positions)
        for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
            told = switch.forced.get(seed, ())
            if position + 1 < len(told):
                found[row] = told[position + 1]
        return found

    seeded_sampler.SeededSampler.draw = staticmethod(draw)
