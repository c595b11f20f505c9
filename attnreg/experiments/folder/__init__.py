"""What a run folder holds: how it is written, and read."""
