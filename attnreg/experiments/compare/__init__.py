"""Comparing methods over seeds: the same work for each, honest statistics, one report."""
