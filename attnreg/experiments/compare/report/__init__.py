"""The reports of comparisons and study files: their tables, figures and text."""
