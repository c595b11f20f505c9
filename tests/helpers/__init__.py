"""What tests share: models, batches, regularizers, formulas, commands and runs."""
