"""The mismatch of a real model between SGLang and Megatron at equal weights: how large, on which tokens, by which operator, at what price.

    evenkeel init-model recipes/smollm2_sums.yaml --if-missing
    OMP_NUM_THREADS=1 python benchmarks/real_mismatch.py measure --folder FOLDER [--minutes 10]     # again until all is there
    OMP_NUM_THREADS=1 python benchmarks/real_mismatch.py staleness --folder FOLDER
    OMP_NUM_THREADS=1 python benchmarks/real_mismatch.py cost --folder FOLDER
    python benchmarks/mismatch_picture.py --folder FOLDER                                             # the page's tables, and its pictures

Each part writes JSON files into the folder, and leaves out what is there: about an hour and a half on a quiet core without AVX-512, where
products in bfloat16 are slow.

Three batches of each kind of text, at temperatures 0.7 and 1: English prose, which the engine is told to "sample" token by token; sums, and
the model's own prose, both sampled by the engine in bfloat16. All other engines are told to sample the same tokens, so that pairs of engine
and learner are compared on the same text. Every logprob of the engine comes from decoding, none from a prefill.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
from torch import Tensor

from benchmarks.mismatch_operators import OPERATORS, PartlyAlignedRank
from benchmarks.sides import ROOT, options
from benchmarks.switched_engines import Switch, switched_engines
from evenkeel.correction import CorrectionConfig, PackedBatch, defer
from evenkeel.learner.config import LearnerConfig
from evenkeel.learner.learner_rank import LearnerRank
from evenkeel.rollout.engine.engine import RolloutEngine
from evenkeel.rollout.engine_settings.engine_config import EngineConfig
from lab.float8 import write_float8_folder

ROUNDS = 2
"""Times that each batch is added to, by as many texts as before: what is measured after the first makes intervals narrower."""
BATCHES, TEMPERATURES, KINDS = 3, (0.7, 1.0), ("English", "sums", "own")
GIVEN, TOKENS, SHORT = 4, 24, 12
"""Tokens of English that are given; of English and own prose sampled after the prompt, at most; and of sums."""
ENGLISH, OWN, OWN_SAMPLES, SUMS, SUM_SAMPLES = 5, 2, 2, 3, 4
"""Of each batch in a round: passages; prompts and answers to each."""
OF_ENGLISH, OF_OWN = 5, 2
"""Sequences among them on which operators are taken apart."""
SUBJECTS = (
    *("the sea", "how bread is made", "the history of clocks", "a dog that was lost", "an old library", "how bees live"),
    *("a small town", "the moon", "learning to swim", "a railway station", "why leaves fall", "a letter from abroad"),
)
FORMATS = ("bfloat16", "float32", "float16")
FLOAT8, FLOAT8_BLOCK = "float8", 64
"""An engine in bfloat16 whose projections have weights that were rounded to float8, with a scale for each 64 x 64: float8_block itself
needs matrices of whole blocks of 128, which this model has not."""
DEADLINE_S = 3000.0


# -- texts ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer."""

    kind: str
    batch: int
    temperature: float
    group: int
    """Of its prompt, in the batch."""
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    reward: float = 0.0
    """Of a sum: 1 if the number is right."""

    @property
    def cell(self) -> tuple[str, float, int]:
        return self.kind, self.temperature, self.batch

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer


def english(tokenizer: Any, number_of_round: int) -> list[Text]:
    """Passages of a story that comes with reasoning-gym, each batch from another part of it; the last of them are of its licence."""
    import reasoning_gym

    text = (Path(reasoning_gym.__file__).parent / "data" / "in_the_year_2889.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(" ".join(text.partition("IN THE YEAR 2889.")[2].split()), add_special_tokens=False)
    size, found = GIVEN + TOKENS, []
    for temperature in TEMPERATURES:
        for number in range(BATCHES * ENGLISH):
            start = int((number + number_of_round / ROUNDS) * len(ids)) // (BATCHES * ENGLISH + 4)
            passage = tuple(ids[start : start + size])
            found.append(Text("English", number // ENGLISH, temperature, number % ENGLISH, passage[:GIVEN], passage[GIVEN:]))
    return found


def prompts(tokenizer: Any, kind: str, batch: int, number_of_round: int) -> list[tuple[tuple[int, ...], Any]]:
    """Prompts of a batch in the model's chat template, and what judges an answer's text."""
    place = batch + BATCHES * number_of_round
    if kind == "own":
        subjects = SUBJECTS[place * OWN : (place + 1) * OWN]
        return [(prompt_ids(tokenizer, f"Write a few sentences about {one}."), lambda _: 0.0) for one in subjects]
    return sums(tokenizer, SUMS, seed=place)


def prompt_ids(tokenizer: Any, question: str) -> tuple[int, ...]:
    """In the model's chat template."""
    turns = [{"role": "user", "content": question}]
    return tuple(tokenizer.encode(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)))


def sums(tokenizer: Any, count: int, seed: int) -> list[tuple[tuple[int, ...], Any]]:
    """Prompts, and what judges an answer's text."""
    import reasoning_gym

    terms = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    tasks = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, **terms)
    return [
        (
            prompt_ids(tokenizer, f"{task['question']} Reply with only the number."),
            lambda answer, task=task: tasks.score_answer(answer.strip(), task),
        )
        for task in (tasks[number] for number in range(count))
    ]


def packed(texts: Sequence[Text], values: Sequence[Sequence[float]], proximal: Sequence[Sequence[float]] | None = None) -> PackedBatch:
    """Texts of one temperature as one batch, with the engine's logprobs of the answers.

    A text's advantage is its reward against that of its group, or, where nothing is rewarded, +1 and -1 in turn."""
    lengths, count = torch.tensor([len(text.ids) for text in texts]), sum(len(text.ids) for text in texts)
    mask = torch.tensor([place >= len(text.prompt) for text in texts for place in range(len(text.ids))])

    def spread(per_answer: Sequence[Sequence[float]]) -> Tensor:
        found = torch.zeros(count)
        found[mask] = torch.tensor([value for answer in per_answer for value in answer])
        return found

    groups = [(text.kind, text.batch, text.group) for text in texts]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    means = {group: sum(t.reward for t, g in zip(texts, groups, strict=True) if g == group) / groups.count(group) for group in numbers}
    sized = [
        text.reward - means[group] if text.kind == "sums" else (-1.0) ** number
        for number, (text, group) in enumerate(zip(texts, groups, strict=True))
    ]
    return PackedBatch(
        token_ids=torch.tensor([token for text in texts for token in text.ids]),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        loss_mask=mask,
        behavior_logprobs=spread(values),
        proximal_logprobs=None if proximal is None else spread(proximal),
        advantages=torch.tensor(sized).repeat_interleave(lengths),
        weight_versions=torch.zeros(count, dtype=torch.int32),
        group_ids=torch.tensor([numbers[group] for group in groups]),
        temperature=texts[0].temperature,
    ).validate()


def per_answer(batch: PackedBatch, values: Tensor) -> list[list[float]]:
    """Of each sequence, the values of the tokens in the loss mask."""
    rows = zip(*(torch.split(x, batch.lengths.tolist()) for x in (values, batch.loss_mask)), strict=True)
    return [row[mask].tolist() for row, mask in rows]


def as_text(record: Mapping[str, Any]) -> Text:
    """Of JSON."""
    return Text(**record | {"prompt": tuple(record["prompt"]), "answer": tuple(record["answer"])})  # type: ignore[operator]


# -- the folder ----------------------------------------------------------------------------------------------------------


class Folder:
    """What has been measured in one round."""

    def __init__(self, path: Path, number: int, minutes: float = 1e9) -> None:
        self.number = number
        self._path = path / f"round-{number}"
        self._ends = time.monotonic() + 60 * minutes
        self._path.mkdir(parents=True, exist_ok=True)

    def __contains__(self, name: str) -> bool:
        return (self._path / f"{name}.json").is_file()

    def __getitem__(self, name: str) -> Any:
        return json.loads((self._path / f"{name}.json").read_text())

    def __setitem__(self, name: str, content: Any) -> None:
        new = self._path / f"{name}.new"
        new.write_text(json.dumps(content))
        new.replace(self._path / f"{name}.json")
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)

    def names(self, beginning: str) -> list[str]:
        """Of what is there and is called so."""
        return sorted(path.stem for path in self._path.glob(f"{beginning}*.json"))

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._ends

    @cached_property
    def texts(self) -> list[Text]:
        return [as_text(one) for one in self["texts"]]

    @cached_property
    def apart(self) -> list[Text]:
        """Texts on which operators are taken apart."""
        most = {"English": OF_ENGLISH, "own": OF_OWN, "sums": 0}
        cells = groupby((text for text in self.texts if text.temperature == 1.0), key=lambda text: text.cell)
        return [text for (kind, _, _), members in cells for text in list(members)[: most[kind]]]

    def values(self, name: str, texts: Sequence[Text]) -> list[list[float]]:
        """Logprobs of the answers, of these texts or of more. Args: name: side and what it is made of."""
        found = self[name]
        known = self.apart if found["apart"] else self.texts
        places = {id(text): place for place, text in enumerate(known)}  # two answers may be the same
        return [found["values"][places[id(text)]] for text in texts]


def label(aligned: Iterable[str], dtype: str = "bfloat16") -> str:
    """Of a side."""
    chosen = [operator for operator in OPERATORS if operator in aligned]
    return dtype + ("" if not chosen else "-" + "-".join(chosen))


def of_engine(aligned: Collection[str]) -> frozenset[str]:
    """The sampler takes log_softmax anyway."""
    return frozenset(aligned) - {"logprobs"}


def of_learner(aligned: Collection[str]) -> frozenset[str]:
    """Its norms are Hugging Face's anyway."""
    return frozenset(aligned) - {"norms"}


def subsets(extra: Iterable[Sequence[str]] = ()) -> list[tuple[str, ...]]:
    """Nothing, one operator, all but one, all."""
    ones = [(operator,) for operator in OPERATORS]
    but_one = [tuple(other for other in OPERATORS if other != operator) for operator in OPERATORS]
    return [(), *ones, *but_one, OPERATORS, *map(tuple, extra)]


# -- engines -------------------------------------------------------------------------------------------------------------


def engine_config(dtype: Any) -> EngineConfig:
    return EngineConfig(device="cpu", dtype=dtype, max_running_requests=64, max_total_tokens=16_384, context_length=256)


async def sampled(engine: RolloutEngine, switch: Switch, texts: Sequence[Text], aligned: Collection[str] = ()) -> list[list[float]]:
    """Logprobs of the engine as it is told to sample the texts' answers."""
    switch.turn(aligned, {seed: text.ids for seed, text in enumerate(texts)})
    answers = await asyncio.gather(
        *(
            engine.generate(
                text.prompt,
                max_tokens=len(text.answer),
                temperature=text.temperature,
                ignore_stop=True,
                seeds=[seed],
                deadline_s=DEADLINE_S,
            )
            for seed, text in enumerate(texts)
        )
    )
    for (answer,), text in zip(answers, texts, strict=True):
        assert tuple(answer.response_ids) == text.answer, "the engine did not sample what it was told"
    return [list(answer.behavior_logprobs) for (answer,) in answers]


async def new_texts(engine: RolloutEngine, switch: Switch, tokenizer: Any, number_of_round: int) -> list[tuple[Text, list[float]]]:
    """Answers to sums, and own prose, with their logprobs."""
    switch.turn()
    most, samples = {"sums": SHORT, "own": TOKENS}, {"sums": SUM_SAMPLES, "own": OWN_SAMPLES}

    async def of_prompt(kind: str, temperature: float, batch: int, group: int, prompt: Any, judge: Any) -> list[tuple[Text, list[float]]]:
        first = 1 + 1000 * (group + 10 * (batch + 10 * (KINDS.index(kind) + 10 * TEMPERATURES.index(temperature))))
        seeds = range(first, first + samples[kind])
        sizes: dict[str, Any] = {"max_tokens": most[kind], "samples": len(seeds), "deadline_s": DEADLINE_S}
        answers = await engine.generate(prompt, temperature=temperature, seeds=list(seeds), **sizes)
        return [
            (
                Text(kind, batch, temperature, group, prompt, tuple(answer.response_ids), judge(decoded(tokenizer, answer.response_ids))),
                list(answer.behavior_logprobs),
            )
            for answer in answers
        ]

    asked = [
        of_prompt(kind, temperature, batch, group, prompt, judge)
        for kind in ("sums", "own")
        for temperature in TEMPERATURES
        for batch in range(BATCHES)
        for group, (prompt, judge) in enumerate(prompts(tokenizer, kind, batch, number_of_round))
    ]
    return [one for found in await asyncio.gather(*asked) for one in found]


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


async def measure_bfloat16(model: Path, folder: Folder, extra: Iterable[Sequence[str]]) -> None:
    """The texts, and what an engine in bfloat16 says of them with each set of operators."""
    if "texts" not in folder or any(f"engine-{label(of_engine(one))}" not in folder for one in subsets(extra)):
        with switched_engines() as switch:
            engine = await RolloutEngine.start(model, engine_config("bfloat16"))
            try:
                if "texts" not in folder:
                    tokenizer = load_tokenizer(model)
                    given = english(tokenizer, folder.number)
                    if "english" not in folder:
                        folder["english"] = await sampled(engine, switch, given)
                    found = [*zip(given, folder["english"], strict=True), *await new_texts(engine, switch, tokenizer, folder.number)]
                    folder["engine-bfloat16"] = {"apart": False, "values": [values for _, values in found]}
                    folder["texts"] = [asdict(text) for text, _ in found]
                for aligned in subsets(extra):
                    name = f"engine-{label(of_engine(aligned))}"
                    if name not in folder and not folder.is_late:
                        folder[name] = {"apart": True, "values": await sampled(engine, switch, folder.apart, of_engine(aligned))}
            finally:
                await engine.shutdown()


async def measure_formats(model: Path, folder: Folder) -> None:
    """The engines in other formats."""
    for name in (*FORMATS, FLOAT8):
        if f"engine-{name}" in folder or folder.is_late:
            continue
        with switched_engines() as switch, tempfile.TemporaryDirectory() as made:
            weights, dtype = model, name
            if name == FLOAT8:
                weights, dtype = Path(made), "bfloat16"
                write_float8_folder(model, weights, FLOAT8_BLOCK, rounded_first=torch.bfloat16)
            engine = await RolloutEngine.start(weights, engine_config(dtype))
            try:
                folder[f"engine-{name}"] = {"apart": False, "values": await sampled(engine, switch, folder.texts)}
            finally:
                await engine.shutdown()


def load_tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


# -- learners ------------------------------------------------------------------------------------------------------------


def scored(logprobs: Callable[[PackedBatch], Tensor], texts: Sequence[Text]) -> list[list[float]]:
    """A learner's logprobs of the texts' answers."""
    found: dict[int, list[float]] = {}
    for temperature in TEMPERATURES:
        places = [place for place, text in enumerate(texts) if text.temperature == temperature]
        if places:
            same = [texts[place] for place in places]
            batch = packed(same, [[-1.0] * len(text.answer) for text in same])
            found |= zip(places, per_answer(batch, logprobs(batch)), strict=True)
    return [found[place] for place in range(len(texts))]


def measure_learners(model: Path, folder: Folder, extra: Iterable[Sequence[str]]) -> None:
    for dtype in FORMATS:
        wanted: list[tuple[str, ...]] = [()]
        if dtype == "bfloat16":
            wanted = list(dict.fromkeys(tuple(sorted(of_learner(one))) for one in subsets(extra)))
        missing = [one for one in wanted if f"learner-{label(one, dtype)}" not in folder]
        if not missing or folder.is_late:
            continue
        rank = PartlyAlignedRank(LearnerConfig(device="cpu", dtype=dtype))
        rank.load(model)
        for aligned in missing:
            if folder.is_late:
                break
            texts = folder.texts if not aligned else folder.apart
            with rank.aligned(aligned):
                folder[f"learner-{label(aligned, dtype)}"] = {"apart": bool(aligned), "values": scored(rank.logprobs, texts)}
        rank.close()


# -- staleness -----------------------------------------------------------------------------------------------------------


STEPS, GROUPS, SAMPLES = 4, 8, 8
"""Optimizer steps, and what each is on: as in recipes/smollm2_sums.yaml."""
TRAINING = CorrectionConfig(preset="tis-token")


def recipe_sums(tokenizer: Any) -> Iterator[tuple[tuple[int, ...], Callable[[str], float]]]:
    """Prompts of recipes/smollm2_sums.yaml in some order, and its reward: the two-digit sums above are too hard to learn from."""
    rows = [json.loads(line) for line in (ROOT / "recipes" / "sums.jsonl").read_text().splitlines()]
    for row in random.Random(0).sample(rows, len(rows)):
        yield prompt_ids(tokenizer, row["prompt"]), lambda answer, row=row: float(re.findall(r"-?\d+", answer)[-1:] == [row["answer"]])


async def trained_texts(model: Path) -> list[tuple[Text, list[float]]]:
    """Sums for the steps, sampled by an engine in float32: the weights before the first step. Their batch is the number of the step."""
    tokenizer = load_tokenizer(model)
    fresh = recipe_sums(tokenizer)
    engine = await RolloutEngine.start(model, engine_config("float32"))
    try:
        asked = [(step, group, *next(fresh)) for step in range(STEPS) for group in range(GROUPS)]
        answers = await asyncio.gather(
            *(
                engine.generate(
                    prompt,
                    max_tokens=TOKENS,
                    samples=SAMPLES,
                    seeds=[1000 * number + sample for sample in range(SAMPLES)],
                    deadline_s=DEADLINE_S,
                )
                for number, (_, _, prompt, _) in enumerate(asked)
            )
        )
    finally:
        await engine.shutdown()
    return [
        (
            Text("sums", step, 1.0, group, prompt, tuple(one.response_ids), judge(decoded(tokenizer, one.response_ids))),
            list(one.behavior_logprobs),
        )
        for (step, group, prompt, judge), found in zip(asked, answers, strict=True)
        for one in found
    ]


def measure_staleness(model: Path, folder: Folder) -> None:
    """Logprobs of the texts at temperature 1 after each step: of a learner in float32, and for sums of one in bfloat16 with its weights."""
    if "trained" not in folder:
        found = asyncio.run(trained_texts(model))
        folder["trained"] = [{"text": asdict(text), "values": values} for text, values in found]
    trained = [(as_text(one["text"]), one["values"]) for one in folder["trained"]]
    fresh = [text for text in folder.texts if text.temperature == 1.0]
    of_sums = [text for text in fresh if text.kind == "sums"]
    names = [f"version-{step}" for step in range(STEPS + 1)]
    if all(name in folder for name in names):
        return
    config = LearnerConfig(device="cpu", dtype="float32", learning_rate=1e-5)  # the recipe's, after its warm-up
    rank = LearnerRank(config)
    rank.load(model)
    half = LearnerRank(LearnerConfig(device="cpu", dtype="bfloat16"))
    half.load(model)
    for step, name in enumerate(names):
        if step:
            texts, values = zip(*((text, found) for text, found in trained if text.batch == step - 1), strict=True)
            result = rank.step(defer(packed(texts, values), TRAINING), TRAINING, step=step)
            print(
                f"step {step}: gradient norm {result.grad_norms}, reward {sum(text.reward for text in texts) / len(texts):.2f}", flush=True
            )
        if name not in folder:
            weights = [one.to(torch.bfloat16) for one in rank.weights_copy()]

            def rounded(batch: PackedBatch, weights: list[Tensor] = weights) -> Tensor:
                return half.logprobs_with(weights, batch)

            folder[name] = {"float32": scored(rank.logprobs, fresh), "bfloat16": scored(rounded, of_sums)}
    rank.close()


# -- cost ----------------------------------------------------------------------------------------------------------------


REQUESTS, DECODED, TRAINED = 30, 8, 5
"""Requests in flight and tokens that each decodes; passages of GIVEN + TOKENS tokens in a learner's step."""
TURNS = 3


def costs(extra: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Nothing, each operator, further sets, all."""
    return [(), *((operator,) for operator in OPERATORS), *map(tuple, extra), OPERATORS]


async def measure_decoding(model: Path, folder: Folder, extra: Iterable[Sequence[str]]) -> None:
    """Processor time of the scheduler for the same requests, in turns."""
    passages = [replace(text, answer=text.answer[:DECODED]) for text in folder.texts if text.kind == "English"][:REQUESTS]
    found: dict[str, list[float]] = {}
    with switched_engines() as switch:
        engine = await RolloutEngine.start(model, engine_config("bfloat16"))
        try:
            scheduler = psutil.Process(engine.process_ids["scheduler"])
            for turn in range(TURNS):
                for aligned in costs(extra)[:: 1 if turn % 2 else -1]:
                    if (name := label(of_engine(aligned))) in found and len(found[name]) > turn:
                        continue  # nothing of it is the engine's
                    used = sum(scheduler.cpu_times()[:2])
                    await sampled(engine, switch, passages, of_engine(aligned))
                    found.setdefault(name, []).append(sum(scheduler.cpu_times()[:2]) - used)
                print(f"turn {turn}: {json.dumps({name: round(values[-1], 1) for name, values in found.items()})}", flush=True)
        finally:
            await engine.shutdown()
    folder["cost-decode"] = found


def measure_steps(model: Path, folder: Folder, extra: Iterable[Sequence[str]]) -> None:
    """Processor time of whole steps on the same passages, in turns."""
    texts = [text for text in folder.texts if text.kind == "English" and text.temperature == 1.0][:TRAINED]
    batch = packed(texts, folder.values("engine-bfloat16", texts))
    rank = PartlyAlignedRank(LearnerConfig(device="cpu", dtype="bfloat16", learning_rate=0.0))
    rank.load(model)
    found: dict[str, list[float]] = {}
    for turn in range(TURNS):
        for aligned in costs(extra)[:: 1 if turn % 2 else -1]:
            if (name := label(of_learner(aligned))) in found and len(found[name]) > turn:
                continue
            with rank.aligned(of_learner(aligned)):
                used = time.process_time()
                rank.step(defer(batch, TRAINING), TRAINING, step=turn)
                found.setdefault(name, []).append(time.process_time() - used)
        print(f"turn {turn}: {json.dumps({name: round(values[-1], 1) for name, values in found.items()})}", flush=True)
    rank.close()
    folder["cost-step"] = found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("part", choices=["measure", "staleness", "cost"])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing new after so many")
    parser.add_argument("--also", nargs="*", default=[], metavar="A+B", help="further sets of operators, such as norms+head")
    arguments = parser.parse_args()
    extra, folders = [one.split("+") for one in arguments.also], rounds(arguments.folder, arguments.minutes)
    torch.set_num_threads(1)
    if arguments.part == "measure":
        for folder in folders:
            asyncio.run(measure_bfloat16(arguments.model, folder, extra))
            if not folder.is_late:
                measure_learners(arguments.model, folder, extra)
            if not folder.is_late:
                asyncio.run(measure_formats(arguments.model, folder))
            if folder.is_late:
                print("time is up: once more")
                return
        print("all is there")
    elif arguments.part == "staleness":
        measure_staleness(arguments.model, folders[0])
    else:
        if "cost-decode" not in folders[0]:
            asyncio.run(measure_decoding(arguments.model, folders[0], extra))
        if "cost-step" not in folders[0] and not folders[0].is_late:
            measure_steps(arguments.model, folders[0], extra)


def rounds(path: Path, minutes: float = 1e9) -> list[Folder]:
    return [Folder(path, number, minutes) for number in range(ROUNDS)]


if __name__ == "__main__":
    main()
