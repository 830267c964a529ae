"""The id of a prompt says where the prompt comes from."""

from __future__ import annotations

from typing import NamedTuple


class PromptPlace(NamedTuple):
    """Where a prompt of a task comes from; its id is the text."""

    source: str
    """Part of the task: "train" or "held_out"."""
    epoch: int
    """Passes over the questions before this one."""
    position: int
    """Place in the epoch."""
    task: str = ""
    """Name of the task; empty: the only one of its run."""

    @classmethod
    def parse(cls, prompt_id: str) -> PromptPlace | None:
        """None for an id of another form."""
        *task, source, epoch, position = ["", *prompt_id.split("/")][-4:] if prompt_id.count("/") in (2, 3) else ["", "", "", ""]
        if not (epoch.isdecimal() and position.isdecimal()):
            return None
        return cls(source, int(epoch), int(position), *task)

    def __str__(self) -> str:
        return "/".join(map(str, self[:3] if not self.task else (self.task, *self[:3])))


def task_of(prompt_id: str) -> str:
    """Name of the task that a prompt is of; empty: the only one of its run, or the id has another form."""
    place = PromptPlace.parse(prompt_id)
    return place.task if place else ""
