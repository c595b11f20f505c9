"""One training run: its options, data, loop, folder and report."""
