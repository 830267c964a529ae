"""Rules about the SGLang of each node: what an engine there would end with when it starts.

Each rule is a function of (nodes, config) that yields complaints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actors.config import RunConfig
from actors.doctor.facts import Complaint, NodeFacts
from correction.errors import ConfigError
from rollout.engine_settings.engine_capabilities import EngineCapabilities


def engines_have_their_sglang(nodes: Sequence[NodeFacts], config: RunConfig) -> Iterator[Complaint]:
    """Every node that may hold an engine must have the SGLang version that evenkeel hooks into, and evenkeel's plugin for it. The engine
    itself refuses the same, but only after the run has begun, once in each attempt to start it. Kernels for GPUs are checked in
    kernel_rules.py."""
    device = config.rollout.engine.resolved_device
    may_hold_engines = [node for node in nodes if not node.silence and node.rollout_units >= 1 and (device == "cpu" or node.offered_gpus)]
    refused: dict[tuple[str, str], list[str]] = {}
    for node in may_hold_engines:
        versions = {name: node.versions.get(name, "") for name in ("sglang", "torch", "transformers")}
        try:
            EngineCapabilities(device, **versions, has_plugin=node.has_plugin, has_gpu_kernels=True).require()
        except ConfigError as error:
            refused.setdefault((error.reason, error.remedy), []).append(node.name)
    for (reason, remedy), names in refused.items():
        yield Complaint("fail", f"{', '.join(names)}: {reason}", remedy)
