"""docs/library.md: its examples run, and its table from other trainers' flags holds.

The plain loop runs here, under the name that the distribution installs. TRL's and verl's examples, and the rows of their tables, of
Liger-Kernel's and of TorchRL's, are run by Pythons of their own and compared with those projects' own code (slow).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.correction_pass import VERL
from benchmarks.peers import TRL
from evenkeel import correction
from evenkeel.correction import PRESETS, CorrectionConfig, correct, needs_gradient_factor, policy_loss
from tests.correction.fixtures import random_batch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "library.md"
TEXT = PAGE.read_text()
CASES = ROOT / "tests" / "correction"
VERL_TRAINERS = (
    *("accelerate", "aiohttp", "cachetools", "datasets", "fastapi", "hydra-core", "peft", "pillow", "tensorboard", "torchdata", "uvicorn"),
    "transferqueue",
)
"""What verl's trainers and losses import, beside what its helper does."""
INSTALLS = {
    "trl": TRL.installs,
    "verl": (*VERL.installs, VERL_TRAINERS),
    "liger": (("torch==2.13.0", "liger-kernel==0.8.5", "transformers==5.23.0", "pydantic"),),
    "torchrl": (("torch==2.13.0", "torchrl==0.14.1", "pydantic"),),
}


def section(title: str) -> str:
    return re.split(r"^#{2,3} ", TEXT.partition(f"\n### {title}")[2], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> dict[str, list[Any]]:
    """Row -> [their settings, ours], of a section's table; the settings are YAML between backticks."""
    found = {}
    for line in section(title).splitlines():
        cells = [re.findall(r"`(\{.*?\})`", cell) for cell in line.strip("|").split(" | ")] if line.startswith("| `{") else []
        if cells:
            found[line.split(" | ")[0].strip("| ")] = [[yaml.safe_load(text) for text in cell] for cell in cells]
    return found


def test_every_setting_of_the_tables_is_one_that_we_take() -> None:
    titles = ("verl 0.9.1", "TRL 1.16", "Liger-Kernel 0.8.5", "TorchRL 0.14", "Miles and slime", "SkyRL", "NeMo-RL", "AReaL")
    right = {title: re.findall(r"\| [^|]*`(\{[^|]*\})` \|$", section(title), re.MULTILINE) for title in titles}
    assert {title: len(cells) for title, cells in right.items() if len(cells) < 4} == {}
    for cells in right.values():
        for cell in cells:
            for text in cell.split("`, `"):
                CorrectionConfig(**yaml.safe_load(text))


def test_every_row_of_the_others_names_their_file() -> None:
    for title in ("Miles and slime", "SkyRL", "NeMo-RL", "AReaL"):
        assert re.search(r"Read: `[\w/]+\.py` of [\w-]+/\w+", section(title)), title


LOOP = """
import json, torch
names = {}
exec(open("loop.py").read(), names)
torch.manual_seed(0)
class Bigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(9, 9, dtype=torch.float64))
        self.frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    def forward(self, ids):
        before = torch.nn.functional.pad(ids, (1, 0))[:, :-1]
        return self.table.log_softmax(-1)[before].gather(-1, ids[..., None])[..., 0]
def rollout(model):
    ids = torch.randint(9, (8, 7))
    mask = torch.arange(7) < torch.tensor([7, 5, 3, 6, 7, 4, 2, 7])[:, None]
    with torch.no_grad():
        logprobs = (model(ids) + 0.3 * torch.randn(8, 7, dtype=torch.float64)).clamp(max=-1e-3)
    rewards = (ids == 4).double().mul(mask).sum(1)
    return {"ids": ids, "attention_mask": mask, "response_mask": mask & (torch.arange(7) > 0), "logprobs": logprobs,
            "prompt": torch.arange(8) // 4, "rewards": rewards}
found = []
for rows in ([list(range(8))], [[0, 1, 2], [3], [4, 5, 6, 7]]):
    torch.manual_seed(1)
    model = Bigram()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = model.table.detach().clone()
    numbers = names["train_step"](model, optimizer, rollout(model), rows)
    found.append([numbers, (model.table.detach() - start).flatten().tolist()])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """By `LOOP` and `README`, each in names of its own, under the distribution's name: one process imports torch for both."""
    folder = tmp_path_factory.mktemp("page")
    loop = re.search(r"<!-- example: loop -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    lines = re.search(r"```python\n(.*?)```", (ROOT / "distribution" / "README.md").read_text(), re.DOTALL)
    assert loop and lines
    (folder / "loop.py").write_text(loop[1])
    (folder / "lines.py").write_text(lines[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "distribution"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", "-c", "import sys\nfor program in sys.argv[1:]: exec(program, {})", LOOP, README]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-2:]]


def test_the_plain_loop_of_the_page_runs(printed: list[Any]) -> None:
    """One micro-batch or three: the same numbers and the same step."""
    (whole, step), (split, split_step) = printed[0]
    assert max(map(abs, step)) > 1e-3
    assert split_step == pytest.approx(step, rel=1e-6, abs=1e-12)
    assert split == pytest.approx(whole, rel=1e-6, abs=1e-12)
    assert {"loss", "k3_kl", "kept_share"} <= set(whole)


README = """
import json, torch
torch.manual_seed(0)
attention_mask = torch.arange(6) < torch.tensor([6, 4, 5, 3])[:, None]
response_mask = attention_mask & (torch.arange(6) > 0)
ids, prompt_ids, rewards = torch.randint(9, (4, 6)), torch.arange(4) // 2, torch.tensor([1.0, 0.0, 0.0, 1.0])
old_logprobs = -torch.rand(4, 6) - 0.1
rollout_logprobs = (old_logprobs + 0.1 * torch.randn(4, 6)).clamp(max=-1e-3)
world, gradients = 1, []
for micro_batches in ([[0, 1, 2, 3]], [[0], [1, 2, 3]]):
    table = old_logprobs.clone().requires_grad_()
    names = {**globals(), "model_logprobs": lambda rows: table[rows]}
    exec(open("lines.py").read(), names)
    gradients.append(table.grad.flatten().tolist())
print(json.dumps([names["numbers"]["kept_share"], *gradients]))
"""


def test_the_ten_lines_of_the_distributions_readme_run(printed: list[Any]) -> None:
    """In one micro-batch or two, with the same gradient."""
    kept, whole, split = printed[1]
    assert kept == 1.0 and max(map(abs, whole)) > 1e-2
    assert split == pytest.approx(whole, rel=1e-6, abs=1e-9)


@contextmanager
def one_rank(store: Path) -> Iterator[None]:
    """torch.distributed with one rank. A learner rank of an earlier test in this process keeps its group, which has one as well."""
    if torch.distributed.is_initialized():
        assert torch.distributed.get_world_size() == 1
        yield
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(store), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_the_short_examples_run(tmp_path: Path) -> None:
    """Ragged lists with prompts before them, one rank of torch.distributed, sums added up by hand: they have the plain calls' numbers."""
    lists, reduced, summed, gathered = re.findall(r"```python\n((?:batch = from_lists|corrected|sums|parts).*?)```", TEXT, re.DOTALL)
    config = CorrectionConfig(preset="mis-full", importance={"upper": 3})
    lengths, rows = (3, 2, 4, 1), torch.log(torch.linspace(0.3, 0.9, 10))
    names: dict[str, Any] = {name: getattr(correction, name) for name in correction.__all__} | {"torch": torch, "config": config}
    names["data"] = {
        "tokens": [[7, 7, *range(n)] for n in lengths],
        "loss_masks": [[1] * n for n in lengths],
        "rollout_log_probs": [row.tolist() for row in rows.split(lengths)],
        "log_probs": [(0.9 * row).tolist() for row in rows.split(lengths)],
        "rewards": [1.0, 0.0, 0.0, 1.0],
    }
    names |= {"group_ids": [0, 0, 1, 1], "world": 1, "added_up_over_all_ranks": lambda sums: sums}
    exec(lists, names)
    batch = names["batch"]
    assert batch.token_ids.tolist() == [token for n in lengths for token in range(n)], "prompts are left out"
    assert batch.advantages[[0, 3, 5, 9]].sign().tolist() == [1, -1, -1, 1]
    plain = correct(batch, config)
    names["target_logprobs"] = batch.proximal_logprobs
    names["trained"] = policy_loss(plain, batch.proximal_logprobs, config)
    with one_rank(tmp_path / "store"):
        for code in (reduced, summed, gathered):
            exec(code, names)
            assert names["corrected"].importance_weights.tolist() == plain.importance_weights.tolist()
    assert names["sums"].shape == (6,) and names["sums"].dtype == torch.float64
    numbers = correction.diagnose(batch, plain, batch.proximal_logprobs, decided=names["trained"].decided)
    assert names["numbers"] == pytest.approx(numbers, nan_ok=True) and numbers["tokens"] == 10


def test_what_the_page_says_of_factors_after_the_backward_pass() -> None:
    """With correct() no preset needs one; with defer() mis-full does, and presets without normalised weights don't."""
    assert [name for name in PRESETS if needs_gradient_factor(CorrectionConfig(preset=name))] == []
    assert "mis-full" in [name for name in PRESETS if needs_gradient_factor(CorrectionConfig(preset=name), is_deferred=True)]
    assert "With `correct`" not in TEXT and "with `correct`, no preset" in TEXT


def test_accumulation_that_divides_is_undone_by_multiplying() -> None:
    """The page's table: a trainer that averages over its steps gets the whole gradient when the loss is multiplied by their number."""
    config = CorrectionConfig(preset="icepop")
    batch, target = random_batch(2)
    corrected = correct(batch, config)
    leaf, whole = target.clone().requires_grad_(), target.clone().requires_grad_()
    parts = ([0, 1, 2], [3, 4], list(range(5, 12)))
    for part in parts:
        loss = policy_loss(corrected.select(part), leaf[batch.token_index(part)], config).loss
        (len(parts) * loss / len(parts)).backward()
    policy_loss(corrected, whole, config).loss.backward()
    assert leaf.grad.tolist() == pytest.approx(whole.grad.tolist(), rel=1e-6, abs=1e-12)


def python_of(name: str, scratch: Path) -> Path:
    """The Python of an environment with a trainer; EVENKEEL_ENVIRONMENTS=FOLDER keeps it (1.5 GB) for the next time."""
    folder = Path(os.environ.get("EVENKEEL_ENVIRONMENTS", scratch)) / name
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
        for words in INSTALLS[name]:
            pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, *words], check=True)
    return folder / "bin" / "python"


def assert_equal(lines: dict[str, dict[str, float]], *, gradient: float = 1e-6) -> None:
    """Loss and gradient of both sides, to 1e-6; the gradient alone where the row says so."""
    for row, found in lines.items():
        assert found["size"] > 1e-3, f"{row}: no gradient to compare"
        assert found["gradient"] < gradient, row
        if "(gradient alone)" not in row:
            assert found["ours"] == pytest.approx(found["theirs"], rel=1e-6, abs=1e-6), row
    distinct = {(round(found["theirs"], 9), round(found["size"], 9)) for found in lines.values()}
    assert len(distinct) >= len(lines) - 3, "rows that are alike show little"


def check_the_trl_example(answer: dict[str, Any]) -> None:
    """Through TRL's own training loop, in two micro-batches a step; what it would ignore is refused by name."""
    assert answer["moved"] > 1e-3 and len(answer["logged"]) == 4 and answer["images"]
    for line in answer["logged"]:
        assert line["correction/tokens"] > 8 and 0 < line["correction/kept_share"] < 1 and line["correction/k3_kl"] > 0.01
        assert 2 * line["correction/loss"] == pytest.approx(line["loss"], abs=2e-4)  # TRL rounds; two steps to a generation batch
        assert 1 < line["correction/entropy"] < 3.2  # ln 24
    assert len(answer["refused"]) == len(TRL_REPLACED)
    assert [name for name, said in answer["refused"].items() if not said.startswith(f"ConfigError: GRPOConfig.{name} = ")] == []


def check_the_verl_example(answer: dict[str, Any]) -> None:
    """Through verl's own trainers, in their order of calls, with one and two optimizer steps a batch."""
    assert answer["worker"] == ["evenkeel_verl"]
    for name, found in answer["trainers"].items():
        if name.startswith("variance"):
            assert len(found) >= 3 and all(logged == pytest.approx(plain, rel=1e-6) for logged, plain in found), name
        else:
            assert found["size"] > 1e-3 and found["gradient"] < 2e-6, name  # verl's logprobs are float32 there
    assert len(answer["trainers"]) == 8


TRL_REPLACED = re.search(r'REPLACED = """(.*?)"""', TEXT, re.DOTALL)[1].split()  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "title", "least"),
    [("trl", "TRL 1.16", 15), ("verl", "verl 0.9.1", 15), ("liger", "Liger-Kernel 0.8.5", 13), ("torchrl", "TorchRL 0.14", 6)],
)
def test_the_trainers_own_code_has_the_same_numbers(name: str, title: str, least: int, tmp_path: Path) -> None:
    """Loss and gradient of each row of its table, and of the page's example, by its own functions and by ours."""
    lines = {row: [theirs[0], ours[0]] for row, (theirs, ours) in rows(title).items()}
    assert len(lines) >= least
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "distribution"), "PYTHONDONTWRITEBYTECODE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [python_of(name, tmp_path), CASES / f"{name}_case.py", PAGE, tmp_path / "lines.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert set(lines) <= set(answer["lines"])
    assert_equal(answer["lines"])
    if name == "trl":
        check_the_trl_example(answer)
    if name == "verl":
        check_the_verl_example(answer)
    if name == "liger":  # the Triton kernel: in float32, in which 2^-24 of each of VESPO's log ratios shows
        kernel = {row: found for row, found in answer["kernel"].items() if "luspo" not in row}
        assert len(kernel) == len(lines) - 1
        assert_equal({row: found for row, found in kernel.items() if "vespo" not in row})
        assert_equal({row: found for row, found in kernel.items() if "vespo" in row}, gradient=3e-6)
    if name == "torchrl":
        assert answer["advantages"]["ours"] == pytest.approx(answer["advantages"]["theirs"], rel=1e-9)
