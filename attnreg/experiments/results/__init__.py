"""What a run found: evaluations, its report and card, plots, and scores of a saved model."""
