"""What `evenkeel plan` prints, in words and as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from evenkeel.cli import app
from evenkeel.plan.hosts import PACKED
from evenkeel.plan.layouts import Gpus
from tests.actors.known_models import QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B, save_config

RECIPES = Path(__file__).parents[3] / "recipes"
PARAMETERS = 8_190_735_360
"""Of Qwen3-8B, as published."""
OF_NODES = (
    "learner: 16 ranks, bfloat16",
    "two versions and two batches of 0.447 GiB each",  # 1,024 answers of 18,432 tokens, 25 bytes and, for the prompts' 2,048, keys of 4
    "a node with 8 ranks",  # of the 16 those that a node has GPUs for
    "versions in the object store 114 GiB",  # two of 56.9 GiB, on rank 0's node
    "a node with 8 engines",
    "versions fetched to the object store 114 GiB",  # one is read while the next is fetched
    "buckets in shared memory 9.27 GiB",  # two for each engine, of the 0.58 GiB of the embedding
    "layouts of 16 ranks",
)


def printed(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("name", "model", "gpus", "shown"),
    [
        ("qwen3_0.6b_1gpu", QWEN3_06B, "A10Gx1", ["14.7 GiB of 15.7 GiB", "17 of 2,048 tokens", "1.87 GiB for context"]),
        ("qwen3_30b_a3b_4nodes", QWEN3_30B_A3B, "H200x8x4", ["18,867 tensors; 4 nodes of 8 x H200", *OF_NODES]),
    ],
)
def test_the_command_plans_the_other_recipes(name: str, model: dict[str, Any], gpus: str, shown: list[str], tmp_path: Path) -> None:
    text = printed(str(RECIPES / f"{name}.yaml"), f"model={save_config(tmp_path, model)}", "--gpus", gpus)
    assert text.endswith("ready") and [one for one in shown if one not in text] == [], text


def test_the_engines_of_an_elastic_pool_are_those_it_begins_with(tmp_path: Path) -> None:
    """Two to four engines: the run begins with two."""
    recipe = yaml.safe_load((RECIPES / "qwen3_8b_8gpu.yaml").read_text())
    recipe["rollout"] = {key: value for key, value in recipe["rollout"].items() if key != "workers"} | {"min_workers": 2, "max_workers": 4}
    path = tmp_path / "elastic.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert "engines: 2 (up to 4)" in printed(str(path), f"model={save_config(tmp_path, QWEN3_8B)}")


def test_the_command_says_what_telling_mismatch_and_staleness_apart_costs(tmp_path: Path) -> None:
    """Four ranks of half a model each keep two copies of 7.63 GiB of weights; synchronous there is nothing to tell apart."""
    words = (str(RECIPES / "qwen3_8b_8gpu.yaml"), f"model={save_config(tmp_path, QWEN3_8B)}", "correction.preset=split-tis")
    said = printed(*words, "max_staleness=2")
    assert "at most 2: free while the learner waits for rollouts" in said and "2 earlier versions in each rank's host memory" in said
    assert "earlier weights 61 GiB" in said
    assert "earlier version" not in printed(*words, "max_staleness=0")


def test_the_command_says_in_words_what_it_has_in_numbers(tmp_path: Path) -> None:
    words = [str(RECIPES / "qwen3_8b_8gpu.yaml"), f"model={save_config(tmp_path, QWEN3_8B)}"]
    found = json.loads(CliRunner().invoke(app, ["plan", *words, "--json"]).stdout)
    moved, engine = found["traffic"], found["engine"]
    shown, version = printed(*words), 2 * PARAMETERS
    (host,) = found["hosts"]
    parts = " ".join(f"{what} {gib(size)}" for what, size in host["parts"].items() if size)
    rows = [(one["fits"], gib(one["bytes"]), named(one["layout"])) for one in found["layouts"][:8]]
    layouts = " ".join(f"{'fits' if fits else 'too large'}, {size} {layout}" for fits, size, layout in rows)
    for row in (
        "8.19B parameters in 399 tensors; 8 x H100 (80 GiB)",  # 36 layers of 11, embedding, head and last norm
        "batch 300 steps, each on 64 prompts x 8 samples = 512 trajectories",
        # Of half the parameters each rank has 2 bytes and gradients in float32; three more in float32 it shares with another rank.
        f"learner: 4 ranks, bfloat16 weights {gib(PARAMETERS)} gradients {gib(2 * PARAMETERS)} optimizer {gib(3 * PARAMETERS)} activations",
        f"reserve 3 GiB together {gib(found['rank']['total'])} of {gib(Gpus.parse('H100x8').memory)}",
        f"engines: 4, bfloat16 weights {gib(version)} KV cache {gib(engine['cache'])}: {engine['tokens']:,} tokens in addition",
        f"requests {engine['tokens'] // 10_240} of 10,240 tokens; 256 at most",
        f"one version of the weights {gib(version)} object store",
        f"object store {gib(moved['store'])}: two versions and two batches of {gib(512 * 10_240 * PACKED)} each at most",
        f"checkpoint {gib(16 * PARAMETERS)}; 2 are kept",  # the weights for ranks and to serve, 12 bytes of the optimizer
        f"memory of the hosts the node {gib(host['total'])} {parts} layouts of 4 ranks {layouts}",
    ):
        assert row in shown, shown


def named(layout: str) -> str:
    return f"{layout} (the recipe's)" if layout == "tensor_parallel=2 data_parallel=2 recompute_activations=true" else layout


@pytest.mark.parametrize("words", [[], ["learner.virtual_pipeline=2"]])
def test_the_recipe_s_own_layout_is_shown_and_marked_wherever_it_stands(words: list[str], tmp_path: Path) -> None:
    """Of the hundred that divide the model eight are shown. It is none of these, and with virtual stages none of the hundred."""
    recipe, model = str(RECIPES / "qwen3_30b_a3b_4nodes.yaml"), f"model={save_config(tmp_path, QWEN3_30B_A3B)}"
    text = printed(recipe, model, "--gpus", "H200x8x4", *words)
    found = json.loads(CliRunner().invoke(app, ["plan", recipe, model, "--gpus", "H200x8x4", *words, "--json"]).stdout)
    shown = text.partition("layouts of 16 ranks ")[2]
    rows = [f"{gib(one['bytes'])} {one['layout']}" for one in found["layouts"][:8]]
    assert len(found["layouts"]) > 50 and all(row in shown for row in rows)
    marked = f"{gib(found['rank']['total'])} tensor_parallel=2 pipeline_parallel=2 expert_parallel=4 data_parallel=4"
    assert shown.count("(the recipe's)") == 1 and marked in shown, shown


@pytest.mark.parametrize("setting", ["sequence_parallel=false", "distributed_optimizer=false"])
def test_a_setting_that_no_other_layout_has_is_named(setting: str, tmp_path: Path) -> None:
    """Else two rows would have the same words, and other bytes."""
    recipe, model = str(RECIPES / "qwen3_8b_8gpu.yaml"), f"model={save_config(tmp_path, QWEN3_8B)}"
    shown = printed(recipe, model, f"learner.{setting}").partition("layouts of 4 ranks ")[2]
    words = "tensor_parallel=2 data_parallel=2 recompute_activations=true"
    assert shown.count(words) == 2 and shown.count(f"{words} {setting} (the recipe's)") == 1, shown


def gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def test_the_command_prints_the_numbers(tmp_path: Path) -> None:
    words = ["plan", str(RECIPES / "qwen3_8b_8gpu.yaml"), f"model={save_config(tmp_path, QWEN3_8B)}"]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout, parse_constant=pytest.fail)  # Infinity and NaN are no JSON
    assert (found["parameters"], found["findings"]) == (PARAMETERS, [])
    assert found["rank"]["total"] == sum(size for name, size in found["rank"].items() if name != "total")
    (host,) = found["hosts"]
    assert host["node"] == "the node" and host["total"] == sum(host["parts"].values())
    assert host["parts"]["copy for a checkpoint"] == found["traffic"]["checkpoint"], "all ranks are there"
    assert host["parts"]["versions in the object store"] == 2 * found["traffic"]["version"]
    assert host["parts"]["buckets in shared memory"] == 4 * 2 * 2 * 151_936 * 4096, "of four engines, for the embedding"
    own = next(one for one in found["layouts"] if one["layout"] == "tensor_parallel=2 data_parallel=2 recompute_activations=true")
    assert own == {"layout": own["layout"], "bytes": found["rank"]["total"], "fits": True}, "the recipe's own"
    assert [one["fits"] for one in found["layouts"]] == [one["bytes"] <= Gpus.parse("H100x8").memory for one in found["layouts"]]
    in_float8 = json.loads(CliRunner().invoke(app, [*words, "rollout.engine.quantization=float8_block", "--json"]).stdout)
    assert in_float8["traffic"]["version"] < found["traffic"]["version"]
    shown = CliRunner().invoke(app, [*words, "--gpus", "24GBx8"])
    assert "a learner rank needs" in shown.stdout and "the run can't work like this" in shown.stdout
