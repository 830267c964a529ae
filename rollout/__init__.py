"""A prompt becomes a scored group of trajectories: tasks, SGLang engines, rewards. Importing the package imports nothing else."""
