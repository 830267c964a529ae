"""Places of evaluations in a pool's workers: how many of their answers a worker samples at a time, and how many in turn."""

from __future__ import annotations

EVALUATION_SHARE = 4
"""One in so many of a worker's slots may go to evaluations while training is fed."""
# Answers of an evaluation that one call to a worker asks for at most.
_ANSWERS = 32


def evaluation_answers_at_once(slots: int, samples_per_group: int) -> int:
    """How many answers of evaluations a worker samples at a time while training is fed: those of its share of the slots.

    Args: slots: groups that a worker has under way at most.
    """
    return max(1, slots * samples_per_group // EVALUATION_SHARE)


def questions_of_a_call(at_once: int, samples: int) -> int:
    """How many questions one call to a worker asks. Args: at_once: as above, samples: answers to each."""
    return max(1, min(_ANSWERS, at_once) // samples)  # a worker takes its first part whatever its size


def evaluation_waves(questions: int, samples: int, *, workers: int, slots: int, samples_per_group: int, running: int, is_fed: bool) -> int:
    """Most answers one after the other until an evaluation is done.

    Args:
        samples: answers to each question.
        running: requests that an engine samples at a time.
        is_fed: the workers sample groups for training, too.
    """
    groups = slots * samples_per_group
    at_once = evaluation_answers_at_once(slots, samples_per_group)
    asked = questions_of_a_call(at_once, samples)
    calls_at_once = max(1, (at_once if is_fed else groups) // (asked * samples))
    turns = -(-questions // (asked * workers * calls_at_once))
    in_the_engine = calls_at_once * asked * samples + groups * is_fed
    of_training = 1 if is_fed else -(-groups // running)  # what is still under way when an evaluation begins
    return of_training + turns * -(-in_the_engine // running)
