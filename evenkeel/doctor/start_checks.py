"""Checks of settings and the model's folder before a start: `train` stops at the first problem, `doctor` and `plan` list all.

The results are facts; nothing is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evenkeel.actors.cluster.hub import config_folder
from evenkeel.actors.config import HubName, RunConfig
from evenkeel.actors.settings.deadlines import bytes_of
from evenkeel.actors.settings.devices import check_devices, unfit_shares
from evenkeel.actors.settings.resolve import ModelFacts, kept, refusals, with_devices, with_model
from evenkeel.correction.errors import DataError, EvenkeelError
from evenkeel.doctor.facts import Complaint, PaperFacts
from evenkeel.doctor.gather import paper_facts
from evenkeel.doctor.on_paper import without_model, worst_first
from evenkeel.learner.hf.folder import check_trainable, check_weights, is_pretrained, read_config, read_json, shapes_of
from evenkeel.learner.hf.plain_config import is_plainly_trainable, plain_sizes
from evenkeel.plan.hosts import largest_bucket
from evenkeel.plan.layouts import Gpus
from evenkeel.plan.shape import ModelShape, check_is_model


def check_model_folder(path: Path, *, has_weights: bool = True) -> None:
    """Args: has_weights: they are meant to be there. Raises: DataError if this is no model folder, or one of its files is damaged."""
    check_is_model(path)
    read_config(path)
    if has_weights:
        _check_weights(path)


def _check_weights(path: Path) -> None:
    if not any(path.glob("*.safetensors")):
        raise DataError(f"model = {path}: no *.safetensors in it", remedy="save the weights in that format (save_pretrained does)")
    shapes_of(path)


def config_for_model(
    config: RunConfig,
    folder: Path,
    *,
    has_weights: bool,
    refused: list[EvenkeelError] | None = None,
    lacking: list[EvenkeelError] | None = None,
) -> RunConfig:
    """The configuration as a run would have it with the model in this folder, which is checked (resolve.with_model).

    Args:
        config: with devices and types.
        folder: the model's, or a copy of it without the weights.
        has_weights: they are meant to be in the folder.
        refused: takes each reason against the run; None: the first is raised.
        lacking: the same of its weights.
    Raises: DataError if there is no config.json that can be read; EvenkeelError kinds, if nothing takes the reasons.
    """
    check_is_model(folder)
    content = read_json(folder / "config.json")
    model = plain_sizes(content)
    is_plain = model is not None if has_weights else is_plainly_trainable(content)
    if not is_plain:
        check_model_folder(folder, has_weights=False)  # by transformers, as the next
    with kept(refused):
        if not is_plain:
            model = check_trainable(folder, has_weights=False)
        if has_weights:
            with kept(lacking):
                _check_weights(folder)
                check_weights(folder, model)
    facts = ModelFacts(content, _weight_bytes(folder, has_weights=has_weights), is_pretrained=is_pretrained(folder))
    with contextlib.suppress(DataError):  # of a model that the learner doesn't train, which is said elsewhere
        shape = ModelShape.read(folder)
        bucket = largest_bucket(shape, config)
        facts = replace(facts, layers=shape.layers, context=shape.context, has_experts=shape.experts > 0, largest_bucket=bucket)
    return with_model(config, facts, refused)


def _weight_bytes(folder: Path, *, has_weights: bool) -> int:
    """Bytes of the weights in the folder; of a folder that need not have them, at least as many as its config.json means in bfloat16."""
    found = bytes_of(folder)
    return found if found and has_weights else max(found, ModelShape.read(folder).weight_bytes("bfloat16"))


def check_on_paper(config: RunConfig, *, meant: Sequence[Gpus] | None = None) -> tuple[RunConfig, PaperFacts]:
    """The configuration as the run would be given it, and what is known without a cluster, with every reason against the run.

    Args:
        config: with devices and types.
        meant: GPUs of machines that aren't here: config.json alone has to be; none: not known. None: the run is started here.
    Raises: DataError if there is no config.json of a model that the learner trains, or no such model on the hub.
    """
    return _of_folder(config, config_folder(config.model), meant)


def _of_folder(config: RunConfig, folder: Path, meant: Sequence[Gpus] | None) -> tuple[RunConfig, PaperFacts]:
    """The complaints of check_on_paper. Args: folder: with the model's config.json, unless it lacks that."""
    refused: list[EvenkeelError] = []
    lacking: list[EvenkeelError] = []
    has_weights = meant is None and HubName.of(config.model) is None
    gives_rate = config.learner.is_given("learning_rate")
    config = config_for_model(config, folder, has_weights=has_weights, refused=refused, lacking=lacking)
    facts = paper_facts(config, folder, meant=meant)
    return config, replace(facts, gives_rate=gives_rate, refused=tuple(refused), lacking=tuple(lacking))


def check_on_paper_or_refuse(
    config: RunConfig, *, has_gpu: bool, meant: Sequence[Gpus] | None = None
) -> tuple[RunConfig, PaperFacts] | list[Complaint]:
    """As `check_on_paper`, of a configuration whose devices and types are still open; or the refusals without which no more can be told,
    together with what settings and the number of GPUs say without them."""
    if refused := list(refusals(config, has_gpu=has_gpu)):
        return list(map(Complaint.refusal, refused))
    config = with_devices(config, has_gpu=has_gpu)
    remedy = _get_config(config.model)
    try:
        folder, remedy = config_folder(config.model), ""
        return _of_folder(config, folder, meant)
    except EvenkeelError as error:
        lacking = [error]
    if meant is None and not any(unfit_shares(config)):  # which without_model has
        with kept(lacking):
            check_devices(config)
    rest = "memory, layouts, requests and bytes were not looked at: they need the config.json of a model that can be trained"
    unchecked = Complaint("note", rest, remedy)
    return worst_first([*map(Complaint.refusal, lacking), *without_model(config, meant or ()), unchecked])


def _get_config(model: Path) -> str:
    """How to have the file here, of a model of the hub; empty for a folder."""
    if (name := HubName.of(model)) is None:
        return ""
    revision = f" --revision {name.revision}" if name.revision else ""
    return f"Run `hf download {name.repository} config.json{revision}` where there is a network, or set model to a folder with that file"
