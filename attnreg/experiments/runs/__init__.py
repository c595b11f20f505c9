"""A training run: the loop, its checkpoints, and recipes as commands."""
