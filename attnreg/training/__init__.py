"""Training methods, which work in any training loop. Nothing here opens a file or parses an option."""

from attnreg._lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__, deprecated=["RDrop", "R3F", "WeightedCrossEntropy"])
