"""A model's sizes, from its config.json: how many parameters are where. Nothing is loaded for it, no library either."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evenkeel.correction.errors import DataError, require_utf8
from evenkeel.engines.float8_format import BLOCK
from evenkeel.learner.hf.families import ATTENTION_NORM_AFTER, INPUT_NORM, QKV_BIAS, ModelFamily, TensorLayout, trained_family

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a config.json that decide about memory."""

    model_type: str
    family: ModelFamily
    """Family with the optional parts that the config.json asks for."""
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    key_heads: int
    head_width: int
    feed_forward: int
    """Width of the gated feed-forward part, or of each expert."""
    context: int
    is_tied: bool
    experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Raises: DataError if the folder has no config.json that can be read, or of a family that the learner doesn't train."""
        check_is_model(folder)
        try:
            content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"model = {folder}: no config.json can be read from it ({error}); a model is a Hugging Face folder") from error
        try:
            return cls.of(content.get("text_config", content))
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{folder}/config.json: it doesn't say {error}. Put back a whole copy of the file") from error

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """Raises: DataError for another family; KeyError for a size that isn't there."""
        kind = str(config["model_type"])
        family = trained_family(kind).with_options(config)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            model_type=kind,
            family=family,
            layers=config["num_hidden_layers"],
            hidden=hidden,
            vocabulary=config["vocab_size"],
            heads=heads,
            key_heads=config.get("num_key_value_heads") or heads,
            head_width=config.get("head_dim") or hidden // heads,
            feed_forward=config[family.experts.width if family.experts else "intermediate_size"],
            context=config["max_position_embeddings"],
            is_tied=bool(config.get("tie_word_embeddings", False)),
            experts=_experts(config) if family.experts else 0,
            experts_per_token=config["num_experts_per_tok"] if family.experts else 0,
        )

    @property
    def sizes(self) -> SimpleNamespace:
        """Sizes under the names of a transformers config, for learner/model_fit.py."""
        return SimpleNamespace(
            model_type=self.model_type,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            intermediate_size=self.feed_forward,
            num_experts=self.experts,
        )

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a head that is the embedding counts once."""
        return sum(self.split(1, 1, 1)[0])

    @property
    def tensors(self) -> int:
        """Number of tensors, as files and engines count them: each expert has its own."""
        of_layer = (rule for rule in self.family.rules if "{layer}" in rule.megatron)
        layer = sum(len(rule.hf) * (self.experts if rule.is_expert else 1) for rule in of_layer)
        return self.layers * layer + (2 if self.is_tied else 3)

    @property
    def has_head_norms(self) -> bool:
        """Over each head or over all of them."""
        return self.family.qk_norm != "none"

    @property
    def rotary_width(self) -> int:
        """Channels of a head that are turned."""
        return int(self.head_width * self.family.supports.get("partial_rotary_factor", (1.0,))[0])

    @property
    def norms(self) -> int:
        """Norms of a layer over the hidden channels."""
        return 2 * self.family.has(INPUT_NORM) + 2 * self.family.has(ATTENTION_NORM_AFTER)

    def split(self, tensor_parallel: int, pipeline_parallel: int, expert_parallel: int) -> list[tuple[int, int]]:
        """(parameters that all data-parallel ranks have, those of experts) of a rank, by pipeline stage.

        Vocabulary, query groups and feed-forward parts are cut in tensor_parallel pieces, experts shared by expert_parallel ranks; norms
        and routers are whole everywhere, as Megatron has them. With stages a tied head is a copy of the embedding on the last one.
        """
        layers = self.layers // pipeline_parallel
        dense, experts = self._layer(tensor_parallel), self._experts(expert_parallel)
        rows = -(-self.vocabulary // tensor_parallel) * self.hidden
        stages = [[layers * dense, layers * experts] for _ in range(pipeline_parallel)]
        stages[0][0] += rows
        stages[-1][0] += self.hidden
        if pipeline_parallel > 1 or not self.is_tied:
            stages[-1][0] += rows
        return [(shared, of_experts) for shared, of_experts in stages]

    def _layer(self, ranks: int) -> int:
        """Parameters of one layer on one of the ranks that share its matrices, without its experts."""
        feed_forward = self.experts * self.hidden if self.experts else 3 * self.hidden * self.feed_forward // ranks
        return self._attention(ranks) + self.norms * self.hidden + feed_forward

    def _attention(self, ranks: int) -> int:
        key_heads = max(self.key_heads // ranks, 1)
        queries, keys = self.heads // ranks * self.head_width, key_heads * self.head_width
        biases = queries + 2 * keys if self.family.has(QKV_BIAS) else 0
        of_heads = {"none": 0, "head": 2 * self.head_width, "all_heads": queries + keys}[self.family.qk_norm]
        return self.hidden * (2 * queries + 2 * keys) + biases + of_heads

    def _experts(self, ranks: int) -> int:
        return self.experts // ranks * 3 * self.hidden * self.feed_forward

    def key_value_bytes(self, dtype: str, ranks: int = 1) -> int:
        """Bytes of one token in the cache of an engine, or of each of its ranks: at least one key head."""
        return 2 * self.layers * max(self.key_heads // ranks, 1) * self.head_width * BYTES_OF[dtype]

    def weight_bytes(self, dtype: str, ranks: int = 1, *, float8: bool = False, attention_groups: int = 1) -> int:
        """Bytes of the weights of one rank of an engine; with one rank, of the whole model. A rank has a part of every matrix. Its share of
        the experts has the same size whether each expert is cut or each rank has some experts whole.

        Args:
            float8: the projections have a byte an entry, and 4 for each block of 128 x 128 (engines/float8_format.py).
            attention_groups: each of which has all heads, and each rank the whole embedding.
        """
        shared, experts = self.split(ranks, 1, 1)[0]
        if attention_groups > 1:
            rows = self.vocabulary - -(-self.vocabulary // ranks)
            shared += rows * self.hidden + self.layers * (self._attention(ranks // attention_groups) - self._attention(ranks))
        whole = (shared + experts // ranks) * BYTES_OF[dtype]
        if not float8:
            return whole
        entries, blocks = self._projections(ranks)
        return whole + self.layers * (entries * (1 - BYTES_OF[dtype]) + 4 * blocks)

    def largest_tensor_bytes(self, dtype: str, *, float8: bool = False) -> int:
        """Bytes of the largest tensor of the model's files. In float8 the embedding and the head keep their type."""
        queries, keys, feed_forward = self.channels(1, 1).values()
        has_both_in_one = any(rule.layout is TensorLayout.GATE_UP and len(rule.hf) == 1 for rule in self.family.rules)
        rows = max(queries, keys, (1 + has_both_in_one) * feed_forward)
        return self.hidden * max(self.vocabulary * BYTES_OF[dtype], rows * (1 if float8 else BYTES_OF[dtype]))

    def channels(self, ranks: int, expert_ranks: int) -> dict[str, int]:
        """Number of channels that each rank of an engine has of a layer, by the kind by which its matrices are cut.

        Args: expert_ranks: that share an expert.
        """
        keys = max(self.key_heads // ranks, 1) * self.head_width
        wide, sharing = ("experts", expert_ranks) if self.experts else ("feed-forward part", ranks)
        return {"queries": self.heads * self.head_width // ranks, "keys": keys, wide: self.feed_forward // sharing}

    def _projections(self, ranks: int) -> tuple[int, int]:
        """Entries and blocks that a rank has of a layer's matrices; of experts as many, whole or not."""
        queries, keys, feed_forward = self.channels(ranks, 1).values()
        attention = [(queries, self.hidden), (keys, self.hidden), (keys, self.hidden), (self.hidden, queries)]
        number, sharing = (3 * self.experts, ranks) if self.experts else (3, 1)
        entries = sum(rows * columns for rows, columns in attention) + number * feed_forward * self.hidden // sharing
        return entries, sum(_blocks(*matrix) for matrix in attention) + number * _blocks(feed_forward, self.hidden) // sharing


def _blocks(rows: int, columns: int) -> int:
    return -(-rows // BLOCK) * -(-columns // BLOCK)


def check_is_model(folder: Path) -> None:
    """Raises: DataError if the folder has no config.json; ConfigError for a name that no tokenizer takes."""
    require_utf8("model = ", folder.absolute())
    if not (folder / "config.json").is_file():
        reason = "no such folder" if not folder.exists() else "it has no config.json"
        name = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        hub = f"hf:{name} if that is its name there" if not folder.exists() and len(name.parts) == 2 else "hf:ORGANISATION/NAME"
        raise DataError(
            f"model = {folder}: {reason}. Name a Hugging Face folder (config.json, safetensors, tokenizer), or a model on the hub as "
            f"{hub}; `evenkeel init-model RECIPE` makes a small model"
        )


def _experts(config: Mapping[str, Any]) -> int:
    """Files of the hub say num_experts; what transformers 5 saves says num_local_experts."""
    number: int = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return number
