"""What has to be installed where an engine is to run. Looked up without importing any of it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points
from importlib.metadata import version as installed_version

from evenkeel.correction.errors import ConfigError

TESTED_SGLANG = "0.5.21"
"""The version whose protocol, answers and functions this package was written against."""
GPU_KERNELS = "sglang-kernel"
"""The package that SGLang's GPU kernels come in, by the name that SGLang 0.5.21 depends on; their module is `sgl_kernel`."""
PLUGIN_GROUPS = ("sglang.srt.platforms", "sglang.srt.plugins")


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What is installed where an engine is to run."""

    device: str
    """cpu or cuda."""
    sglang: str
    torch: str
    transformers: str
    has_plugin: bool
    """SGLang finds evenkeel's entry points: checksums, logprobs and, on a CPU, the stand-ins depend on them."""
    has_gpu_kernels: bool
    """SGLang's kernels for GPUs. Engines on a CPU use a stand-in for them in any case."""

    @classmethod
    def of_this_machine(cls, device: str) -> EngineCapabilities:
        return cls(
            device=device,
            sglang=installed("sglang"),
            torch=installed("torch"),
            transformers=installed("transformers"),
            has_plugin=has_plugin(),
            has_gpu_kernels=installed(GPU_KERNELS) != "",
        )

    def require(self) -> None:
        """Raises: ConfigError that names what is missing, and what to install."""
        if self.sglang.partition("+")[0] != TESTED_SGLANG:
            raise ConfigError(
                f"sglang: {self.sglang or 'none'} is installed: evenkeel hooks functions of sglang {TESTED_SGLANG} by name",
                remedy="Install that version",
            )
        if not self.has_plugin:
            raise ConfigError(
                "sglang does not find evenkeel's plugin: without it there are no checksums and no seeds",
                remedy="Install evenkeel itself as a package (pip install -e .) in the same environment",
            )
        if self.device == "cuda" and not self.has_gpu_kernels:
            raise ConfigError(
                f"rollout.engine.device = cuda without SGLang's GPU kernels ({GPU_KERNELS}): that is an installation for CPUs",
                remedy="Install the extra gpu (make gpu, docs/gpu.md)",
            )


def has_plugin() -> bool:
    """Whether SGLang finds evenkeel's entry points in this environment."""
    ours = "evenkeel.rollout.sglang_plugin"
    return all(any(point.value.startswith(ours) for point in entry_points(group=group)) for group in PLUGIN_GROUPS)


def installed(distribution: str) -> str:
    """Version of an installed distribution; empty if it isn't installed."""
    try:
        return installed_version(distribution)
    except PackageNotFoundError:
        return ""
