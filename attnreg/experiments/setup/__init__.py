"""What a run needs before it begins: its rows, batches, model and checks of the data."""
