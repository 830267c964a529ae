"""Routing replay: given experts are taken, the routers still learn, and prompts are still shared.

1. With given experts, logprobs and gradient (the routers' too) equal Hugging Face's with the same ones forced into its routers.
2. Sharing prompts, micro-batches and the engine's type of integers change nothing; a prompt that was routed twice is shared up to there.
3. R2: training takes the routing of the proximal forward; the learner's own routing is Hugging Face's.
4. A batch without routes, or a model without experts, is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.correction.correct import correct
from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.learner.model.inputs import ModelInputs, find_shared_prefixes
from evenkeel.learner.model.routing import smallest_type
from tests.learner.learner_cases import (
    TIS,
    gradients,
    grouped_batch,
    hf_model,
    largest_difference,
    learner_on,
    off_policy_batch,
    random_batch,
    save_model,
)
from tests.learner.moe_cases import LAYERS, TOPK, expert_gradients, random_routes, replayed_logprobs, router_logits, save_moe

GROUPS = [([14, 14, 9, 14], [9, 4, 6, 12]), ([20] * 4, [5, 1, 8, 7])]


@pytest.mark.parametrize(
    ("norm_topk", "settings"), [(True, {"recompute_activations": True}), (False, {"tokens_per_microbatch": 60, "shared_prompts": False})]
)
def test_given_experts_are_taken_and_routers_learn(tmp_path: Path, norm_topk: bool, settings: dict[str, Any]) -> None:
    """Supervised on the replayed routing: the loss is minus the sum of logprobs, so Hugging Face's gradient is that of one sum."""
    folder = save_moe(tmp_path / "m", norm_topk_prob=norm_topk)
    batch = grouped_batch(GROUPS)
    batch = replace(batch, routed_experts=random_routes(batch), advantages=torch.ones(batch.num_tokens))
    reference = hf_model(folder)
    theirs = replayed_logprobs(reference, batch)
    (-theirs.sum() / batch.loss_mask.sum()).backward()
    with learner_on(folder, routing_replay="rollout", learning_rate=0.0, clip_grad=0.0, **settings) as learner:
        ours = learner.logprobs(batch)
        on_policy = replace(batch, behavior_logprobs=ours, proximal_logprobs=ours)  # ratio 1: the gradient is that of -logprob
        result = learner.step(correct(on_policy, TIS), TIS, step=0)
        found = gradients(learner)
        unguided = learner.logprobs(replace(batch, routed_experts=None))
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-5)
    assert (unguided - ours).abs().max() > 0.1, "random routes must matter"
    expected = expert_gradients(reference)
    assert largest_difference(found, expected) < 2e-5
    assert all(expected[f"model.layers.{i}.mlp.gate.weight"].abs().max() > 1e-3 for i in range(LAYERS))
    assert result.routing_agreement is not None and result.routing_agreement < 0.3  # 1 in 28 pairs by chance


def test_shared_prompts_under_replay(tmp_path: Path) -> None:
    """Rows fall where prompts are shared, and where one answer's prompt was routed otherwise from its 6th token on, only 5 are shared."""
    batch = grouped_batch([([20] * 4, [5, 1, 8, 7])])
    routes = random_routes(batch)
    together = replace(batch, routed_experts=routes)
    start = int(batch.offsets[2])
    other = routes.clone()
    other[start + 5] = (other[start + 5] + 1) % 8
    apart = replace(batch, routed_experts=other)
    assert [prefix.shared for prefix in find_shared_prefixes(together, share_prompts=True)] == [20]
    assert [prefix.shared for prefix in find_shared_prefixes(apart, share_prompts=True)] == [5]
    assert len(ModelInputs.of(together).token_ids) < len(ModelInputs.of(together, share_prompts=False).token_ids)
    folder = save_moe(tmp_path / "m")
    for given in (together, apart):
        found = []
        for shared in (True, False):
            with learner_on(folder, routing_replay="rollout", shared_prompts=shared) as learner:
                found.append(learner.logprobs(given))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)
        assert found[0].abs().sum() > 0


def test_training_takes_the_routing_of_the_proximal_forward(tmp_path: Path) -> None:
    """R2. The recorded experts are Hugging Face's own top k; after an update the learner would choose others, and takes these."""
    folder = save_moe(tmp_path / "m")
    reference = hf_model(folder)
    with learner_on(folder, routing_replay="recompute", learning_rate=0.02, tokens_per_microbatch=150) as learner:
        batch = off_policy_batch(learner)
        proximal = learner.proximal(batch)
        routes = proximal.routed_experts
        assert routes is not None and routes.dtype == torch.uint8 and routes.shape == (batch.num_tokens, LAYERS, TOPK)
        guided = replace(batch, routed_experts=routes)
        assert torch.equal(proximal.logprobs, learner.logprobs(batch))
        torch.testing.assert_close(learner.logprobs(guided), proximal.logprobs, rtol=0, atol=1e-6)
        assert learner.step(correct(guided, TIS), TIS, step=0).routing_agreement == 1.0
        after = learner.step(correct(guided, TIS), TIS, step=1)
        assert after.routing_agreement is not None and after.routing_agreement < 1.0
        learner.save_hf(tmp_path / "after")
        torch.testing.assert_close(
            learner.logprobs(guided), replayed_logprobs(hf_model(tmp_path / "after"), guided).detach(), rtol=0, atol=2e-5
        )
    inputs = ModelInputs.of(batch, share_prompts=False)
    read = [int((inputs.row_of_token[a:b] >= 0).sum()) for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
    theirs = torch.stack([logits.topk(TOPK).indices for logits in router_logits(reference, batch, read)], 1)
    assert torch.equal(routes[inputs.row_of_token >= 0].long().sort(-1).values, theirs.sort(-1).values)


def test_the_type_holds_the_number_of_experts() -> None:
    assert [smallest_type(experts) for experts in (8, 256, 257, 32768)] == [torch.uint8, torch.uint8, torch.int16, torch.int16]


def test_batches_without_routes_and_dense_models_are_refused(tmp_path: Path) -> None:
    folder = save_moe(tmp_path / "m")
    batch = random_batch()
    with learner_on(folder, routing_replay="rollout") as learner, pytest.raises(DataError, match=r"no routed_experts.*return_routed"):
        learner.proximal(batch)
    with learner_on(folder, routing_replay="recompute") as learner, pytest.raises(DataError, match=r"no routed_experts.*LearnerRank\.pro"):
        learner.step(correct(replace(batch, proximal_logprobs=batch.behavior_logprobs), TIS), TIS, step=0)
    dense = save_model(tmp_path / "dense")
    with pytest.raises(ConfigError, match="routing_replay = rollout: qwen3 has no experts"), learner_on(dense, routing_replay="rollout"):
        pass
