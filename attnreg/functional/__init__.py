"""Pure functions on tensors: attention under masks, sampling, rates and estimators.

A name means the same in all functions. In ``keep``, bool, ``True`` is kept. In ``valid``, bool, ``True`` is allowed by
the model, and ``None`` allows all. Both are broadcastable to ``(B, H, Q, K)``, which is ``shape``. ``query`` is
``(B, H, Q, D)``, ``key`` and ``value`` are ``(B, H, K, D)``, attention scores and weights ``(B, H, Q, K)``. Noise is
``uniform``, u in ``[0, 1)``.
"""

from attnreg.functional.attention import apply_score_mod as apply_score_mod
from attnreg.functional.attention import attention_entropy as attention_entropy
from attnreg.functional.attention import attention_weights as attention_weights
from attnreg.functional.attention import masked_scores as masked_scores
from attnreg.functional.attention import relaxed_output as relaxed_output
from attnreg.functional.attention import relaxed_weights as relaxed_weights
from attnreg.functional.attention import renormalized as renormalized
from attnreg.functional.attention import scores_dropout as scores_dropout
from attnreg.functional.attention import uniform_attention as uniform_attention
from attnreg.functional.attention import weights_dropout as weights_dropout
from attnreg.functional.decisions import ancestor_mask as ancestor_mask
from attnreg.functional.decisions import bernoulli_entropy as bernoulli_entropy
from attnreg.functional.decisions import bernoulli_kl as bernoulli_kl
from attnreg.functional.decisions import bernoulli_log_prob as bernoulli_log_prob
from attnreg.functional.decisions import concrete_drop as concrete_drop
from attnreg.functional.decisions import drop_rate as drop_rate
from attnreg.functional.decisions import sample_heads as sample_heads
from attnreg.functional.decisions import sample_keep as sample_keep
from attnreg.functional.decisions import sample_spans as sample_spans
from attnreg.functional.decisions import sample_windows as sample_windows
from attnreg.functional.decisions import straight_through as straight_through
from attnreg.functional.region import candidate_region as candidate_region
from attnreg.functional.region import factored_region as factored_region
from attnreg.functional.region import weights_gradient as weights_gradient
from attnreg.functional.seeded import fold_seed as fold_seed
from attnreg.functional.seeded import seeded_keep as seeded_keep
from attnreg.functional.seeded import seeded_uniform as seeded_uniform
from attnreg.functional.seeded import uniform_at as uniform_at
from attnreg.functional.validity import sequence_starts as sequence_starts
from attnreg.functional.validity import units as units
