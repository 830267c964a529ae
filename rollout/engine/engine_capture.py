"""What SGLang computes, operator by operator, through forward hooks that its argument `forward_hooks` attaches in the scheduler.

SGLang has two dumpers of its own (debug_tensor_dump_output_folder, DUMPER_ENABLE). The first keeps no copy of what a CPU overwrites later,
and does not say whose token a row is; the second writes a file for each tensor. Here a forward pass is one file, with its rows' owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenkeel.correction.errors import EngineError
from evenkeel.engines.capture import Capture, CapturedRows, OperatorPlace, sequence_start

LAST = "logits_processor"
# SGLang's module in a layer -> operator whose output is its own; norms before and after the parts have names by the family.
_LAYER = {
    "self_attn.qkv_proj": "qkv",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.attn": "attention",
    "self_attn.o_proj": "projection",
    "mlp.gate_up_proj": "gate_up",
    "mlp.act_fn": "silu",
    "mlp.down_proj": "down",
}
# A norm that adds its input to the residual first returns both; one that doesn't is given the sum.
_RESIDUAL_OF = {"norm": "residual", "mlp_norm": "mlp_residual", "final_norm": "final_residual"}


def engine_arguments(folder: Path, layers: int, norms: Mapping[str, str]) -> dict[str, Any]:
    """Arguments for rollout.engine.engine_args by which every forward pass writes a file into the folder.

    Args: norms: module in a layer -> operator, of the model's family.
    """
    modules = {"model.embed_tokens": OperatorPlace("embedding")}
    of_layer = {**_LAYER, **norms}
    modules |= {f"model.layers.{i}.{name}": OperatorPlace(operator, i) for i in range(layers) for name, operator in of_layer.items()}
    modules |= {"model.norm": OperatorPlace("final_norm"), LAST: OperatorPlace("logits")}
    hooks = [
        {
            "name": str(place),
            "target_modules": [module],
            "hook_factory": f"{__name__}:hook",
            "config": {"folder": str(folder), "place": list(place)},
        }
        for module, place in modules.items()
    ]
    return {"forward_hooks": hooks, "disable_cuda_graph": True}  # a replayed graph calls no hooks


def hook(config: dict[str, Any]) -> Any:
    """What SGLang registers on the module of one place."""
    return partial(_recorder(config["folder"]).note, OperatorPlace(*config["place"]))


def read(folder: Path, sequences: Sequence[Sequence[int]]) -> Capture:
    """All passes of a folder; rows of other requests are left out.

    Args:
        sequences: prompt and answer of each request, as they are packed for the learner.
    Raises: EngineError if a sequence was never computed.
    """
    passes = [torch.load(path) for path in sorted(folder.glob("pass_*.pt"))]
    seen: dict[str, tuple[list[int], list[int]]] = {}
    for one in passes:
        for request, position, token in zip(_owners(one), one["positions"].tolist(), one["token_ids"].tolist(), strict=True):
            positions, tokens = seen.setdefault(request, ([], []))
            positions.append(position)
            tokens.append(token)
    starts = {request: sequence_start(sequences, *rows) for request, rows in seen.items()}
    if len({start for start in starts.values() if start is not None}) < len({tuple(one) for one in sequences}):
        raise EngineError(f"captures: the engine recorded {len(seen)} requests, not all of the {len(sequences)} that it answered")
    found: dict[OperatorPlace, list[tuple[Tensor, Tensor]]] = {}
    for one in passes:
        owner = [starts[request] for request in _owners(one)]
        token = torch.tensor([-1 if start is None else start for start in owner]) + one["positions"]
        token[[start is None for start in owner]] = -1
        for place, values in ((OperatorPlace(*key), values) for key, values in one["values"].items()):
            of_rows = token[torch.tensor(one["counts"]).cumsum(0) - 1] if place.operator == "logits" else token
            found.setdefault(place, []).append((of_rows[of_rows >= 0], values[of_rows >= 0]))
    return {place: CapturedRows(*(torch.cat(column) for column in zip(*pieces, strict=True))) for place, pieces in found.items()}


def _owners(one: dict[str, Any]) -> list[str]:
    """The request of each row of a pass."""
    return [request for request, count in zip(one["requests"], one["counts"], strict=True) for _ in range(count)]


@lru_cache
def _recorder(folder: str) -> _Recorder:
    return _Recorder(Path(folder))


class _Recorder:
    """One for all modules of the scheduler's process: collects a pass, and writes it when its logits are there."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._passes = folder, 0
        self._values: dict[OperatorPlace, Tensor] = {}

    def note(self, place: OperatorPlace, _module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        name = place.operator
        if name == "logits":
            self._keep(place, output.next_token_logits)
            self._write(next(one for one in inputs if hasattr(one, "req_pool_indices")))
            return
        first: Any = output[0] if isinstance(output, tuple) else output
        if name in _RESIDUAL_OF and (isinstance(output, tuple) or name == "final_norm"):
            self._keep(place._replace(operator=_RESIDUAL_OF[name]), output[1] if isinstance(output, tuple) else inputs[0])
        if name == "attention":
            self._keep(place._replace(operator="rotary_q"), inputs[0])
            self._keep(place._replace(operator="rotary_k"), inputs[1])
        self._keep(place, first if isinstance(first, Tensor) else first.partial)  # a sum over ranks that is still to be taken

    def _keep(self, place: OperatorPlace, values: Tensor) -> None:
        self._values[place] = values.detach().to("cpu", copy=True)

    def _write(self, batch: Any) -> None:
        decodes = batch.forward_mode.is_decode()
        one = {
            "requests": list(batch.rids),
            "counts": [1] * len(batch.rids) if decodes else batch.extend_seq_lens.tolist(),
            "positions": batch.positions.cpu(),
            "token_ids": batch.input_ids.cpu(),
            "values": {
                tuple(place): values.reshape(len(batch.rids) if place.operator == "logits" else len(batch.input_ids), -1)
                for place, values in self._values.items()
            },
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        torch.save(one, self._folder / f"pass_{self._passes:06d}.pt")
        self._passes += 1
        self._values = {}
