"""What the injection layer raises."""

from __future__ import annotations


class NoAttentionError(ValueError):
    """No attention computation could be seen where one was expected."""


HIDDEN_KERNELS = (
    "Attention is seen where it runs softmax over the last dimension, F.scaled_dot_product_attention or "
    "nn.MultiheadAttention; flash, flex and custom kernels hide it "
    '(for a transformers model: `model.set_attn_implementation("sdpa")`).'
)
