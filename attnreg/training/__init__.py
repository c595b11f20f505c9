"""Training methods, which work in any training loop. Nothing here opens a file or parses an option."""

from attnreg._lazy import lazy_names

_OLD = ["RDrop", "R3F", "TwoPass", "WeightedCrossEntropy"]
__all__, __getattr__, __dir__ = lazy_names(__name__, __file__, deprecated=_OLD)
