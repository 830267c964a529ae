"""Operators of fixed order, for both engines, and what true on-policy training promises with them.

`operators`: what SGLang and Megatron compute with in the mode. `contract`: the settings of both sides, and what is refused.
`processor`: whether two processes compute alike. `agreement`: the comparison of sampled and trained logprobs, bit by bit.
"""

from correction.invariance.agreement import Agreement, Difference, compare
from correction.invariance.contract import Contract, Side
from correction.invariance.processor import Processor

__all__ = ["Agreement", "Contract", "Difference", "Processor", "Side", "compare"]
