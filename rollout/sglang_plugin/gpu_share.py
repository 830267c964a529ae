"""An engine with a share of a GPU sizes its KV cache by that share, not by what happens to be free (engines/machine.py)."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch

from evenkeel.engines.machine import CONTEXT, LEAST_OF_CACHE, engine_budget, outside_cache
from evenkeel.rollout.engine_settings.engine_config import EngineConfig

TARGET = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"

logger = logging.getLogger(__name__)


def register(engine: EngineConfig) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def of_the_share(_original: Callable[..., int], configurator: Any, *_: Any, **__: Any) -> int:
        gc.collect()  # as the original does: memory that loading the weights has left behind would count as the engine's
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(configurator.gpu_id)
        return cache_bytes(engine, free, total, torch.cuda.memory_reserved(configurator.gpu_id), configurator.model_config.vocab_size)

    HookRegistry.register(TARGET, of_the_share, HookType.AROUND)


def cache_bytes(engine: EngineConfig, free: int, total: int, own: int, vocabulary: int) -> int:
    """Bytes for the KV cache: what the share leaves, less what is missing on the GPU because others have taken more than theirs.

    Args:
        free, total: bytes of the GPU, now.
        own: bytes that this process has allocated: weights.
    Raises: RuntimeError, in SGLang's log, if the share has no room for a cache, or others have taken nearly all of it.
    """
    requests = engine.max_running_requests
    cache = engine_budget(total, engine.gpu_share, engine.memory_fraction, requests, vocabulary) - own
    rest = outside_cache(requests, vocabulary)
    if cache <= 0:
        raise RuntimeError(
            f"no room for a KV cache: of a GPU of {total / 2**30:.3g} GiB the engine has {engine.gpu_share:g}, its weights take "
            f"{own / 2**30:.3g} GiB, context, prefill, graphs and sampler {rest / 2**30:.3g}. Raise rollout.gpus_per_worker, or lower "
            "rollout.engine.max_running_requests"
        )
    if free < (needed := cache + rest - CONTEXT):  # the context is there by now
        left = cache - (needed - free)
        sentence = (
            f"the engine's share of the GPU still has {needed / 2**30:.3g} GiB to take, but {free / 2**30:.3g} are free: others on it have "
            "taken more than theirs"
        )
        if left < LEAST_OF_CACHE * cache:
            raise RuntimeError(f"{sentence}. End them, or lower rollout.gpus_per_worker")
        logger.warning("%s. The KV cache has %.3g GiB instead of %.3g", sentence, left / 2**30, cache / 2**30)
        return left
    return cache
