"""What the installed SGLang and torch offer, asked of the packages themselves when an engine starts."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from correction.errors import ConfigError

TESTED_SGLANG = "0.5.21"
"""The version whose protocol and answers this package was written against."""
PLUGIN_GROUPS = ("sglang.srt.platforms", "sglang.srt.plugins")


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """One engine's surroundings; printed at start-up and kept with the run."""

    device: str
    """cpu or cuda."""
    sglang: str
    torch: str
    transformers: str
    has_plugin: bool
    """SGLang finds evenkeel's entry points: checksums, logprobs and, on a CPU, the stand-ins depend on them."""
    has_gpu_kernels: bool
    """The real sgl_kernel package; where it is absent, CPU engines use a stand-in."""
    has_update_session: bool
    """Weight updates are framed by begin and end (SGLang 0.5.2x)."""
    has_weight_check: bool
    """The request that evenkeel's checksums travel through."""
    has_version_spans: bool
    """Answers say which tokens came from which weight version."""
    has_bucket_format: bool
    """One flat tensor for many weights."""
    has_routed_experts: bool
    """Answers can carry the experts that each token was routed to."""

    def missing(self) -> list[str]:
        """What evenkeel can't do without, and this installation lacks."""
        needed = ("has_plugin", "has_update_session", "has_weight_check", "has_version_spans", "has_bucket_format")
        lacking = [name for name in needed if not getattr(self, name)]
        return lacking if self.device == "cpu" or self.has_gpu_kernels else [*lacking, "has_gpu_kernels"]

    def require(self) -> None:
        """Raises: ConfigError that names what is missing, and the version that has it."""
        if lacking := self.missing():
            raise ConfigError(
                f"sglang {self.sglang} on {self.device} lacks {', '.join(lacking)}: evenkeel was made for sglang {TESTED_SGLANG}. "
                "Install that version, and evenkeel itself as a package (pip install -e .) in the same environment"
            )


def probe(device: str) -> EngineCapabilities:
    """Ask the installed packages. Imports SGLang's request types: seconds, and only where an engine is about to be built."""
    requests = _module("sglang.srt.managers.io_struct")
    return EngineCapabilities(
        device=device,
        sglang=_version("sglang"),
        torch=_version("torch"),
        transformers=_version("transformers"),
        has_plugin=all(_has_our_entry_point(group) for group in PLUGIN_GROUPS),
        has_gpu_kernels=_version("sgl-kernel") != "" or _version("sglang-kernel") != "",
        has_update_session=hasattr(requests, "BeginWeightUpdateReqInput") and hasattr(requests, "EndWeightUpdateReqInput"),
        has_weight_check=hasattr(requests, "CheckWeightsReqInput"),
        has_version_spans=_module("sglang.srt.utils.weight_versions") is not None,
        has_bucket_format=_module("sglang.srt.weight_sync.tensor_bucket") is not None,
        has_routed_experts="return_routed_experts" in getattr(getattr(requests, "GenerateReqInput", None), "__annotations__", {}),
    )


def _has_our_entry_point(group: str) -> bool:
    return any(point.value.startswith("rollout.sglang_plugin") for point in entry_points(group=group))


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
