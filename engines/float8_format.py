"""Weights in float8 e4m3 with a float32 scale for each block of 128 x 128: the format of DeepSeek's checkpoints, which SGLang reads.

A weight is its float8 number times the scale of its block. Embeddings, head, norms, biases and routers stay in the learner's type. Blocks
at the lower and right edge of a matrix are smaller. The plan of a run reads this without torch; float8.py converts.
"""

BLOCK = 128
"""Rows and columns that share a scale."""
SCALE_SUFFIX = "_scale_inv"
"""Suffix of a matrix's name. The scales are what its values are multiplied by; the "inv" is DeepSeek's."""
PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3"})
"""Modules of attention, feed-forward parts and experts, by the last part of their names; w1, w2 and w3 are Mixtral's."""
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
"""`quantization_config` of a config.json with such weights. What goes into a product is rounded to float8 too, 128 numbers at a time."""


def is_projection(name: str) -> bool:
    """Whether a weight, by its Hugging Face name, is kept in float8."""
    *_, module, leaf = name.split(".")
    return leaf == "weight" and module in PROJECTIONS
