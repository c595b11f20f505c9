"""What a run ends with: evaluations, its report and card, plots, and scores of a saved model."""
