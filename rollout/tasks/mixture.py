"""The tasks of a run together: which of them each prompt is of. A run with one task is the case of one.

The prompt at a position follows from the position, the weights, and what a curriculum by solve rate has made of these (`state`). Nothing is
left to chance: a run that goes on from a position and a state repeats nothing, and leaves nothing out.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import xxhash

from evenkeel.rollout.prompt_place import task_of
from evenkeel.rollout.tasks.tasks import Task
from evenkeel.rollout.trajectory import Demonstration, GroupFacts, Prompt

# Groups over which a task's solve rate is averaged, the last ones weighing most.
_MEMORY = 32


class Turns:
    """Whose turn it is among tasks with weights that change. No clock, no chance.

    Before each prompt every task is credited its share of one; that with the most credit gives the prompt, and pays one. So the credits add
    up to 0, and of n tasks none is ever more than 1 - 1/n prompts ahead of the sum of its shares, nor n - 1 times as much behind. A task of
    weight 0 has no turn.
    """

    def __init__(self, tasks: int) -> None:
        """Args: tasks: number of them."""
        self._task, self._place = array("H"), array("L")
        self._credit, self.taken = [0.0] * tasks, [0] * tasks

    def __len__(self) -> int:
        """Turns that are decided."""
        return len(self._task)

    def add(self, weights: Sequence[float]) -> None:
        """Decide one more. Args: weights: of the tasks, not all 0."""
        whole = sum(weights)
        self._credit = [credit + weight / whole for credit, weight in zip(self._credit, weights, strict=True)]
        chosen = max((number for number, weight in enumerate(weights) if weight), key=self._credit.__getitem__)
        self._credit[chosen] -= 1.0
        self._task.append(chosen)
        self._place.append(self.taken[chosen])
        self.taken[chosen] += 1

    def __getitem__(self, position: int) -> tuple[int, int]:
        """(number of the task, how many turns it had before)."""
        return self._task[position], self._place[position]


def first_of_each(prompts: Iterable[Prompt], count: int) -> list[Prompt]:
    """The first prompts of each task, in their order."""
    seen: Counter[str] = Counter()
    found = []
    for prompt in prompts:
        task = task_of(prompt.prompt_id)
        seen[task] += 1
        if seen[task] <= count:
            found.append(prompt)
    return found


class Mixture:
    """Training prompts by position, and what else a run wants of its tasks."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        weight_at: Callable[[str, int], float] = lambda task, step: 1.0,
        *,
        groups_per_step: int = 1,
        floor: float | None = None,
        correct_at: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            tasks: by name, the only one by an empty one.
            weight_at: weight of a task's prompts at a step, >= 0 and not 0 for all; a step is so many positions as a batch has groups.
            floor: rollout.solve_rate_floor; None: solve rates change no weight.
            correct_at: reward of a right answer, by task; None: 1.
        """
        self.tasks = dict(tasks)
        self._weight_at, self._groups_per_step, self._floor = weight_at, groups_per_step, floor
        self._correct_at = correct_at or dict.fromkeys(tasks, 1.0)
        self.restore(None)

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a `state`; None, or an empty one: from the beginning."""
        state = state or {"weights": [], "solved": {}, "decided": 0}
        self._given: list[tuple[int, list[float]]] = [(first, weights) for first, weights in state["weights"]]
        self._solved: dict[str, tuple[float, int]] = {name: (rate, groups) for name, (rate, groups) in state["solved"].items()}
        self._decided: int = state["decided"]
        self._turns = Turns(len(self.tasks))

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON: weights by the position from which on they held, positions decided, solve rates so far. So a
        resume with other weights changes nothing before it."""
        decided = max(self._decided, len(self._turns))
        return {"weights": list(self._given), "solved": dict(self._solved), "decided": decided}

    def train_prompt(self, position: int) -> Prompt:
        """The prompt at a position of the run, whose id has the task's name, where there are several, and the place in its own stream.

        Raises: DataError if the task can't make one.
        """
        while len(self._turns) <= position:
            self._turns.add(self._weights(len(self._turns)))
        number, place = self._turns[position]
        return list(self.tasks.values())[number].train_prompt(place)

    def _weights(self, position: int) -> list[float]:
        """Of the tasks, at this position. They change at the beginning of a step alone."""
        step, rest = divmod(position, self._groups_per_step)
        if position >= max(self._decided, len(self._turns)) and rest == 0:
            now = [self._weight_at(name, step) * self._factor(name) for name in self.tasks]
            if not self._given or now != self._given[-1][1]:
                self._given.append((position, now))
        return self._given[bisect_right(self._given, position, key=itemgetter(0)) - 1][1]

    def _factor(self, name: str) -> float:
        """4 p (1 - p), the variance of a right-or-wrong reward over its largest, which is how much a group can teach; 1 while p is unknown.

        Source: Rutherford et al. (2024), No Regrets (sampling for learnability), arXiv 2408.15099, which has p (1 - p).
        """
        rate, _ = self._solved.get(name, (0.5, 0))
        return 1.0 if self._floor is None else round(max(self._floor, 4 * rate * (1 - rate)), 3)

    def finished(self, group: GroupFacts) -> None:
        """Count a scored group in its task's solve rate."""
        name = task_of(group.prompt_id)
        if right := [answer.reward >= self._correct_at[name] for answer in group.valid if answer.reward is not None]:
            rate, groups = self._solved.get(name, (0.0, 0))
            groups = min(groups + 1, _MEMORY)
            self._solved[name] = rate + (sum(right) / len(right) - rate) / groups, groups

    def shares(self) -> dict[str, float]:
        """Share of the newest prompts that each task is given, by name; nothing before the first."""
        weights = self._given[-1][1] if self._given else []
        return {name: weight / sum(weights) for name, weight in zip(self.tasks, weights, strict=bool(weights))}

    def passes(self) -> dict[str, float]:
        """Passes that have been begun over each task's training questions, in parts, by name; of those that have an end."""
        taken = zip(self.tasks.items(), self._turns.taken, strict=True)
        return {name: count / task.questions_per_epoch for (name, task), count in taken if task.questions_per_epoch}

    # -- all tasks ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Data sets and files, for people."""
        return ", ".join(task.name for task in self.tasks.values())

    @property
    def fingerprint(self) -> str:
        """Hash of all training questions; of one task that task's own."""
        prints = [task.fingerprint for task in self.tasks.values()]
        return prints[0] if len(prints) == 1 else xxhash.xxh3_64("".join(prints).encode()).hexdigest()

    def held_out_prompts(self) -> tuple[Prompt, ...]:
        """All held-out questions, task after task."""
        return tuple(chain.from_iterable(task.held_out_prompts() for task in self.tasks.values()))

    def demonstrations(self, count: int) -> dict[str, tuple[Demonstration, ...]]:
        """Worked examples of the training sides, as many of each task, by its name. Raises: as Task.demonstrations."""
        return {name: task.demonstrations(-(-count // len(self.tasks))) for name, task in self.tasks.items()}
