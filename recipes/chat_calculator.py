"""The environments of smollm2_calculator.yaml: the calculator of nano_calculator.yaml for a chat model, and one that is broken."""

from calculator import Calculator

EXAMPLE = [("user", "What is 17 + 4?"), ("assistant", "17 + 4 ="), ("user", "21"), ("assistant", "21")]


class ChatCalculator(Calculator):
    """The model is told of the calculator, and sees it asked once."""

    async def reset(self, task):
        """The conversation up to the question."""
        question = ("user", f"What is {await super().reset(task)}?")
        told = ("system", "You may ask the calculator: write 17 + 4 = and nothing else.")
        return [{"role": role, "content": content} for role, content in (told, *EXAMPLE, question)]


class BrokenCalculator(ChatCalculator):
    """The same conversation, but the model has to do without."""

    async def step(self, turn):
        """As of the one that works, which is told no result."""
        reading, reward, is_done = await super().step(turn)
        return reading if is_done else "The calculator is broken. What is the result?", reward, is_done
