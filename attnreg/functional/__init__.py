"""Pure functions on tensors: attention under masks, sampling, rates and estimators."""

from attnreg.functional.attention import apply_score_mod as apply_score_mod
from attnreg.functional.attention import attention_weights as attention_weights
from attnreg.functional.attention import masked_scores as masked_scores
from attnreg.functional.attention import renormalized as renormalized
from attnreg.functional.attention import scores_dropout as scores_dropout
from attnreg.functional.attention import uniform_attention as uniform_attention
from attnreg.functional.attention import weights_dropout as weights_dropout
from attnreg.functional.bernoulli import bernoulli_entropy as bernoulli_entropy
from attnreg.functional.bernoulli import bernoulli_kl as bernoulli_kl
from attnreg.functional.bernoulli import bernoulli_log_prob as bernoulli_log_prob
from attnreg.functional.bernoulli import drop_rate as drop_rate
from attnreg.functional.bernoulli import sample_keep as sample_keep
from attnreg.functional.bernoulli import sample_windows as sample_windows
from attnreg.functional.heads import head_importance as head_importance
from attnreg.functional.heads import rescaled_heads as rescaled_heads
from attnreg.functional.heads import sample_heads as sample_heads
from attnreg.functional.heads import without_top as without_top
from attnreg.functional.region import candidate_region as candidate_region
from attnreg.functional.relaxation import arm_gradient as arm_gradient
from attnreg.functional.relaxation import concrete_drop as concrete_drop
from attnreg.functional.relaxation import opposite_draws as opposite_draws
from attnreg.functional.relaxation import straight_through as straight_through
from attnreg.functional.structure import ancestor_mask as ancestor_mask
from attnreg.functional.structure import window_mask as window_mask
from attnreg.functional.validity import sequence_starts as sequence_starts
from attnreg.functional.validity import units as units
