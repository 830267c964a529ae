"""Weights in and out: under Hugging Face names, as checkpoints, and in pieces for the engines."""
