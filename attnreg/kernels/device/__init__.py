"""Triton code, which is imported only where it can run."""
