"""Helpers that several regularizers share."""
