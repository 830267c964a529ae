"""The models that evenkeel trains, as a package in the form of SGLang's SGLANG_EXTERNAL_MODEL_PACKAGE.

SGLang's registry of models imports all of its 240 files before it looks one up, a second and a half in every engine's start, unless it is
given a package of models that is looked at first. A model that isn't in it is still found: all the others are imported then.
"""

FILES = ("glm4", "llama", "mistral", "mixtral", "olmo2", "olmoe", "qwen2", "qwen3", "qwen3_moe")
"""Modules of sglang.srt.models that serve the learner's families (learner/hf/families.py)."""
