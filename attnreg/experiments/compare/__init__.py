"""Compare methods over seeds: equal conditions for each method, paired statistics, one report."""
