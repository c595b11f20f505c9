"""Everything that the command line is made of: tasks, runs, comparisons, plots and the commands themselves."""

from attnreg._lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
