"""The model in Megatron's parts: its layers, the rows that it reads, and the ranks that share it and its batches."""
