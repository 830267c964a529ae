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

    @classmethod
    def parse(cls, prompt_id: str) -> PromptPlace | None:
        """None for an id of another form."""
        source, *numbers = prompt_id.split("/")
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            return None
        return cls(source, *map(int, numbers))

    def __str__(self) -> str:
        return "/".join(map(str, self))
