"""The files of a run folder: how they are written, and read."""
