"""The machine that an engine or the learner computes on: what `auto` means for device, number format and backend, what torch was built for,
a shared GPU, the host's memory, imports and environment of a process.

Nothing else asks whether a setting is `auto`. A run decides all of these once (actors/settings/resolve.py), and its parts are given what
was decided; an engine or a learner that is used without a run decides when it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from evenkeel.correction.errors import ConfigError

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
Backend = Literal["gloo", "nccl"]
DtypeSetting = Literal["auto", "bfloat16_if_fast", "float32", "bfloat16", "float16"]
Choice = TypeVar("Choice", Device, Dtype, Backend)

KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""Environment variables of a process that multiplies matrices on a CPU: sizes of oneDNN's cache of compiled kernels, and of torch's
cache in front of it, which holds the same kernels. Each keeps 1,024 by default. An engine, whose prefills have any number of tokens, would
then grow for an hour, by more than half a gigabyte."""
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Environment variables of the same processes: glibc keeps what is freed, for buffers up to 32 MiB (its limit), and gives nothing back by
itself. By default a step's large buffers, such as the probabilities of all words for all requests, are mapped anew each time, and a page
fault for each of their pages takes three times as long as to compute them. `give_back` below returns them now and then all the same."""
ON_CPU = KEPT_KERNELS | KEPT_MEMORY | {"OMP_WAIT_POLICY": "passive"}
"""All environment variables of a process that computes on a CPU. Its threads sleep while they have nothing to do: by default they spin, and
where another process computes too, a thread that waits for its neighbour then keeps it from its core. Products of two threads on two cores
that were shared so took five times as long."""
CACHED = 1 << 21
"""Numbers of a table of logits that a CPU takes through all steps of a softmax before it takes the next ones: they stay in its cache, and
no second table is mapped anew for each chunk of tokens, whose pages would take longer than the exponentials."""
_DECIDE = "Decide it first: for a run actors/settings/resolve.py does, for an engine or a learner alone the section's on_this_machine()"


def is_open(*settings: str) -> bool:
    """Whether one of the settings is left to be decided."""
    return not {"auto", "bfloat16_if_fast"}.isdisjoint(settings)


def device_of(setting: Literal["auto", "cpu", "cuda"], *, has_gpu: bool | None = None) -> Device:
    """The device of a setting; auto is cuda where there is a GPU.

    Args: has_gpu: this machine has one, or the cluster; None: as torch finds in this process.
    """
    if setting != "auto":
        return setting
    if has_gpu is None:
        import torch

        has_gpu = torch.cuda.is_available()
    return "cuda" if has_gpu else "cpu"


def dtype_of(setting: DtypeSetting, device: Device, *, learner: Dtype | None = None) -> Dtype:
    """The dtype of a setting; auto is bfloat16 on a GPU and float32 on a CPU, bfloat16_if_fast also on a CPU that multiplies in it.

    Args: learner: of an engine's setting, the dtype of the learner, which auto is then.
    """
    if setting == "bfloat16_if_fast":
        return "bfloat16" if device == "cuda" or fast_bfloat16() is not None else "float32"
    if setting != "auto":
        return setting
    return learner or ("bfloat16" if device == "cuda" else "float32")


# What /proc/cpuinfo calls the instructions that multiply matrices of bfloat16: of x86's AMX and AVX-512, and of Arm.
_BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")


@cache
def fast_bfloat16() -> str | None:
    """The instructions by which this machine's processor multiplies in bfloat16, as Linux names them; None: it has none, or doesn't say."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))), [])
    return next((name for name in _BFLOAT16_INSTRUCTIONS if name in flags), None)


def group_backend_of(setting: Literal["auto", "gloo", "nccl"], device: Device) -> Backend:
    """The backend of a setting; auto is nccl on a GPU and gloo on a CPU."""
    if setting != "auto":
        return setting
    return "nccl" if device == "cuda" else "gloo"


def decided(setting: Literal["auto", "bfloat16_if_fast"] | Choice, name: str) -> Choice:
    """A setting that has been decided. Args: name: of the setting. Raises: ConfigError if it is still open."""
    if setting == "auto" or setting == "bfloat16_if_fast":
        raise ConfigError(f"{name} = {setting}, which nothing has decided", remedy=_DECIDE)
    return setting


# What this environment's torch was built for, without importing it, which takes seconds.

# NVIDIA's driver, under the name by which torch loads it.
_DRIVER = "libcuda.so.1"
# What the driver answers where CUDA_VISIBLE_DEVICES hides all GPUs, or there are none (CUDA_ERROR_NO_DEVICE).
_NO_DEVICE = 100


@cache
def torch_build() -> dict[str, Any] | None:
    """Names and values of torch/version.py, such as cuda: "13.0" or None; None: there is no such file."""
    spec = find_spec("torch")
    places = spec.submodule_search_locations or [] if spec is not None else []
    files = [path for place in places if (path := Path(place) / "version.py").is_file()]
    return runpy.run_path(str(files[0])) if files else None


def has_cuda() -> bool:
    """Whether torch is a build with CUDA."""
    build = torch_build()
    if build is not None and "cuda" in build:
        return build["cuda"] is not None
    import torch

    return torch.version.cuda is not None


def gpus_without_torch() -> int | None:
    """Number of GPUs that torch sees, by what it was built for and by NVIDIA's driver; None: torch alone can tell."""
    build = torch_build()
    if "torch" in sys.modules or build is None or not {"cuda", "hip"} <= build.keys() or build["hip"] is not None:
        return None
    if build["cuda"] is None:
        return 0
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return 0
    return _counted(driver, str(build["cuda"]))


def _counted(driver: Any, cuda: str) -> int | None:
    """The driver's own count, which minds CUDA_VISIBLE_DEVICES; None if it isn't sure that torch, with its CUDA, can use this driver.

    A CUDA runs with drivers that are as new as the first of its major version. Args: cuda: such as 13.0.
    """
    version, count = ctypes.c_int(), ctypes.c_int()
    try:
        is_known = driver.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value // 1000 >= int(cuda.partition(".")[0])
        if not is_known or (ends := driver.cuInit(0)) not in (0, _NO_DEVICE):
            return None
        if ends == _NO_DEVICE:
            return 0
        return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else None
    except (AttributeError, ValueError):  # another library, another version's name
        return None


# Faster imports of the large libraries.

T = TypeVar("T")

_MODEL_CLASSES = "transformers.models.auto.modeling_auto"


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Run imports, or other start-up code, without the garbage collector.

    Nearly every object that an import makes stays, but the collector looks through all of them again and again: that is a fifth of SGLang's
    import time and a quarter of Megatron's. At the end of the block all objects are frozen: the collector never looks at them again.
    """
    if not gc.isenabled():  # in one of these already
        yield
        return
    gc.collect()  # or freeze would keep what is garbage now
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def without_model_classes(read: Callable[[], T]) -> T:
    """Call `read`, which has transformers read a config, and keep transformers from importing its model classes for that.

    transformers writes the name of the model's class into the docstring of a config class. To find it, it imports the code of the models
    and torch's compiler, which takes a second and a half. If that import fails it leaves the name out.
    """
    with contextlib.suppress(ImportError), unimportable(_MODEL_CLASSES):
        return read()
    return read()  # this config does need them


@contextlib.contextmanager
def unimportable(module: str) -> Iterator[None]:
    """Let imports of a module fail within the block, unless it was imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if sys.modules.get(module) is None:
            sys.modules.pop(module, None)


# Environment variables that are set for a while, for what is started meanwhile.


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A block within which these variables are set; afterwards they are what they were. They are the whole process's: one block at a
    time."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# How learner and engine divide a GPU that they share: each takes its share of the whole memory, whichever starts first.
#
# Left alone, SGLang 0.5.21 takes a fraction of what is free when it starts, less what anybody else has taken by the time its weights are
# loaded (mem_cache/kv_cache_configurator.py, _profile_available_bytes): its cache would depend on how far the GPU's learner has come. An
# engine with a share counts its own bytes instead (rollout/sglang_plugin/gpu_share.py), and torch's limit keeps a rank within its own
# (learner/model/parallel.py).

CONTEXT = 768 << 20
"""Bytes that each process on the GPU takes for the CUDA context, kernels and workspaces, which no allocator counts. An estimate, compared
with a GPU only in the sum of `outside_cache`."""
LEAST_OF_CACHE = 0.1
"""Smallest part of the KV cache that the share should hold with which an engine still starts. A lack up to that can come from estimates of
the memory outside the cache; beyond it other processes have taken the memory."""
PREFILL_TOKENS = 2048
"""Chunk of a prefill of an engine with a share; SGLang's own sizes are for whole GPUs."""
# Bytes of a token's activations: twice what the widest layer of a model of 8B has at the same time. An estimate.
_PREFILL_TOKEN = 256 << 10
# Bytes of the graphs of decoding for each request that runs: SGLang's own estimate (arg_groups/memory_hook.py, reserve_for_graph_mb). An
# engine with a share captures none of prefill (rollout/engine_settings/engine_config.py).
_GRAPH = 2 << 20
# Bytes for each request and word of the vocabulary while tokens are drawn: logits, logprobs and probabilities in float32, and as much again
# to sort the likeliest ones for kept sets (rollout/sglang_plugin/seeded_sampler.py; where nearly all are kept it is more).
_SAMPLER = 16
SUMMED = 1 << 15
"""Words of the vocabulary whose probabilities are summed at one time."""
# Bytes for each request and each of these: the word's number, its probability and, in float64, the sum.
_SUMS = 20


def outside_cache(requests: int, vocabulary: int) -> int:
    """Bytes that an engine takes in addition to weights and KV cache.

    Compared on an H200, where the cache takes all that this leaves of the share: an engine of Qwen3-0.6B with 128 requests held 22 MiB less
    than its share in the end, of 1,913 MiB here, and engines of the nano model 543 and 877 MiB less, of 2,309 (docs/gpu.md).
    Args: requests: how many run at the same time.
    """
    return CONTEXT + PREFILL_TOKENS * _PREFILL_TOKEN + requests * (_GRAPH + _SAMPLER * vocabulary + _SUMS * min(SUMMED, vocabulary))


def engine_budget(total: int, share: float, fraction: float | None, requests: int, vocabulary: int) -> int:
    """Bytes of weights and KV cache of an engine with a share of a GPU; below 0 if the share doesn't even hold the rest.

    Args:
        total: bytes of the whole GPU.
        fraction: of the whole, at most; None: all that the share leaves.
    """
    room = int(total * share) - outside_cache(requests, vocabulary)
    return room if fraction is None else min(room, int(total * fraction))


def allocator_fraction(total: int, share: float) -> float:
    """Share of the whole GPU that torch's allocator may hold in a process with this share, so that its context fits into it, too."""
    return share if share == 1 else max(0.0, share - CONTEXT / total)


# Returns free memory of the C library's heap to the system.
#
# A forward pass or a weight update frees its buffers, but allocations that stay, such as kernels compiled meanwhile, lie between them. The
# C library keeps these holes: they were two thirds of the memory of an engine on a CPU after twenty minutes.

# Returning a few hundred megabytes, and allocating them anew later, takes a tenth of a second.
_PERIOD_S = 30.0
_next_s = 0.0
# Held while a thread is giving memory back.
_at_work = threading.Lock()


def give_back_now_and_then() -> None:
    """Give memory back, at most every 30 s in a process; in between return at once. Does nothing without glibc."""
    if _is_due():
        give_back()


def give_back_in_thread() -> None:
    """The work of `give_back_now_and_then`, for callers that must not block: a thread does it, one at a time.

    Other Python threads run meanwhile. They wait only if they allocate from the part of the heap that is being trimmed.
    """
    if not _is_due() or not _at_work.acquire(blocking=False):
        return

    def work() -> None:
        try:
            give_back()
        finally:
            _at_work.release()

    try:
        threading.Thread(target=work, name="give-back-memory", daemon=True).start()
    except RuntimeError:  # the machine has no thread left; a later call tries again
        _at_work.release()


def _is_due() -> bool:
    global _next_s
    if (now := time.monotonic()) < _next_s:
        return False
    _next_s = now + _PERIOD_S
    return True


def give_back() -> None:
    """Return every free page of the heap to the system."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    trim: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
