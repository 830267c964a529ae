"""The processes of the real SGLang engine: where they listen, what they import, and which of SGLang's arguments we refuse."""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
from typing import Any

import psutil
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from evenkeel.learner.hf.families import FAMILIES
from evenkeel.rollout import sglang_plugin
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_arguments import REFUSED_OF_RANKS
from evenkeel.rollout.engine_settings.engine_config import RESERVED_ARGUMENTS

pytestmark = pytest.mark.engine


def made_anew(module: str) -> Any:
    """Another copy of a module of SGLang's."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh


def test_an_engines_processes_listen_on_loopback_alone(engine: RolloutEngine) -> None:
    """The store by which the ranks find each other has no authentication, and torch's own listens on all interfaces."""
    schedulers = [child for child in psutil.Process().children(recursive=True) if _name(child).startswith("sglang::scheduler")]
    assert schedulers
    found = {one.laddr for child in schedulers for one in child.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    assert found, "the store was seen"
    assert all(ipaddress.ip_address(one.ip.removeprefix("::ffff:")).is_loopback for one in found), found
    assert any(20_000 <= one.port < 32_000 for one in found), "the port is ours, not one that the kernel may give away"


def _name(process: psutil.Process) -> str:
    command = process.cmdline()
    return command[0] if command else ""


def test_a_scheduler_imports_our_models_alone_and_no_compiler(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own modules, made anew with the variables that its children get. Asked for another architecture it looks through all of its
    models; of these a stand-in is found here."""
    for name, value in engine._process._environment().items():
        monkeypatch.setenv(name, value)
    module = made_anew("sglang.srt.models.registry")
    registry, looked_through = module.ModelRegistry, []
    assert {"Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM", "Glm4ForCausalLM"} <= set(registry.models)
    assert registry.resolve_model_cls(["Qwen3ForCausalLM"])[1] == "Qwen3ForCausalLM"
    assert len(registry.models) < 30 and not registry._default_models_loaded
    monkeypatch.setattr(module, "import_model_classes", lambda package: looked_through.append(package) or {"GraniteForCausalLM": object})
    assert registry.is_arch_supported("GraniteForCausalLM") and looked_through == ["sglang.srt.models"], "others are found, too"
    marked = made_anew("sglang.srt.managers.overlap_utils")._assert_nonneg_and_invalidate
    assert not hasattr(marked, "_torchdynamo_orig_callable"), "to mark a function for the compiler loads it"


def test_each_architecture_that_the_learner_trains_is_among_the_models_looked_at_first(engine: RolloutEngine) -> None:
    """By transformers' name of it: of one that isn't, the engine's start would import every model of SGLang's."""
    ours = {one.__name__ for one in importlib.import_module("evenkeel.rollout.sglang_plugin.served_models.families").EntryClass}
    assert {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in FAMILIES} <= ours


@pytest.mark.slow  # it imports 250 models of SGLang's: another version of SGLang alone can change what is found
def test_the_models_looked_at_first_are_those_that_sglang_itself_would_take(engine: RolloutEngine) -> None:
    """The very classes of its full registry, which has many more."""
    everything = importlib.import_module("sglang.srt.models.registry").import_model_classes("sglang.srt.models")
    ours = {one.__name__: one for one in importlib.import_module("evenkeel.rollout.sglang_plugin.served_models.families").EntryClass}
    assert "GraniteForCausalLM" in everything and len(everything) > 200
    assert ours and {name: everything.get(name) for name in ours} == ours


def test_what_is_refused_are_arguments_of_sglang(engine: RolloutEngine) -> None:
    """A name that SGLang doesn't know would refuse nothing."""
    from sglang.srt.server_args import ServerArgs

    assert set(REFUSED_OF_RANKS) | set(RESERVED_ARGUMENTS) <= set(ServerArgs.__struct_fields__)


@pytest.mark.parametrize(("is_there", "is_for_gpus", "serves"), [(False, False, False), (True, False, True), (True, True, False)])
def test_kernels_for_gpus_stay_away_from_an_engine_on_a_cpu(
    is_there: bool, is_for_gpus: bool, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `make gpu` there is an sgl_kernel, which loads CUDA code or fails. Seen on a machine without a GPU: 'Could not load any
    common_ops library', and no engine."""
    monkeypatch.setattr(sglang_plugin.importlib.util, "find_spec", lambda name: object() if is_there else None)
    monkeypatch.setattr(sglang_plugin, "installed", lambda name: "0.4.7" if is_for_gpus and name == "sglang-kernel" else "")
    assert sglang_plugin._serves_a_cpu("sgl_kernel") is serves
    assert sglang_plugin._serves_a_cpu("torchvision") is is_there
