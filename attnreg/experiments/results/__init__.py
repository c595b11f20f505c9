"""The results of a run: evaluations, its report and card, plots, and scores of a saved model."""
