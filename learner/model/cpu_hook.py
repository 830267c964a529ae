"""Lets the unmodified megatron-core package run where there is no CUDA.

megatron-core writes its device as `torch.cuda.current_device()`, `device="cuda"` or `"torch.cuda.FloatTensor"`; none of its local
(non-TransformerEngine) mathematics needs CUDA. `install()` adds an import hook that re-targets exactly those literals at the CPU while
`megatron.core.*` is being imported. No file of the package is changed, line numbers stay, `torch.cuda` itself is untouched, and nothing
outside megatron.core is affected. Where torch sees a GPU only one upstream omission is mended, and the package runs as shipped.

Tested against megatron-core 0.16; `tests/learner/test_learner_cpu_hook.py` fails when a new version needs other rules.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import marshal
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source, decode_source, source_hash
from types import CodeType, ModuleType
from typing import Any

import torch

from evenkeel.correction.errors import ConfigError

_PACKAGE = "megatron.core"
_SHIM = "_torch_cuda_on_cpu"

_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # Tensor type strings, as gradient clipping and the DDP buffers compare them.
    (re.compile(r"""(['"])torch\.cuda\.(Float|Half|BFloat16)Tensor(?=[,.]?\s*\1)"""), r"\1torch.\2Tensor"),
    # Calls: torch.cuda.current_device() and its like.
    (re.compile(r"(?<!from )(?<!import )\btorch\.cuda\.(?!FloatTensor|HalfTensor|BFloat16Tensor)"), f"{_SHIM}."),
    # Device literals, as arguments and as defaults.
    (re.compile(r"""(device=|device\(|init_data\(|autocast\(|device_type=|\.to\()(['"])cuda\2"""), r"\1\2cpu\2"),
    (re.compile(r"""(device: (?:str|Union\[int, str, torch\.device\]) = )(['"])cuda\2"""), r"\1\2cpu\2"),
    (re.compile(r"\bpin_memory=True"), "pin_memory=False"),
    (re.compile(rf"\.cuda\((?:non_blocking=True|{_SHIM}\.current_device\(\))?\)"), ".cpu()"),
)


def install() -> None:
    """Add the import hook, once; a no-op when it is there.

    Raises: ConfigError if megatron.core was imported before, because its device literals are then bound already.
    """
    if any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise ConfigError("megatron.core was imported before cpu_hook.install(): import evenkeel.learner.model.megatron first")
    sys.meta_path.insert(0, _MegatronFinder())


class _Stream(torch.cpu.Stream):
    """A CUDA stream's methods for which torch.cpu has no equal."""

    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event()

    def synchronize(self) -> None:
        pass


class _TorchCudaOnCpu:
    """Stands in for `torch.cuda` in megatron-core on a CPU: torch.cpu and the CPU generator. Other names are looked up in torch.cuda."""

    _stream = _Stream()
    Stream = _Stream
    Event = torch.cpu.Event
    current_device = staticmethod(torch.cpu.current_device)
    set_device = staticmethod(torch.cpu.set_device)
    device_count = staticmethod(torch.cpu.device_count)
    synchronize = staticmethod(torch.cpu.synchronize)
    stream = staticmethod(torch.cpu.stream)
    manual_seed = staticmethod(torch.manual_seed)

    class nvtx:
        range_push = range_pop = staticmethod(lambda *args: None)

    @classmethod
    def current_stream(cls, *args: Any) -> _Stream:
        return cls._stream

    default_stream = current_stream

    @staticmethod
    def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def empty_cache() -> None:
        pass

    @staticmethod
    def memory_allocated(*args: Any) -> int:
        return 0

    memory_reserved = max_memory_allocated = memory_allocated

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


_TORCH_CUDA_ON_CPU = _TorchCudaOnCpu()


class _MegatronLoader(SourceFileLoader):
    """Compiles the re-targeted source, and keeps the byte code next to the package's own, under another name.

    A process imports some 175 modules; compiling them takes a second of its three.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        data = self.get_data(path)
        kept, header = cache_from_source(path, optimization=_rules_name()), _header(data)
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
            found = self.get_data(kept)
            if found.startswith(header) and isinstance(code := marshal.loads(found[len(header) :]), CodeType):
                return code
        code = compile(_re_targeted(decode_source(data)), path, "exec", dont_inherit=True)
        if not sys.dont_write_bytecode:
            self.set_data(kept, header + marshal.dumps(code))  # written whole, then renamed; a folder that is read-only stays as it is
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[_SHIM] = _TORCH_CUDA_ON_CPU
        super().exec_module(module)
        _mend(module)


def _re_targeted(source: str) -> str:
    if torch.cuda.is_available():
        return source
    for pattern, replacement in _RULES:
        source = pattern.sub(replacement, source)
    return source


def _rules_name() -> str:
    """Takes the place of "-O" in a cache file's name: a hash of the rules, so that code made by other rules is never read."""
    rules = "" if torch.cuda.is_available() else repr(_RULES)
    return "evenkeel" + hashlib.blake2b(rules.encode(), digest_size=8).hexdigest()


def _header(source: bytes) -> bytes:
    """The header of a byte-code file that is checked by its source's hash (PEP 552): Python's magic number, flags, the hash."""
    return MAGIC_NUMBER + (0b11).to_bytes(4, "little") + source_hash(source)


class _MegatronFinder:
    """Finds megatron.core's modules as usual, and hands them to `_MegatronLoader`."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _MegatronLoader(spec.loader.name, spec.loader.path)
        return spec


def _mend(module: ModuleType) -> None:
    """Changes that no source rule can make: applied after the module has been executed."""
    name = module.__name__.removeprefix(_PACKAGE + ".")
    if name == "transformer.moe.moe_utils":
        # 0.16: never defined without TransformerEngine, yet read: NameError.
        module.__dict__.setdefault("te_general_gemm", None)
    if torch.cuda.is_available():
        return
    if name == "jit":
        module.__dict__["disable_jit_fuser"]()  # jit_fuser is torch.compile, which would need a C++ toolchain at run time
    elif name == "tensor_parallel.random":
        module.__dict__["_get_cuda_rng_state"] = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
        module.__dict__["_set_cuda_rng_state"] = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
        # The tracker warns when the CPU generator moves inside fork(); here it is the generator.
        logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    elif name == "transformer.moe.moe_utils":
        module.__dict__["maybe_move_tensor_to_cpu"] = _split_sizes_on_cpu


def _split_sizes_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """all_to_all_single wants its split sizes as numbers; on a GPU they are moved, on a CPU they would stay a tensor: TypeError."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
