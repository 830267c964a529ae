"""What an environment is: the class that rollout.environment.path names. Nothing has to be inherited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Reading = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""What the model reads next: a text, which is what a user says; messages with role and content, for the chat template; or token ids."""
Reward = float | Mapping[str, float]
"""A number, or named parts: each is a metric, their sum trains."""


@dataclass(frozen=True, slots=True)
class NewConversation:
    """Given back by `step` in place of what the model reads next: it goes on with this alone before it, as after a long history was made
    short, or as another agent. The rollout stays one: what was said before is trained, and has its reward."""

    reading: Reading
    """The prompt of the new conversation, as `reset` returns one."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model has said."""

    text: str
    """Decoded without the token that ended it."""
    token_ids: tuple[int, ...]
    """As they were sampled, the token that ended it included."""
    number: int
    """From 0, in all conversations of the rollout."""
    is_cut: bool
    """A limit cut it: the rollout ends here, whatever the environment says."""
    results: Sequence[Mapping[str, Any]] = ()
    """What the tools gave that it has called: messages, for `step` to return; none of a turn that is cut."""


class Environment(Protocol):
    """One rollout. An instance is made without arguments; hundreds of them share an event loop, so a method that waits has to await.

    A rollout that goes on elsewhere, because an engine or a process was lost, has its turns repeated: `reset` with the same task, and
    `step` with the same turns. An environment whose answers are then the same loses nothing; in others the rollout is begun again.

    A class may have `tools`: functions, its own methods among them, that the model may call (rollout.environment.tool_parser). They need
    type hints and a docstring that describes each argument.
    """

    async def reset(self, task: dict[str, Any]) -> Reading:
        """The prompt. Args: task: `prompt` (text), `answer` and `metadata` of the question, its `id`, a `seed` of this rollout, the same
        whenever it is begun, and the `deadline_s` of each of these methods."""
        ...

    async def step(self, turn: Turn) -> tuple[Reading | NewConversation | None, Reward, bool]:
        """(what the model reads next, the turn's reward, whether the rollout is done). Rewards of all turns are added up; what is to be
        read after the last turn is left out.

        An environment that gave messages or texts at first goes on with these, and one that gave token ids with token ids.
        """
        ...

    async def cut(self) -> Reward:
        """Optional: called if a limit ends the rollout between two turns, when `step` has said that it isn't done. What it returns is added
        to the rewards."""
        ...

    async def close(self) -> None:
        """Optional: called at the end."""
        ...
