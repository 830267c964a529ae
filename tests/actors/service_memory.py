"""Memory of a process that packs a batch, corrects it and looks at it, as the correction service does.

python -m tests.actors.service_memory bytes TOKENS  # held and at most, a token
python -m tests.actors.service_memory pages TOKENS  # that nine more batches are given, a thousand tokens
"""

from __future__ import annotations

import re
import resource
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from evenkeel.correction.config import CorrectionConfig
from evenkeel.correction.correct import defer
from evenkeel.correction.diagnostics.diagnose import diagnose
from evenkeel.correction.terms.advantages import group_advantages
from evenkeel.rollout.config import OverlongConfig, TrainOverlong
from evenkeel.rollout.packing import pack_groups
from evenkeel.rollout.trajectory import FinishReason, Group, Prompt, Trajectory, VersionSpan

PROMPT, SAMPLES, ANSWER = 100, 8, 1900
CORRECTION = CorrectionConfig.model_validate({"preset": "tis-token"})
OVERLONG: OverlongConfig = TrainOverlong()


def group(number: int) -> Group:
    prompt = Prompt(f"p/{number}", "question", tuple(range(PROMPT)), "answer")
    answers = [
        Trajectory(
            prompt_id=prompt.prompt_id,
            prompt_ids=array("i", range(PROMPT)),
            response_ids=array("i", range(ANSWER)),
            behavior_logprobs=array("f", [-1.0 - 0.01 * sample] * ANSWER),
            version_spans=(VersionSpan(0, 0, ANSWER),),
            finish_reason=FinishReason.STOP,
            reward=float(sample % 2),
        )
        for sample in range(SAMPLES)
    ]
    return Group(number, prompt, tuple(answers), 0)


def memory(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found
    return int(found[1]) << 10


def service(groups: int) -> tuple[int, list[object]]:
    """Tokens, and what the service keeps of them until the learner's values have come and been looked at."""
    made = [group(number) for number in range(groups)]
    batch = pack_groups(made, learner_version=0, advantage=group_advantages, overlong=OVERLONG, max_tokens={"": ANSWER}).batch
    corrected = defer(batch, CORRECTION)
    target = batch.behavior_logprobs + 0.01
    diagnose(batch, corrected, target, detailed=True)
    return batch.num_tokens, [made, batch, corrected, target]


def print_bytes(tokens: int) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # what was the most so far is forgotten
    before = memory("VmRSS")
    packed, _kept = service(tokens // (SAMPLES * (PROMPT + ANSWER)))
    print((memory("VmRSS") - before) / packed, (memory("VmHWM") - before) / packed)


def print_pages(tokens: int) -> None:
    with ThreadPoolExecutor(1) as threads:  # as the service
        _, *given = [threads.submit(pages_given, tokens).result() for _ in range(10)]  # the first one finds no heap of its size
    print(sum(given) / len(given) / tokens * 1000)


def pages_given(tokens: int) -> int:
    """By the kernel, for a batch of so many tokens."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    service(tokens // (SAMPLES * (PROMPT + ANSWER)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def main() -> None:
    service(1)  # modules and kernels
    {"bytes": print_bytes, "pages": print_pages}[sys.argv[1]](int(sys.argv[2]))


torch.set_num_threads(1)
if __name__ == "__main__":
    main()
