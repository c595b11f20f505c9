"""Errors and warnings of the injection layer."""

from __future__ import annotations

from torch import nn

from attnreg.errors import AttnRegWarning, InputError

SEEN = (
    "attnreg sees softmax, F.scaled_dot_product_attention, nn.MultiheadAttention and flex_attention, but not other "
    "kernels such as flash attention"
)


class NoAttentionError(InputError):
    """Attention in a model is missing, hidden, or not as expected."""


class CoverageWarning(AttnRegWarning):
    """Some attention of a model is not masked."""


def why_hidden(model: nn.Module) -> str:
    """Explain why attention may be hidden in a model, and what to do."""
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if getattr(model, "_supports_sdpa", False) and chosen not in ("sdpa", "eager", None):
        return f'{SEEN}. Call `model.set_attn_implementation("sdpa")`; it is now {chosen!r}.'
    return f"{SEEN}."
