"""A corrected batch becomes new weights: Megatron ranks, driven through learner_rank.py. Importing the package imports nothing else."""
