"""Engine and learner with a part of the operators of true on-policy, and an engine that is told what to sample: for real_mismatch.py.

The engine gets a second plugin, by SGLang's own entry points, from a folder that is on the path only then. One engine takes turns, so that
its costs can be compared, too.
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
import torch.nn.functional as F
from torch import Tensor

from evenkeel.engines.operators import silu
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model import layers
from evenkeel.learner.model.attention import PackedAttention
from evenkeel.learner.training import logprobs, step

OPERATORS = ("norms", "projections", "silu", "attention", "head", "logprobs")
"""What the mode exchanges on one side or on both: the norms are Hugging Face's in a learner on a CPU anyway, and an engine's sampler takes
log_softmax anyway. The rotary embedding is the same on both sides as it ships."""
VARIABLE = "EVENKEEL_MISMATCH_PLUGIN"
"""Holds the folder of the switch."""
_LINEAR = {
    layers.ColumnParallelLinear: layers.BatchInvariantColumnLinear,
    layers.RowParallelLinear: layers.BatchInvariantRowLinear,
}


# -- engine --------------------------------------------------------------------------------------------------------------


class Switch:
    """Which operators the engines that are started inside have, and what they sample; both may change while no request is under way."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "switch.json"
        self.turn()

    def turn(self, aligned: Collection[str] = (), forced: Mapping[int, Sequence[int]] | None = None) -> None:
        """
        Args:
            aligned: of OPERATORS; the engine ignores those that are the learner's alone.
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
    drawn = seeded_sampler.draw

    def draw(probabilities: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        found = drawn(probabilities, seeds, positions)
        for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
            told = switch.forced.get(seed, ())
            if position + 1 < len(told):
                found[row] = told[position + 1]
        return found

    seeded_sampler.draw = draw


# -- learner -------------------------------------------------------------------------------------------------------------


class PartlyAlignedRank(LearnerRank):
    """A rank with the usual operators, some of which can be exchanged for a while. Parameters stay the same objects."""

    @contextmanager
    def aligned(self, operators: Collection[str]) -> Iterator[None]:
        """Args: operators: of OPERATORS."""
        exchanged = [(step, "pack", _with(step.pack, batch_invariant="attention" in operators))]
        is_exact = bool({"head", "logprobs"} & set(operators))
        exchanged.append((step, "head_logprobs", _with(step.head_logprobs, batch_invariant=is_exact)))
        if is_exact and "head" not in operators:
            exchanged.append((logprobs, "head_logits", _usual_head))
        if is_exact and "logprobs" not in operators:
            exchanged.append((logprobs, "log_softmax", _usual_log_softmax))
        usual = [(module, name, getattr(module, name)) for module, name, _ in exchanged]
        self._exchange(operators)
        for module, name, function in exchanged:
            setattr(module, name, function)
        try:
            yield
        finally:
            self._exchange(())
            for module, name, function in usual:
                setattr(module, name, function)

    def _exchange(self, operators: Collection[str]) -> None:
        linears = _LINEAR if "projections" in operators else {to: usual for usual, to in _LINEAR.items()}
        attention: Any = layers.BatchInvariantAttention if "attention" in operators else PackedAttention
        for policy in self._policies:
            policy.config.activation_func = silu if "silu" in operators else F.silu
            for module in policy.modules():
                if type(module) in linears:
                    module.__class__ = linears[type(module)]
                if hasattr(module, "activation_func"):
                    module.activation_func = policy.config.activation_func
            for number, layer in enumerate(policy.decoder.layers):
                layer.self_attention.core_attention = attention(policy.config, number, None, None)


def _with(function: Any, **settings: Any) -> Any:
    return lambda *arguments, **options: function(*arguments, **options | settings)


def _usual_head(hidden: Tensor, weight: Tensor) -> Tensor:
    return logprobs.scaled_logits(hidden, weight, 1.0)


def _usual_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """As the learner's usual pass computes it."""
    scaled = logits / temperature
    scaled = scaled - scaled.amax(-1, keepdim=True)
    return scaled - scaled.exp().sum(-1, keepdim=True).log()
