"""The import hook re-targets megatron.core alone, and says so when it comes too late."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.correction.errors import ConfigError
from evenkeel.learner.model import megatron
from evenkeel.learner.model.cpu_hook import _RULES, _MegatronFinder, _MegatronLoader
from tests.learner.learner_cases import learner_on, save_model

ON_CPU = not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not ON_CPU, reason="torch sees a GPU: nothing is re-targeted")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("x = torch.cuda.current_device()", "x = _torch_cuda_on_cpu.current_device()"),
        ('t = torch.zeros(1, device="cuda")', 't = torch.zeros(1, device="cpu")'),
        ("def f(device: str = 'cuda'):", "def f(device: str = 'cpu'):"),
        ("assert p.type() == 'torch.cuda.FloatTensor'", "assert p.type() == 'torch.FloatTensor'"),
        ("a.cuda(non_blocking=True)", "a.cpu()"),
        ("from torch.cuda import Event", "from torch.cuda import Event"),
        ("t.to('cuda')", "t.to('cpu')"),
    ],
)
def test_rules(source: str, target: str) -> None:
    for pattern, replacement in _RULES:
        source = pattern.sub(replacement, source)
    assert source == target


def test_byte_code_is_kept_for_as_long_as_it_is_that_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second import compiles nothing. After a change of the source or of the rules, or damage, the source is compiled again."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    monkeypatch.setattr("sys.pycache_prefix", None)
    compiled: list[str] = []
    monkeypatch.setattr("evenkeel.learner.model.cpu_hook._re_targeted", lambda source: compiled.append(source) or source)
    path = tmp_path / "some.py"

    def value_of(source: str) -> int:
        path.write_text(source)
        found: dict[str, int] = {}
        exec(_MegatronLoader("some", str(path)).get_code("some"), found)
        return found["x"]

    assert [value_of("x = 1"), value_of("x = 1")] == [1, 1] and compiled == ["x = 1"]
    assert [value_of("x = 2"), value_of("x = 2")] == [2, 2] and compiled == ["x = 1", "x = 2"]
    (kept,) = (tmp_path / "__pycache__").iterdir()
    whole = kept.read_bytes()
    for damaged in (b"", whole[:10], whole[:-5], whole[:16] + b"N", bytes(100)):
        compiled.clear()
        kept.write_bytes(damaged)
        assert value_of("x = 2") == 2 and compiled == ["x = 2"] and kept.read_bytes() == whole
    monkeypatch.setattr("evenkeel.learner.model.cpu_hook._RULES", ())
    assert value_of("x = 2") == 2 and len(compiled) == 2
    assert len(list((tmp_path / "__pycache__").iterdir())) == 2


def test_a_rank_does_not_import_what_megatron_s_inference_reports_to() -> None:
    """wandb is installed for the driver's tracker, which can import it; a rank would start half a second later for it."""
    assert importlib.import_module("megatron.core.inference.contexts.dynamic_context").HAVE_WANDB is False
    assert importlib.import_module("wandb").__version__


def test_torch_itself_is_untouched() -> None:
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_megatron_imported_too_early_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first device literal would fail far from the cause. Here it is imported, and the hook isn't there."""
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, _MegatronFinder)])
    monkeypatch.delitem(sys.modules, "evenkeel.learner.model.megatron")
    with pytest.raises(ConfigError, match=r"import evenkeel\.learner\.model\.megatron first"):
        importlib.import_module("evenkeel.learner.model.megatron")
    assert "evenkeel.learner.model.megatron" not in sys.modules


@pytest.fixture
def adam_of_apex(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The Adam of an Apex that is there while Megatron's optimizers are imported once more, and our names of them. Apex stands for
    TransformerEngine, too."""
    apex: Any = types.ModuleType("apex.optimizers")
    apex.FusedAdam = apex.FusedSGD = type("FusedAdam", (), {})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "apex", types.ModuleType("apex"))
        patch.setitem(sys.modules, "apex.optimizers", apex)
        importlib.reload(megatron._optimizers)
        importlib.reload(megatron)
        yield apex.FusedAdam
    importlib.reload(megatron._optimizers)
    importlib.reload(megatron)


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex are not installed")
def test_an_installed_apex_does_not_change_the_optimizer(tmp_path: Path, adam_of_apex: type) -> None:
    """Megatron would take its Adam, whose number of steps is in no checkpoint of ours."""
    assert megatron._optimizers.Adam is adam_of_apex
    with learner_on(save_model(tmp_path / "m")) as learner:
        made = [type(one.optimizer) for one in learner.optimizer._optimizer.chained_optimizers]
    assert made == [torch.optim.AdamW]
