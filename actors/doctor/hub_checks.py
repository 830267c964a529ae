"""What the hub says, in some seconds, of a recipe's data set and of its model's tokenizer, at which a start would stop."""

from __future__ import annotations

from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from actors.cluster.hub import HubAway, check_data_set, outline_by_file
from actors.config import RunConfig
from actors.hub_name import HubName
from actors.processes.daemon_threads import DaemonThreads
from correction.errors import EvenkeelError
from rollout.config import HuggingFaceTask

HUB_S = 5.0
"""Longest wait for all answers of the hub, seconds; a tokenizer has some ten megabytes."""


def ask_the_hub(config: RunConfig, refused: list[EvenkeelError]) -> tuple[Path | None, list[str]]:
    """Ask for the data set, and download the model's config and tokenizer, both at the same time. What is late is left to its thread.

    Args: refused: takes each reason against the run.
    Returns: a folder with the model's tokenizer, if the model is one of the hub and the hub has answered; sentences on what isn't known.
    """
    task, threads = config.rollout.task, DaemonThreads()
    asked: dict[str, Future[Any]] = {}
    found, unknown = None, []
    if isinstance(task, HuggingFaceTask) and not Path(task.path).exists():
        asked[f"rollout.task.path = {task.path}"] = threads.submit(check_data_set, task)
    if HubName.of(config.model) is not None:
        asked[f"tokenizer of {config.model}"] = threads.submit(outline_by_file, config.model)
    wait(asked.values(), HUB_S)
    for what, answer in asked.items():
        try:
            found = answer.result(timeout=0) or found
        except TimeoutError:
            unknown.append(f"{what}: not looked at, as the hub took more than {HUB_S:g} s")
        except HubAway as error:
            unknown.append(str(error))
        except EvenkeelError as error:
            refused.append(error)
    return found, unknown
