"""What SGLang loads in every process that it starts, through its own entry points; nothing of SGLang is patched on disk.

`platform` runs while SGLang looks for hardware: on a CPU it puts stand-ins for `sgl_kernel` and `torchvision` in place where the
real packages are absent, or are those for GPUs. `register` runs in the engine's owner and in its scheduler, before the engine is built:
attention backend, sampler, weight inspection, cache namespaces, matrix products, norms, experts. Where CUDA serves the model, stand-ins,
attention backend, products, norms and experts stay away and SGLang's own kernels run.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path

from evenkeel.rollout.engine_settings.engine_capabilities import GPU_KERNELS, installed

STAND_INS = ("sgl_kernel", "torchvision")
UNUSED = "megatron"
"""SGLang imports it where it is installed, for half a second, to name its own ranks as Megatron would in dumps of tensors. Without it, it
leaves those names out."""
# Threshold of the garbage collector in SGLang's processes. With Python's default of 700 it takes a fifth of their start-up time.
_OBJECTS_BETWEEN_COLLECTIONS = 50_000


def serves_on_cpu() -> bool:
    """SGLang's own switch, set by rollout.engine.engine_process before SGLang is imported."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def _is_child() -> bool:
    """Whether multiprocessing has started this process. SGLang's processes import it while they unpickle their arguments. They have a name
    of their own by then, but multiprocessing.parent_process() is still None."""
    return multiprocessing.current_process().name != "MainProcess"


def platform() -> None:
    """Entry point `sglang.srt.platforms`: returns None, so that SGLang picks its platform itself."""
    if _is_child():  # the owner is not ours to tune
        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
        sys.modules.setdefault(UNUSED, None)  # type: ignore[arg-type]  # None: it can't be imported
    if not serves_on_cpu():
        return
    for name in STAND_INS:
        if name not in sys.modules and not _serves_a_cpu(name):
            sys.modules[name] = importlib.import_module(f"{__name__}.stand_in_{name}")


def _serves_a_cpu(name: str) -> bool:
    """Whether a package is installed, and can be imported without a GPU: SGLang's kernels for GPUs load CUDA code or fail."""
    return importlib.util.find_spec(name) is not None and not (name == "sgl_kernel" and installed(GPU_KERNELS))


def register() -> None:
    """Entry point `sglang.srt.plugins`: uses SGLang's registries and hooks only."""
    # Imported here: SGLang loads this module while its own are half imported.
    import torch

    from evenkeel.engines import matrix_products
    from evenkeel.rollout.sglang_plugin import (
        attention,
        batch_invariant,
        elementwise,
        experts,
        float8,
        gpu_share,
        hooks,
        last_error,
        products,
        seeded_sampler,
        weights,
    )
    from evenkeel.rollout.stacks import register_stack_dump

    if _is_child():
        if sys.modules.get(UNUSED, ...) is None:
            del sys.modules[UNUSED]
        gc.freeze()  # what the imports made is not looked through again
    register_stack_dump()
    settings = hooks.PluginSettings.from_environment()
    engine = settings.engine
    if _is_child() and engine.log_level in ("warning", "error"):
        hooks.draw_no_bars()
    if settings.last_error and _is_child():
        last_error.keep(Path(settings.last_error))
    is_compiled = _is_child() and serves_on_cpu() and engine.has_compiled_attention
    if serves_on_cpu():
        attention.register("stock" if engine.has_stock_attention else "batched")
        hooks.use_plain_host_memory()
        matrix_products.use_fastest()
        if is_compiled:
            elementwise.register(getattr(torch, engine.resolved_dtype))
            if engine.resolved_dtype == "float32" and not matrix_products.is_needed():
                products.use()
        experts.register()
    elif engine.gpu_share < 1:
        gpu_share.register(engine)
    if engine.has_float8:
        float8.register(on_cpu=serves_on_cpu())
    if engine.batch_invariant:
        batch_invariant.register(engine.projection_parts)
    seeded_sampler.register(is_compiled=is_compiled)
    weights.register()
    hooks.register(engine.weight_group_timeout_s)
