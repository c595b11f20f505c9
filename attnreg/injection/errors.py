"""What the injection layer raises."""

from __future__ import annotations

from attnreg.errors import InputError


class NoAttentionError(InputError):
    """No attention computation could be seen where one was expected."""


HIDDEN_KERNELS = (
    "it is seen in softmax over the last dimension, F.scaled_dot_product_attention and nn.MultiheadAttention, while "
    'flash, flex and custom kernels hide it (for a transformers model: `model.set_attn_implementation("sdpa")`).'
)
