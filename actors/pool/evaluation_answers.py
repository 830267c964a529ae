"""Questions of evaluations: they wait in parts among the pool's work, and a worker that fails leaves its part to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from evenkeel.actors.pool.dispatch import Questions
from evenkeel.actors.pool.faults import MAX_ENGINE_LOSSES
from evenkeel.actors.pool.membership import Membership
from evenkeel.actors.pool.workers import WorkerHandle
from evenkeel.actors.settings.evaluation_places import questions_of_a_call
from evenkeel.correction.errors import ActorUnavailable, EngineDirty, EngineError, EvenkeelError
from evenkeel.rollout.config import AnswerSampling
from evenkeel.rollout.trajectory import Prompt, Trajectory


class EvaluationAnswers:
    """Has a pool's workers answer questions."""

    def __init__(
        self,
        members: Membership,
        *,
        add: Callable[[Sequence[Questions]], None],
        failed: Callable[[WorkerHandle, EvenkeelError], None],
        wake: Callable[[], None],
        at_once: int,
    ) -> None:
        """
        Args:
            add: has parts wait for workers.
            failed: called when a call to a worker has failed.
            wake: called when workers may take work that waits.
            at_once: answers that a worker samples at a time for evaluations while it is fed with groups, too.
        """
        self._members, self._add, self._failed, self._wake = members, add, failed, wake
        self._at_once = at_once

    async def answer(self, prompts: Sequence[Prompt], how: AnswerSampling) -> list[tuple[Trajectory, ...]]:
        """Scored answers to each prompt, spread over the workers. A question's answers are all sampled by one of them."""
        loop = asyncio.get_running_loop()
        size = questions_of_a_call(self._at_once, how.samples)
        parts = [Questions(prompts[i : i + size], how, loop.create_future()) for i in range(0, len(prompts), size)]
        self._add(parts)
        self._wake()
        try:
            return [t for answers in await asyncio.gather(*(part.answers for part in parts)) for t in answers]
        finally:
            for part in parts:
                part.answers.cancel()  # those that nobody waits for any more

    async def ask(self, worker: WorkerHandle, part: Questions) -> None:
        """Have a worker answer questions that it took; if it fails they wait again."""
        try:
            call = partial(worker.actor.answer.remote, list(part.prompts), part.how)
            answers = await self._members.call(worker, call, f"evaluation answers <- rollout worker {worker.name}")
            self._members.progress()
            if not part.answers.done():
                part.answers.set_result(answers)
        except ActorUnavailable:  # the evaluation's deadline is the end of this
            self._add([part])
        except EngineError as error:
            self._failed(worker, error)
            if not worker.leaves and self._is_too_dangerous(part, error) and not part.answers.done():
                part.answers.set_exception(error)
            self._add([part])
        except Exception as error:  # is the evaluation's, which need not end the run
            if not part.answers.done():
                part.answers.set_exception(error)
        finally:
            worker.questions -= part.size
        self._wake()

    def _is_too_dangerous(self, part: Questions, error: EngineError) -> bool:
        """Whether so many engines were lost with these questions that the evaluation should end before it costs another one."""
        part.losses += not isinstance(error, EngineDirty)
        return part.losses >= MAX_ENGINE_LOSSES
