"""The options of a run: those that all recipes share, and a recipe's own."""
