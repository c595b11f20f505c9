"""Attribution of a model's predictions to its attention weights."""

from attnreg.attribution.explain import METHODS, Attributions, explain
from attnreg.attribution.target import Target

__all__ = ["METHODS", "Attributions", "Target", "explain"]
