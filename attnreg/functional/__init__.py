"""Pure functions on tensors: attention under masks, sampling, rates and estimators."""

from attnreg.functional.attention import (
    apply_score_mod,
    attention_weights,
    masked_scores,
    renormalized,
    scores_dropout,
    uniform_attention,
    weights_dropout,
)
from attnreg.functional.bernoulli import (
    bernoulli_entropy,
    bernoulli_kl,
    bernoulli_log_prob,
    drop_rate,
    sample_keep,
    sample_windows,
)
from attnreg.functional.heads import head_importance, rescaled_heads, sample_heads, without_top
from attnreg.functional.region import candidate_region
from attnreg.functional.relaxation import arm_gradient, concrete_drop, opposite_draws, straight_through
from attnreg.functional.structure import ancestor_mask, window_mask
from attnreg.functional.validity import sequence_starts, units

__all__ = [
    "ancestor_mask",
    "apply_score_mod",
    "arm_gradient",
    "attention_weights",
    "bernoulli_entropy",
    "bernoulli_kl",
    "bernoulli_log_prob",
    "candidate_region",
    "concrete_drop",
    "drop_rate",
    "head_importance",
    "masked_scores",
    "opposite_draws",
    "renormalized",
    "rescaled_heads",
    "sample_heads",
    "sample_keep",
    "sample_windows",
    "scores_dropout",
    "sequence_starts",
    "straight_through",
    "uniform_attention",
    "units",
    "weights_dropout",
    "window_mask",
    "without_top",
]
