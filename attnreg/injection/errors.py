"""What the injection layer raises and warns of."""

from __future__ import annotations

from torch import nn

from attnreg.errors import AttnRegWarning, InputError

SEEN = (
    "softmax, F.scaled_dot_product_attention, nn.MultiheadAttention and flex_attention are seen; other kernels, such "
    "as flash attention, hide it"
)


class NoAttentionError(InputError):
    """No attention computation could be seen where one was expected."""


class CoverageWarning(AttnRegWarning):
    """Some attention of a model is not regularized."""


def why_hidden(model: nn.Module) -> str:
    """Why no attention may be seen in a model, and what helps."""
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if getattr(model, "_supports_sdpa", False) and chosen not in ("sdpa", "eager", None):
        return f'{SEEN}. Call `model.set_attn_implementation("sdpa")`; it is {chosen!r} now.'
    return f"{SEEN}."
