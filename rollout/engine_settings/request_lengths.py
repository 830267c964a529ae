"""How long prompts and answers may be, in tokens: one count, which settings, tasks and engines ask."""

from __future__ import annotations

from dataclasses import dataclass

# Tokens of the room that SGLang keeps for itself: it cuts longer answers without a word (scheduler.py, init_req_max_new_tokens).
_KEPT = 2
# Tokens of the room without which SGLang's max_req_input_len is (tp_worker.py, get_worker_info). A prompt has to be shorter than that,
# however short its answer (managers/utils.py, validate_input_length).
_AFTER_PROMPT = 6


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """What an engine takes."""

    together: int
    """Longest prompt and answer together, tokens."""
    prompt: int
    """Longest prompt, tokens."""

    @classmethod
    def within(cls, room: int) -> RequestLengths:
        """Args: room: the context length, or the tokens of the KV cache where these are fewer."""
        return cls(room - _KEPT, room - _AFTER_PROMPT - 1)

    @classmethod
    def of_engine(cls, max_req_input_len: int) -> RequestLengths:
        """Args: max_req_input_len: as SGLang's scheduler reports it."""
        return cls.within(max_req_input_len + _AFTER_PROMPT)

    def longest_prompt(self, max_tokens: int) -> int:
        """Longest prompt whose answer has room for max_tokens, tokens; below 1 if none fits."""
        return min(self.prompt, self.together - max_tokens)
