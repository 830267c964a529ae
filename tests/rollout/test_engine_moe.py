"""An engine on a tiny mixture of experts with a head of its own: its fused experts, seen and updated under Hugging Face's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from correction.checksum import tensor_checksum
from correction.weight_spec import WeightSpec
from rollout.engine import RolloutEngine
from rollout.engine_config import EngineConfig
from tests.conftest import BackgroundLoop
from tests.rollout.hf_reference import hf_model, largest_difference, perturbed, response_logprobs, tiny_weights
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 experts, 2 a token; 512 tokens, head not tied."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny_moe"), "qwen3_moe", tie=False)


def test_experts_under_their_own_names(moe_folder: Path, engine_loop: BackgroundLoop) -> None:
    weights = tiny_weights(moe_folder)
    engine = engine_loop.run(RolloutEngine.start(moe_folder, EngineConfig(device="cpu", max_total_tokens=8192), name="moe engine"))
    try:
        assert engine_loop.run(engine.weight_specs()) == {name: WeightSpec.of(name, tensor) for name, tensor in weights.items()}
        assert engine_loop.run(engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
        new = perturbed(weights, seed=1, scale=0.02)
        engine_loop.run(engine.update_weights(1, new))
        assert engine_loop.run(engine.weight_checksums()) == {name: tensor_checksum(tensor) for name, tensor in new.items()}
        saved = moe_folder.parent / "updated"
        updated = hf_model(moe_folder)
        updated.save_pretrained(saved)
        from safetensors.torch import save_file

        save_file(new, saved / "model.safetensors", metadata={"format": "pt"})    # transformers fuses experts in memory, not in files
        completion = engine_loop.run(engine.generate([5, 6, 7, 8], max_tokens=40, ignore_stop=True))[0]
        reference = response_logprobs(hf_model(saved), [5, 6, 7, 8], completion.token_ids)
        assert largest_difference(completion.logprobs, reference) < 2e-5
    finally:
        engine_loop.run(engine.shutdown())
