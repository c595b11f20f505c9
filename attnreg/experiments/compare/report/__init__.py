"""The reports of comparisons, study files and searches: their tables, figures and text."""
