"""An engine on several GPUs: what divides a model over its ranks, and the ranks' ports and environment. SGLang's other ways of doing
so are refused in engine_arguments.py.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator, Sequence

from evenkeel.correction.errors import EngineError
from evenkeel.rollout.engine_settings.engine_config import EngineConfig

CPU_WIDTH = 32
"""Multiple to which SGLang pads each rank's feed-forward part on a CPU; padded weights would have other shapes than the files."""

NORMS_OF_OWN_HEADS = ("olmoe",)
"""Families, by model_type, whose queries and keys are normalised over the channels of all heads, but a rank of SGLang's has only its own
heads."""
NORMS_OVER_RANKS = ("olmo2",)
"""Families, by model_type, normalised in the same way, and SGLang's ranks gather all heads for it. A key head that two ranks hold would be
gathered twice."""
GROUPS_OF_RANKS = ("qwen3", "qwen3_moe")
"""Families, by model_type, whose attention SGLang can divide over a group's ranks; in other families it divides it over all ranks, whatever
is set."""
UNREPORTED_ROUTES = ("mixtral", "olmoe")
"""Families, by model_type, in which SGLang's routers don't know the number of their layer, so SGLang can't record the experts that they
chose."""
# Ports that an engine with such groups takes, counted from SGLang's `port` (its server_args.py); others talk by sockets in files.
_PORTS = (13, *range(233, 240))
_ONE, _DIVISOR = "Set it to 1", "Set it to a common divisor, or to 1"


def obstacles(
    engine: EngineConfig, *, model_type: str, heads: int, key_heads: int, widths: Sequence[int], experts: int
) -> Iterator[tuple[str, str]]:
    """Why a model can't be divided over an engine's ranks, and what to do.

    Args:
        model_type: of its config.json.
        heads, key_heads: of the attention.
        widths: of feed-forward parts, or of experts.
        experts: 0 of a dense model.
    """
    ranks, expert_groups, attention_groups = engine.tensor_parallel, engine.expert_parallel, engine.attention_data_parallel
    on_cpu = engine.resolved_device == "cpu"
    setting = f"rollout.engine.tensor_parallel = {ranks}"
    if ranks == 1:
        return
    if expert_groups > 1 and not experts:
        yield f"rollout.engine.expert_parallel = {expert_groups}: {model_type} has no experts", _ONE
    elif experts % expert_groups:
        yield f"rollout.engine.expert_parallel = {expert_groups} doesn't divide the model's {experts} experts", _DIVISOR
    if model_type in NORMS_OF_OWN_HEADS:
        yield f"{setting}: {model_type} normalises queries and keys over all heads, but a rank of SGLang's has only its own", _ONE
        return
    if model_type in NORMS_OVER_RANKS and ranks > key_heads:
        yield f"{setting}: {model_type} normalises keys over all {key_heads} key-value heads, and SGLang's ranks need one each", _DIVISOR
    if attention_groups > 1 and model_type not in GROUPS_OF_RANKS:
        groups = f"rollout.engine.attention_data_parallel = {attention_groups}"
        yield f"{groups}: SGLang cuts the attention of {model_type} over all ranks whatever is set", _ONE
    if attention_groups > 1 and expert_groups > 1 and on_cpu:
        both = f"rollout.engine.attention_data_parallel = {attention_groups} and expert_parallel = {expert_groups}"
        yield f"{both}: SGLang hands the experts' results back to the groups by NCCL alone, which a CPU lacks", _ONE
    of_group = ranks if on_cpu else ranks // attention_groups  # on a CPU SGLang counts heads for all ranks first
    if heads % of_group:
        yield f"{setting} doesn't divide the model's {heads} heads", _DIVISOR
    if key_heads % of_group and (on_cpu or of_group % key_heads):
        why = "on a CPU SGLang would add empty ones" if on_cpu else "neither divides the other"
        yield f"{setting} and the model's {key_heads} key-value heads: {why}", _DIVISOR
    shares = ranks if on_cpu else ranks // expert_groups
    multiple = shares * CPU_WIDTH if on_cpu else shares
    for width in widths:
        if width % multiple:
            on = f" in multiples of {CPU_WIDTH}, as SGLang wants it on a CPU" if on_cpu else ""
            over = f"{setting} over expert_parallel = {expert_groups}" if shares < ranks else setting
            yield f"{over} doesn't divide the feed-forward width of {width}{on}", _DIVISOR


def free_ports(groups: int, first: int = 20_000, end: int = 32_000) -> dict[str, int]:
    """SGLang's arguments for ports on 127.0.0.1: where its ranks meet (`nccl_port`) and, for several groups of ranks, from where
    it counts the others (`port`, which itself is not bound). They are drawn at random, because other engines may look for theirs at the
    same time, and lie below the ports that Linux gives to outgoing connections: SGLang would choose among those, and its scheduler binds
    its port only seconds later.

    Raises: EngineError if there are none.
    """
    steps = (0, *_PORTS) if groups > 1 else (0,)
    for _ in range(100):
        port = random.SystemRandom().randrange(first, end)
        if all(_is_free(port + step) for step in steps):
            return {"nccl_port": port} | ({"port": port} if groups > 1 else {})
    above = ", together with those above it that its groups of ranks need" if groups > 1 else ""
    raise EngineError(f"no port between {first} and {end} is free on 127.0.0.1 for SGLang{above}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def environment_of_ranks(ranks: int, processors: Sequence[int]) -> dict[str, str]:
    """Environment variables of an engine's processes, when it has several ranks.

    Args: processors: of the machine, that the engine may use; none on GPUs.
    """
    variables = {"SYNC_TOKEN_IDS_ACROSS_TP": "1"}  # ranks with different tokens, by a last bit, would wait for each other for ever
    if processors:  # without this SGLang wants a NUMA node for each rank
        shares = [processors[rank * len(processors) // ranks :][: max(1, len(processors) // ranks)] for rank in range(ranks)]
        variables["TORCH_COMPILE_DISABLE"] = "1"  # SGLang compiles the lookup in an embedding's part: a minute of the first request
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return variables
