"""The view of tokens: trajectories of a step or an evaluation as text, with what each policy and the correction say of every token."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from evenkeel.actors.carriers import TokenSample
from evenkeel.actors.record.run_folder import SampleKind
from evenkeel.dashboard.facts import tokenizer_of
from evenkeel.dashboard.open_run import OpenRun

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_FOUND = 500
"""Answers of a search."""
_UNREADABLE = "\ufffd"


def tokens(run: OpenRun, asked: Mapping[str, str]) -> dict[str, Any]:
    """Args: asked: `kind` (step, held_out), `step` (the newest); `find`: words of a question or an answer, in all steps that are kept,
    with its reward from `low` to `high`, and from `length` to `longest` tokens."""
    kind: SampleKind = "held_out" if asked.get("kind") == "held_out" else "step"
    kept = kept_steps(run)
    found: dict[str, Any] = {"kept": kept, "kind": kind, "most_found": MOST_FOUND}
    found["found"] = _find(run, kept, asked) if asked.get("find") else None
    step = int(asked["step"]) if asked.get("step") else max(kept[kind], default=None)
    if step is None or step not in kept[kind]:
        return found | {"step": step, "sample": None}
    try:
        return found | {"step": step, "sample": _shown(run, *load_tokens(run.folder.tokens_path(step, kind)))}
    except (ValueError, OSError) as error:  # other steps are worth looking at
        return found | {"step": step, "sample": None, "refused": " ".join(str(error).split())}


def kept_steps(run: OpenRun) -> dict[SampleKind, list[int]]:
    """Steps of which trajectories are kept, in order; not those that a resume took back, whose files lie there until they are redone."""
    newest = run.steps.last.step if run.steps.last else 0
    return {kind: [step for step in run.folder.token_steps(kind) if step <= newest] for kind in get_args(SampleKind)}


def load_tokens(path: Path) -> tuple[TokenSample, list[dict[str, Any]]]:
    """A sample and what stands beside it. Raises: ValueError, with the file's name, for a damaged one; OSError."""
    try:
        return TokenSample.load(path)
    except OSError:
        raise
    except Exception as error:  # numpy, zipfile and zlib have errors of their own
        raise ValueError(f"{path} can't be read: {str(error) or type(error).__name__}") from error


def _shown(run: OpenRun, sample: TokenSample, groups: list[dict[str, Any]]) -> dict[str, Any]:
    piece = _pieces(run.folder.model_path / "tokenizer.json")
    columns = dict(sample.columns)
    ids, places = np.unique(columns["token_ids"], return_inverse=True)
    columns["token_ids"] = places
    return {
        "version": sample.version,
        "labels": sample.labels,
        "ids": ids,
        "pieces": [piece(int(one)) for one in ids],
        "offsets": sample.offsets,
        "columns": {name: values if values.dtype != np.bool_ else values.astype(np.uint8) for name, values in columns.items()},
        "answers": [
            {
                "group": one.group,
                "answer": one.answer,
                "sequence": one.sequence,
                "prompt_id": one.prompt_id,
                "question": one.question,
                "expected": one.expected,
                "reward": one.reward,
                "parts": one.reward_components,
                "finish": one.finish_reason,
                "error": one.error,
                "left_out": one.left_out_tokens,
            }
            for one in sample.answers
        ],
        "groups": [_group(row) for row in groups or _groups_of(sample)],
    }


def _groups_of(sample: TokenSample) -> list[dict[str, Any]]:
    """What is told of groups, of those of an evaluation, by its answers that are kept."""
    found: dict[int, dict[str, Any]] = {}
    for one, tokens in zip(sample.answers, _sampled_tokens(sample), strict=True):
        row = found.setdefault(
            one.group, {"group": one.group, "prompt_id": one.prompt_id, "rewards": [], "tokens": [], "cut": 0, "failed": 0}
        )
        if one.sequence:  # another one of the same answer
            row["tokens"][-1] += tokens
            continue
        row["rewards"].append(one.reward)
        row["tokens"].append(tokens)
        row["cut"] += one.finish_reason == "length"
        row["failed"] += one.error is not None
    return list(found.values())


def _sampled_tokens(sample: TokenSample) -> list[int]:
    """[s] sampled tokens of each trajectory."""
    counts: list[int] = np.diff(np.concatenate([[0], np.cumsum(sample.columns["sampled"])])[sample.offsets]).tolist()
    return counts


def _group(row: Mapping[str, Any]) -> dict[str, Any]:
    rewards = [reward for reward in row["rewards"] if reward is not None]
    return {
        **row,
        "mean": statistics.fmean(rewards) if rewards else None,
        "std": statistics.pstdev(rewards) if rewards else None,
        "is_degenerate": len(set(rewards)) <= 1,
    }


def _find(run: OpenRun, kept: Mapping[SampleKind, list[int]], asked: Mapping[str, str]) -> list[dict[str, Any]]:
    """Answers with these words: of training steps, then of evaluations, the newest first."""
    found, sought = list[dict[str, Any]](), asked["find"].casefold()
    low, high, length, longest = (float(asked[name]) if asked.get(name) else None for name in ("low", "high", "length", "longest"))

    def is_within(value: float | None, least: float | None, most: float | None) -> bool:
        if value is None:
            return least is most is None
        return (least is None or value >= least) and (most is None or value <= most)

    for kind, steps in kept.items():
        for step in reversed(steps):
            path = run.folder.tokens_path(step, kind)
            try:
                answers = _answers(path, path.stat().st_mtime_ns, run.folder.model_path / "tokenizer.json")
            except (ValueError, OSError):
                continue
            for one, text in answers:
                if sought in text and is_within(one["reward"], low, high) and is_within(one["tokens"], length, longest):
                    found.append({"kind": kind, "step": step, **one})
                    if len(found) == MOST_FOUND:
                        return found
    return found


@lru_cache(maxsize=1024)
def _answers(path: Path, changed: int, tokenizer: Path) -> list[tuple[dict[str, Any], str]]:
    """What is told of the answers of a file, each with the text in which is sought. Args: changed: when; another time is another file."""
    sample, _ = load_tokens(path)
    known, names, found = _known(tokenizer), ("group", "answer", "prompt_id", "question", "expected", "reward"), []
    for one, (start, end) in zip(sample.answers, itertools.pairwise(sample.offsets.tolist()), strict=True):
        told = {name: getattr(one, name) for name in names} | {"tokens": end - start}
        ids = sample.columns["token_ids"][start:end].tolist()  # at once: a character may be several tokens
        text = "" if known is None else known.decode(ids, skip_special_tokens=False)
        found.append((told, f"{one.question}\n{one.prompt_id}\n{one.expected}\n{text}".casefold()))
    return found


def _known(tokenizer: Path) -> Tokenizer | None:
    """None: it isn't there, or damaged: tokenizers has no error of its own."""
    try:
        return tokenizer_of(tokenizer)
    except Exception:
        return None


def _pieces(tokenizer: Path) -> Callable[[int], str]:
    """The text of a token alone; the id itself if the run has no tokenizer of the usual form.

    A token that is a part of a character has no text; it is shown as the tokenizer names it.
    """
    if (known := _known(tokenizer)) is None:
        return lambda one: f"⟨{one}⟩"

    def piece(one: int) -> str:
        name = known.id_to_token(one)
        if name is None:
            return f"⟨{one}⟩"
        if "\u2581" in name:  # sentencepiece's space, which decoding takes away at a beginning
            return str(name.replace("\u2581", " "))
        text = str(known.decode([one], skip_special_tokens=False))
        return f"⟨{name}⟩" if _UNREADABLE in text or not text else text

    return piece
