"""The environment of nano_calculator.yaml: a calculator that the model may ask before it answers."""

import re


class Calculator:
    async def reset(self, task):
        """The prompt. An instance is one rollout."""
        self.answer = task["answer"]
        return task["prompt"]

    async def step(self, turn):
        """(what the model reads next, reward, whether it is done)."""
        asked = re.fullmatch(r"(\d+) ([+-]) (\d+) =", turn.text)
        if not asked:
            return None, float(turn.text == self.answer), True
        a, sign, b = asked.groups()
        return str(int(a) + int(b) if sign == "+" else int(a) - int(b)), 0.0, False
