"""Devices and types, before anything starts: enough GPUs for whoever asks for one, and the same type of weights on both sides."""

from __future__ import annotations

from actors.config import RunConfig
from correction.errors import ConfigError


def check_devices(config: RunConfig) -> None:
    """Refuse a run on this machine that has too few GPUs for it; on a cluster that is joined, what counts is known there. A rank or an
    engine that gets none would wait until its deadline.

    Raises: ConfigError.
    """
    if config.ray.address is not None:
        return
    wanted, parts = _wanted(config)
    there = _visible()
    if wanted > there:
        seen = f"torch sees {there}" if there else "torch sees none here (no GPU, no driver for it, or a torch without CUDA)"
        raise ConfigError(
            f"{parts}: {_gpus(wanted)} needed, one for each, but {seen}. Set device: cpu, ask for fewer, or name a cluster that has them "
            f"(ray.address)"
        )


def check_types(config: RunConfig) -> None:
    """Refuse engines that hold weights in another type than the learner sends; what auto is on a cluster that is joined, is known there.

    Raises: ConfigError.
    """
    engine, learner = config.rollout.engine, config.learner
    held: str = engine.dtype
    if held == "auto" and config.ray.address is None and engine.resolved_device == "cpu":
        held = "float32"
    if held not in ("auto", learner.dtype):
        shown = f"auto ({held} on a CPU)" if engine.dtype == "auto" else held
        raise ConfigError(
            f"rollout.engine.dtype = {shown} with learner.dtype = {learner.dtype}: an engine takes new weights in the type that it holds "
            f"them in, and the learner sends its own. Set rollout.engine.dtype: {learner.dtype}"
        )


def check_engine_device(config: RunConfig) -> None:
    """The same for one engine without Ray. Raises: ConfigError."""
    if config.rollout.engine.device == "cuda" and not _visible():
        raise ConfigError(
            "rollout.engine.device = cuda, but torch sees no GPU here (none, no driver for it, or a torch without CUDA). Set it to cpu"
        )


def shortage(config: RunConfig, offered: float) -> str | None:
    """What to say when a joined cluster has too few GPUs at present; more may come, if it grows by itself.

    Args:
        offered: GPUs of all nodes.
    """
    wanted, parts = _wanted(config)
    if config.ray.address is None or wanted <= offered:
        return None
    return (
        f"{parts}: {_gpus(wanted)} needed, one for each, but the nodes of the cluster at {config.ray.address} offer {offered:g} by now; "
        f"a rank that gets none waits up to deadlines.start_s = {config.deadlines.start_s:g} s for another node, a worker for ever"
    )


def _wanted(config: RunConfig) -> tuple[int, str]:
    """GPUs in all, and which settings ask for them."""
    from actors.learner_group import is_on_gpu

    engine, workers, ranks = config.rollout.engine, config.rollout.workers, config.learner.world_size
    asking = []
    if engine.resolved_device == "cuda":
        asking.append((workers, f"rollout.engine.device = {engine.device} with {workers} worker{'s' * (workers > 1)}"))
    if is_on_gpu(config.learner):
        asking.append((ranks, f"learner.device = {config.learner.device} with {ranks} rank{'s' * (ranks > 1)}"))
    return sum(count for count, _ in asking), " and ".join(part for _, part in asking)


def _gpus(count: int) -> str:
    return "1 GPU is" if count == 1 else f"{count} GPUs are"


def _visible() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
