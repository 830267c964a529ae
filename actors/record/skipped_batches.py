"""Batches whose loss or gradient was not finite, kept for study: tensors in a safetensors file, the rest in JSON. A few of a run.

Reading one runs nothing, whoever has written it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenkeel.actors.metrics.catalogue import CATALOGUE
from evenkeel.actors.settings.deadlines import KEEP_S
from evenkeel.learner.hf.tensor_files import saving
from evenkeel.learner.results import SkipReason

if TYPE_CHECKING:  # torch: seconds that the driver's start doesn't need
    from evenkeel.actors.carriers import PreparedBatch
    from evenkeel.correction.batch import CorrectedBatch
    from evenkeel.correction.config import CorrectionConfig
    from evenkeel.learner.results import StepResult

KEPT = 8
"""Most batches that a run keeps: the first ones say most."""


@dataclass(frozen=True, slots=True)
class SkippedBatch:
    """A batch of which an update was left out, and the norms that were seen."""

    step: int
    weight_version: int
    """Version of the weights before the step, which it left as they were."""
    corrected: CorrectedBatch
    correction: CorrectionConfig
    grad_norms: tuple[float, ...]
    """Gradient norm of each optimizer step."""
    group_norms: dict[str, float]
    """Norms of the gradient, by group of parameters."""

    def _parts(self) -> dict[str, Any]:
        """Fields of the batch, of what it was corrected to and of its counts, by "batch.", "corrected." or "counts." and their name."""
        batch, counts = self.corrected.batch, self.corrected.counts
        found = {f"batch.{f.name}": getattr(batch, f.name) for f in fields(batch)}
        found |= {f"corrected.{f.name}": getattr(self.corrected, f.name) for f in fields(self.corrected)}
        return found | {"counts.values": counts.values if counts else None}

    def save_tensors(self, path: Path) -> None:
        """Raises: OSError."""
        from safetensors.torch import save_file

        # Clones: safetensors allows no shared memory, and two masks may share theirs.
        tensors = {name: value.contiguous().clone() for name, value in self._parts().items() if hasattr(value, "contiguous")}
        with saving(path):
            save_file(tensors, path)

    def save_rest(self, path: Path) -> None:
        """Raises: OSError."""
        counts, made_by = self.corrected.counts, self.corrected.batch.advantages_by
        plain = {
            "step": self.step,
            "weight_version": self.weight_version,
            "grad_norms": list(self.grad_norms),
            "group_norms": dict(self.group_norms),
            "correction": self.correction.model_dump(mode="json"),
            "numbers": {name: value for name, value in self._parts().items() if isinstance(value, bool | int | float)},
            "advantages_by": made_by if isinstance(made_by, str | None) else made_by.model_dump(mode="json"),
            "counts": list(counts.labels) if counts else None,
        }
        path.write_text(json.dumps(plain, indent=1))

    @classmethod
    def load(cls, path: Path) -> SkippedBatch:
        """Args: path: of the safetensors file or of the JSON next to it."""
        from safetensors.torch import load_file

        from evenkeel.correction.batch import CorrectedBatch, DecisionCounts, PackedBatch
        from evenkeel.correction.config import CorrectionConfig
        from evenkeel.correction.settings.parts import AdvantageConfig

        plain = json.loads(path.with_suffix(".json").read_text())
        found: dict[str, Any] = load_file(path.with_suffix(".safetensors")) | plain["numbers"]
        of_batch = {name.removeprefix("batch."): value for name, value in found.items() if name.startswith("batch.")}
        made_by = plain["advantages_by"]
        of_batch["advantages_by"] = AdvantageConfig.model_validate(made_by) if isinstance(made_by, Mapping) else made_by
        of_corrected = {name.removeprefix("corrected."): value for name, value in found.items() if name.startswith("corrected.")}
        labels = plain["counts"]
        of_corrected["counts"] = None if labels is None else DecisionCounts(tuple(labels), found["counts.values"])
        corrected = CorrectedBatch(PackedBatch(**of_batch), **of_corrected)
        correction = CorrectionConfig.model_validate(plain["correction"])
        norms: Sequence[float] = plain["grad_norms"]
        return cls(plain["step"], plain["weight_version"], corrected, correction, tuple(norms), plain["group_norms"])


async def keep_and_describe(keep: Callable[[SkippedBatch], Path | None], step: int, batch: PreparedBatch, result: StepResult) -> str:
    """What the guard did at a step, in a sentence; the batch is kept. The weights were those of the version before the step.

    Args: keep: RunFolder.keep_skipped_batch.
    """
    from evenkeel.actors.processes.supervision import wait_for  # Ray: not for those who only look into a run's folder

    try:
        what = f"batch of step {step} -> skipped_batches"
        path = await wait_for(_kept(keep, step, batch, result), what, deadline_s=KEEP_S)
        kept = f"kept in {path}" if path else f"not kept: skipped_batches holds {KEPT} already"
    except Exception as error:  # any error: it must end neither the run nor later lines
        kept = f"not kept ({type(error).__name__}: {error})"
    of_group, of_loss = CATALOGUE["learner/group_grad_norm/"].number, CATALOGUE["learner/loss"].number
    norms = ", ".join(f"{group} {of_group(norm)}" for group, norm in result.group_norms.items())
    updates = len(result.skipped) + result.optimizer_steps
    return (
        f"step {step}: {result.skipped.count(SkipReason.NOT_FINITE)} of {updates} updates left out; loss or gradient was not finite "
        f"(loss {of_loss(result.loss)}; gradient norms: {norms}); the batch is {kept}"
    )


async def _kept(keep: Callable[[SkippedBatch], Path | None], step: int, batch: PreparedBatch, result: StepResult) -> Path | None:
    from evenkeel.actors.groups.tokens import value_of, with_wide_fields

    corrected = await value_of(batch.corrected)
    if corrected.batch.wide:
        corrected = replace(corrected, batch=await with_wide_fields(corrected.batch, deadline_s=KEEP_S))
    kept_batch = SkippedBatch(step, batch.version, corrected, batch.correction, result.grad_norms, result.group_norms)
    return await asyncio.to_thread(keep, kept_batch)
