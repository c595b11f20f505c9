"""Plots of runs and comparisons. Colours suit colour-blind readers; line styles and markers differ in greyscale."""
