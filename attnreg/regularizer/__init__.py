"""What all regularizers share: base class, composition, schedules, saving, expressions."""
