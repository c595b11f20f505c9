"""Shared parts of all providers: base class, composition, schedules, saving, expressions."""
