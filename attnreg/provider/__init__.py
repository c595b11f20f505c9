"""What all providers have in common: base class, composition, schedules, saving, expressions."""
