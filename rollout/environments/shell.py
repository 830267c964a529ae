"""An environment whose tool is a shell in a sandbox: rollout.environment.path = evenkeel.rollout.environments.shell:Shell."""

from __future__ import annotations

import re
from typing import Any

from evenkeel.rollout.environments.interface import Turn
from evenkeel.rollout.task_folders.sandbox import Sandbox, opened

_BLOCK = re.compile(r"```(?:sh|bash|shell)[ \t]*\n(.*?)```", re.DOTALL)


class Shell:
    """One rollout of a task folder. The last block of ```sh that the model writes in a turn is run, and it reads what that prints; a turn
    without a block is its last. Then, or when a limit cuts the rollout, the folder's tests give the reward."""

    _sandbox: Sandbox | None = None

    async def reset(self, task: dict[str, Any]) -> str:
        """Raises: SandboxError."""
        self._sandbox = await opened(task["metadata"], within_s=task["deadline_s"])
        return str(task["prompt"])

    async def step(self, turn: Turn) -> tuple[str | None, Any, bool]:
        """Raises: SandboxError."""
        assert self._sandbox is not None
        blocks = _BLOCK.findall(turn.text)
        if not blocks or turn.is_cut:
            return None, await self._sandbox.reward(), True
        return (await self._sandbox.run(blocks[-1])).text, 0.0, False

    async def cut(self) -> Any:
        """Raises: SandboxError."""
        assert self._sandbox is not None
        return await self._sandbox.reward()

    async def close(self) -> None:
        """Its files are removed."""
        if self._sandbox is not None:
            await self._sandbox.close()
