"""Tasks: their data sets, metrics and models, with one built-in task and model that need no network."""

from attnreg._lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
