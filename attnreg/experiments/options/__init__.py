"""The options of a run: those that all recipes share, and those of one recipe."""
