"""Data sets, their metrics, and the task and model that come with the package."""

from attnreg._lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
