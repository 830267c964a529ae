"""What only the learner's ranks look at, apart from its batch: each reads its own, and computes to the last bit what it would with all.

Behaviours locked here: on two real ranks (gloo) the bytes that each reads; forwards, training in several optimizer steps, R3, R2 and top-K
equal the whole batch's bit for bit; what can't be read is said before any rank has begun.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from evenkeel.actors.carriers import PreparedBatch
from evenkeel.actors.groups import tokens as payloads
from evenkeel.actors.ranks import learner_rank_actor
from evenkeel.actors.ranks.learner_rank_actor import LearnerRankActor
from evenkeel.actors.record.skipped_batches import SkippedBatch, keep_and_describe
from evenkeel.correction.batch import CorrectedBatch, PackedBatch
from evenkeel.correction.correct import correct
from evenkeel.correction.wide import WideFields, WidePlace, route_keys
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.kept_weights import KeptWeights
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.learner.model.inputs import find_shared_prefixes
from evenkeel.learner.results import SkipReason
from tests.actors.ranks.test_learner_rank_answers import Silent
from tests.learner.kept_cases import with_kept_sets
from tests.learner.learner_cases import TIS, grouped_batch, run_ranks, save_model, weights
from tests.learner.moe_cases import EXPERTS, random_routes, save_moe
from tests.learner.test_learner_ranks import TOPK, topk_batch

EIGHT = [([12] * 4, [6, 6, 6, 6])] * 8
"""Groups alike, so that each of two ranks has four of them."""


def apart_from(batch: PackedBatch, store: dict[str, Any]) -> PackedBatch:
    """The batch without its wide fields, which are in the store, an entry for each group."""
    bounds, places = batch.offsets.tolist(), []
    ids = batch.group_ids.tolist()
    for i, of_group in enumerate(ids):
        tokens = slice(bounds[i], bounds[i + 1])
        mask, routes, topk = batch.loss_mask[tokens], batch.routed_experts, batch.topk_ids
        own = WideFields(
            routed_experts=None if routes is None else routes[tokens][:-1],
            topk_ids=None if topk is None else topk[tokens][mask].int(),
            topk_logprobs=None if batch.topk_logprobs is None else batch.topk_logprobs[tokens][mask],
            kept_counts=None if batch.kept_counts is None else batch.kept_counts[tokens][mask],
            kept_ids=batch.select([i]).kept_ids,
        )
        held = store.setdefault(f"group {of_group}", [])
        keys = None if own.routed_experts is None else route_keys(own.routed_experts[: int(mask.nonzero()[0])])
        places.append(WidePlace(((f"group {of_group}", len(held)),), keys))
        held.append(own)
    nothing = dict.fromkeys(("routed_experts", "topk_ids", "topk_logprobs", "kept_counts", "kept_ids"))
    return replace(batch, **nothing, wide=tuple(places))


class Store:
    """Stands where Ray's object store stands, and counts what is read of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[str, Any] = {}
        self.read = 0
        monkeypatch.setattr(payloads, "ray", SimpleNamespace(get=self.get, exceptions=ray.exceptions))
        monkeypatch.setattr(learner_rank_actor, "ray", SimpleNamespace(put=self.put))

    def put(self, value: Any) -> str:
        self.held[name := f"put {len(self.held)}"] = value
        return name

    def get(self, references: Any, timeout: float) -> Any:
        if isinstance(references, list):
            return [self.get(one, timeout) for one in references]
        if references not in self.held:
            raise ray.exceptions.ObjectLostError("id", "owner", "")
        self.read += sum(one.nbytes for one in self.held[references])
        return self.held[references]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for of_group in self.held.values() for one in of_group)


def rank_of(learner: LearnerRank) -> LearnerRankActor:
    actor = LearnerRankActor(LearnerConfig(), 0, bind="")
    actor._learner, actor._kept, actor._endpoint = learner, KeptWeights(learner), Silent()  # type: ignore[assignment]
    return actor


def routed_batch() -> PackedBatch:
    """Each group's third prompt was routed otherwise from its sixth token on: who reads what depends on the experts. With kept sets."""
    batch = with_kept_sets(grouped_batch(EIGHT))
    batch = replace(batch, behavior_logprobs=torch.where(batch.loss_mask, -4.5, 0.0))
    routes = random_routes(batch)
    for i in range(2, batch.num_sequences, 4):
        routes[batch.offsets[i] + 5] = (routes[batch.offsets[i] + 5] + 1) % EXPERTS
    routes[batch.offsets[1:] - 1] = torch.arange(2, dtype=torch.uint8)
    return replace(batch, routed_experts=routes)


def differences(left: Any, right: Any) -> list[str]:
    """Names of tensors that differ in a bit."""
    return [f.name for f in fields(left) if isinstance(a := getattr(left, f.name), Tensor) and not torch.equal(a, getattr(right, f.name))]


def trained(learner: LearnerRank, folder: Path, batch: PackedBatch, proximal: Callable[[], Any], step: Callable[[Any], Any]) -> Any:
    """Weights after a forward and a step on a fresh model, and what they said."""
    learner.load(folder)
    said = proximal()
    found = step(correct(replace(batch, proximal_logprobs=said.logprobs), TIS))
    return said, found, weights(learner)


def both_ways(rank: int, ranks: int, port: int, folder: Path, replay: str) -> dict[str, Any]:
    """Whole, and by places. Returns: what differs, and bytes read for the forward and for training."""
    config = LearnerConfig(
        data_parallel=ranks, routing_replay=replay, optimizer_steps_per_batch=2, tokens_per_microbatch=60, learning_rate=1e-3
    )
    with pytest.MonkeyPatch.context() as patch:
        store = Store(patch)
        learner = LearnerRank(config, rank, ranks, "127.0.0.1", port)
        batch = routed_batch() if replay == "rollout" else grouped_batch(EIGHT)
        batch = replace(batch, behavior_logprobs=torch.where(batch.loss_mask, -4.5, 0.0))
        learner.load(folder)
        actor, light = rank_of(learner), apart_from(batch, store.held) if replay == "rollout" else batch

        def whole_step(corrected: CorrectedBatch) -> Any:
            routes = learner_said.routed_experts if replay == "recompute" else batch.routed_experts
            return learner.step(replace(corrected, batch=replace(corrected.batch, routed_experts=routes)), TIS, step=3)

        learner_said = learner.proximal(batch)
        whole = trained(learner, folder, batch, lambda: learner.proximal(batch), whole_step)
        read = []

        def forward() -> Any:
            if light.wide is not None:
                assert actor.fetch(light, None, 3, 60.0, everything=False) == {}
            read.append(store.read)
            return actor.proximal(1, light, 0)[1]

        def step(corrected: CorrectedBatch) -> Any:
            if replay == "recompute":
                corrected = replace(corrected, batch=replace(corrected.batch, wide=places.pop()))
            assert actor.fetch(corrected, TIS, 3, 60.0, everything=False) == {}
            read.append(store.read - read[0])
            stepped, values = actor.step(2, corrected, TIS, 3, 1.0)
            return stepped.result, values

        places: list[Any] = []

        def forward_and_keep() -> Any:
            said = forward()
            places.append(said.route_places)
            return said

        apart_said, (numbers, values), apart_weights = trained(learner, folder, light, forward_and_keep, step)
        differ = differences(whole[0], apart_said) if replay == "rollout" else []
        differ += differences(whole[1].values, values) + differences(whole[1].values.decided, values.decided)
        differ += [name for name, one in whole[2].items() if not torch.equal(one, apart_weights[name])]
        differ += [] if numbers.metrics == whole[1].metrics and numbers.routing_agreement == whole[1].routing_agreement else ["metrics"]
        lost = {}
        if replay == "rollout":
            learner.load_reference(folder)
            assert actor.fetch(light, None, 3, 60.0, everything=False) == {}
            differ += [] if torch.equal(actor.reference_logprobs(3, light, 1)[1], learner.reference_logprobs(batch)) else ["reference"]
            actor._kept.keep(0, oldest=0)
            expected = actor._kept.at_sampling(batch, oldest=0), learner.logprobs(batch)
            assert actor.fetch(light, None, 3, 60.0, everything=True) == {}
            again = actor.at_sampling(4, light, 1, 0, True)[1]
            torch.testing.assert_close((again.at_sampling, again.now), expected, rtol=0, atol=0, equal_nan=True)
            del store.held["group 5"]
            lost = {name: actor.fetch(light, None, 3, 60.0, everything=name == "everything") for name in ("lost", "everything")}
        learner.close()
    return {"differ": differ, "read": read, "of": store.nbytes, "agreement": numbers.routing_agreement} | lost


@pytest.mark.parametrize("replay", ["rollout", "recompute"])
def test_two_ranks_read_half_each_and_compute_what_they_would_with_all(tmp_path: Path, replay: str) -> None:
    """Eight groups alike in two optimizer steps: of each step two groups are a rank's; of the forward four. Balancing may split one group
    between both ranks, which then both read its object. The lost group of R3 is one rank's: it alone says so, and none has begun."""
    found = run_ranks(both_ways, save_moe(tmp_path / "m"), replay)
    assert [one["differ"] for one in found] == [[], []]
    for one in found:
        assert one["agreement"] is not None and (one["agreement"] < 0.5) == (replay == "rollout"), "random routes, or its own before a step"
    if replay == "rollout":
        whole = found[0]["of"] * 8 // 7  # one of eight objects is gone by then
        for one in found:
            assert all(0.45 * whole <= read <= 0.55 * whole for read in one["read"]), (one["read"], whole)
        gone = {5: payloads.GONE}
        assert sorted((one["lost"] for one in found), key=len) == [{}, gone] and [one["everything"] for one in found] == [gone, gone]


def test_top_k_logprobs_and_kept_sets_are_read_apart_and_train_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, store = save_model(tmp_path / "m", tie=False), Store(monkeypatch)
    learner = LearnerRank(LearnerConfig(tokens_per_microbatch=150))
    try:
        learner.load(folder)
        batch = replace(with_kept_sets(topk_batch(learner)), advantages_by="own")
        whole = learner.step(correct(batch, TOPK), TOPK, step=0), weights(learner)
        learner.load(folder)
        actor, corrected = rank_of(learner), correct(apart_from(batch, store.held), TOPK)
        assert actor.fetch(corrected, TOPK, 0, 60.0, everything=False) == {}
        stepped, values = actor.step(1, corrected, TOPK, 0, 1.0)
        numbers, after = stepped.result, weights(learner)
    finally:
        learner.close()
    assert numbers is not None and numbers.metrics == whole[0].metrics and numbers.metrics["clip_share"] > 0.02
    assert differences(whole[0].values, values) == [] and all(torch.equal(one, after[name]) for name, one in whole[1].items())
    assert store.read == store.nbytes > 0, "one rank reads all"


def test_keys_say_where_prompts_were_routed_alike() -> None:
    """As the experts themselves do: five tokens of the group are read once, after that one prompt goes its own way."""
    batch = routed_batch()
    light = apart_from(batch, {})
    assert find_shared_prefixes(light, share_prompts=True) == find_shared_prefixes(batch, share_prompts=True)
    assert {prefix.shared for prefix in find_shared_prefixes(light, share_prompts=True)} == {5}
    chosen = [7, 2, 31]
    held = {f"group {number}": of_group for number, of_group in enumerate(_groups_of(batch))}
    assert torch.equal(light.select(chosen).holding(held).with_wide_fields().routed_experts, batch.select(chosen).routed_experts)  # type: ignore[arg-type]


def _groups_of(batch: PackedBatch) -> list[list[WideFields]]:
    store: dict[str, Any] = {}
    apart_from(batch, store)
    return list(store.values())


def test_a_batch_that_is_kept_for_study_is_whole() -> None:
    """So it is what the step saw, wherever that lay; where some of it is gone, the step's sentence says so."""
    store: dict[str, Any] = {}
    batch = routed_batch()
    light = replace(apart_from(batch, store), proximal_logprobs=batch.behavior_logprobs)
    kept: list[SkippedBatch] = []
    result: Any = SimpleNamespace(grad_norms=(math.inf,), group_norms={}, skipped=(SkipReason.NOT_FINITE,), optimizer_steps=0, loss=1.0)

    async def told(is_lost: bool) -> str:
        read: dict[str, Any] = {}
        for name, fields_of_group in store.items():
            read[name] = asyncio.get_running_loop().create_future()
            is_gone = is_lost and name == "group 3"
            error = ray.exceptions.ObjectLostError("id", "owner", "")
            read[name].set_exception(error) if is_gone else read[name].set_result(fields_of_group)
        corrected = correct(light.holding(read), TIS)
        prepared = PreparedBatch(0, TIS, corrected, batch.num_tokens, (), (), 0.0, 0.0)
        return await keep_and_describe(lambda one: kept.append(one), 1, prepared, result)

    assert "not kept: skipped_batches holds" in asyncio.run(told(False))  # what `keep` says with None
    assert kept[0].corrected.batch.wide is None and torch.equal(kept[0].corrected.batch.routed_experts, batch.routed_experts)  # type: ignore[arg-type]
    assert "the batch is not kept (ActorLost: " in asyncio.run(told(True)) and len(kept) == 1
