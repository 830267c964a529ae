"""An agent: it asks the model by OpenAI's client, and is the calculator. recipes/smollm2_agent.yaml trains the model by it."""

import json
import os
import re

from openai import OpenAI

client, model = OpenAI(), os.environ["OPENAI_MODEL"]  # base URL and key are this rollout's own
with open(os.environ["EVENKEEL_TASK"]) as file:
    task = json.load(file)


def write_reward(reward):
    with open(os.environ["EVENKEEL_REWARD"], "w") as file:
        json.dump(reward, file)


write_reward(0.0)  # of a rollout that is cut: then the door answers 400, and the program ends
messages = [{"role": "system", "content": "You may ask the calculator: write 17 + 4 = and nothing else."}]
for role, said in ("user", "What is 17 + 4?"), ("assistant", "17 + 4 ="), ("user", "21"), ("assistant", "21"):
    messages.append({"role": role, "content": said})
messages.append({"role": "user", "content": f"What is {task['prompt']}?"})
while True:
    said = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
    asked = re.fullmatch(r"(\d+) ([+-]) (\d+) =", said)
    if not asked:
        break
    a, sign, b = asked.groups()
    result = int(a) + int(b) if sign == "+" else int(a) - int(b)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": str(result)}]
write_reward(float(said == task["answer"]))
