"""Pictures of runs and comparisons; colours are told apart by colour-blind people, lines and markers in grey."""
