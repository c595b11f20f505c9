"""Compare methods over seeds: equal conditions for all methods, paired statistics, one report."""
