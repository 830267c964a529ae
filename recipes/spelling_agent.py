"""An agent: it asks the model to spell a word backward, and then the other way round. recipes/nano_agent.yaml trains the model by it.

Any program that talks to a base URL will do. This one is small and quick to start: a nano model's run starts thousands of it.
"""

import json
import os
import urllib.request

MESSAGES = []


def ask(text: str) -> str:
    """The model's answer to what a user says now."""
    MESSAGES.append({"role": "user", "content": text})
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": MESSAGES, "max_tokens": 10}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        MESSAGES.append(json.load(response)["choices"][0]["message"])
    return MESSAGES[-1]["content"].strip()


with open(os.environ["EVENKEEL_TASK"]) as file:
    task = json.load(file)
question, _, word = task["prompt"].rpartition(" ")
right = [ask(f"{question} {asked}").lower() == asked[::-1].lower() for asked in (word, word[::-1])]
with open(os.environ["EVENKEEL_REWARD"], "w") as file:
    json.dump({"forth": right[0] / 2, "back": right[1] / 2}, file)
