"""How each example of the pages is checked, which the site says below it. An example is a block of code; tests/test_docs.py has the rules.

Lines of `evenkeel`, and of this repository's own programs, are read as they would be in a terminal, settings included; so is YAML, as a
recipe's. Whatever else there is stands in `CHECKED`, by page and first line.
"""

from __future__ import annotations

import re

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OWN_PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*python (?:-m )?((?:benchmarks|lab|tests)[\w./]+)")
EVENKEEL = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\S*/)?evenkeel (?=[a-z]|--)")
READ = "Read by the tests as a terminal would; not run."
READ_IN_PART = "The tests read the lines of `evenkeel`, and run nothing of it."
READ_AS_RECIPE = "Read by the tests as a recipe."
NOT_RUN = "Not run by the tests."
LIBRARY_SLOW = "Run by tests/test_library_page.py (`-m slow`), in an environment of that trainer's."

CHECKED = {
    "README": {"git clone": "`.ci/run` makes the test suite and one real step; the training that is shown was run by hand."},
    "docs/agents": {
        "# calculator.py": "Run by tests/test_agents_page.py.",
        "# adder.py": "Run by tests/test_agents_page.py.",
        **dict.fromkeys(("# calculator.yaml", "# adder.yaml", "# agent.yaml"), "Started by tests/test_agents_page.py."),
        '{"prompt"': "Read by tests/test_agents_page.py.",
        "# agent.py": "Run by tests/rollout/test_agents.py, with a model that is told what to say.",
        "from evenkeel.rollout.task_folders.sandbox import opened": "Not run as it stands: tests/rollout/test_agents.py makes these calls.",
    },
    "docs/command_line": {"import evenkeel": "Not run as it stands: tests/e2e/test_python_interface.py makes these calls."},
    "docs/correction": {
        "from evenkeel.correction import": "Run by tests/correction/test_correction_page.py.",
        "k3_kl = 0.008": "An alarm of a run.",
    },
    "docs/extending": dict.fromkeys(("# questions.py", "# counting.py", "# counting_game.py"), "Run by tests/test_extending_page.py."),
    "docs/library": {
        "import torch\nfrom evenkeel_correction import CorrectionConfig,": "Run by tests/test_library_page.py.",
        "batch = from_lists(": "Run by tests/test_library_page.py.",
        "corrected = correct(batch, config, reduce": "Run by tests/test_library_page.py.",
        "sums = shard_sums": "Run by tests/test_library_page.py.",
        "parts = [None]": "Run by tests/test_library_page.py.",
        "import dataclasses": LIBRARY_SLOW,
        "import torch\nfrom evenkeel_correction import (": LIBRARY_SLOW,
    },
    "docs/tasks": {
        "# sums.yaml": "Started, with the two below, by tests/test_tasks_page.py.",
        '{"prompt"': "Read by tests/test_tasks_page.py.",
        "# my_rewards.py\nimport re": "Run by tests/test_tasks_page.py.",
        "# my_rewards.py\ndef score": "Run by tests/test_tasks_page.py.",
    },
}
"""Page -> beginning of a block -> what the site says below it."""


def commands(code: str) -> list[str]:
    """The command lines of a block, without comments."""
    lines = code.replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines) if line]


def how_checked(page: str, language: str, code: str) -> str:
    """A sentence. Raises: LookupError for Python that `CHECKED` doesn't have."""
    listed = [sentence for begin, sentence in CHECKED.get(page, {}).items() if code.startswith(begin)]
    if listed:
        return listed[0]
    if language == "python":
        raise LookupError(f"{page}.md: CHECKED in docs/examples.py names no test of the block that begins {code[:40]!r}; add both.")
    if language == "yaml":
        return READ_AS_RECIPE
    own = [bool(EVENKEEL.match(line) or OWN_PROGRAM.match(line)) for line in commands(code)]
    return READ if all(own) else READ_IN_PART if any(own) else NOT_RUN


def with_marks(text: str, page: str) -> str:
    """A page with that sentence below each of its blocks."""
    return BLOCK.sub(lambda found: f"{found[0]}\n\n<small>{how_checked(page, found[1], found[2])}</small>\n", text)
