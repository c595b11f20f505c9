"""Find the tokens of hidden states that are not padding, from the masks that a model is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from attnreg.injection.validity import allowed
from attnreg.masks import Stack

ENCODER, DECODER = ("attention_mask", "src_key_padding_mask"), ("decoder_attention_mask", "tgt_key_padding_mask")
DECODES = {"decoder_input_ids", "decoder_inputs_embeds", *DECODER}


class Padding:
    """The padding masks of one forward pass.

    Args:
        inputs: the inputs of the model by name.
        names: the names of all inputs that the model takes.
    """

    def __init__(self, inputs: Mapping[str, Any] | None = None, names: Iterable[str] = ()) -> None:
        given = inputs or {}
        self.masks = {name: given[name] for name in (*ENCODER, *DECODER) if given.get(name) is not None}
        self.has_two = bool(DECODES & set(names))  # the masks of the encoder are then not those of the decoder

    def tokens(self, stack: Stack, shape: tuple[int, ...], own: Any = None) -> tuple[Tensor | None, bool]:
        """Return the tokens of hidden states ``(B, T, C)`` that are not padding.

        Args:
            stack: the stack of the states.
            shape: their shape.
            own: the attention mask that the block itself is given, if any.

        Returns:
            bool, ``(B, T)``, or ``None`` without a mask; and whether there is a mask, but of other tokens.
        """
        names = DECODER if stack == "decoder" and self.has_two else ENCODER
        masks = [(name, self.masks[name]) for name in names if name in self.masks]
        for name, mask in (*masks, ("attention_mask", own)):
            valid = _tokens_in(mask, is_padding="padding" in name)
            if valid is not None and valid.shape[1] == shape[1] and valid.shape[0] in (1, shape[0]):
                return valid.expand(shape[:2]), False
        return None, bool(masks)


def _tokens_in(mask: Any, *, is_padding: bool) -> Tensor | None:
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return None
    is_added = mask.is_floating_point() and (is_padding or mask.dim() > 2)  # to scores
    valid = allowed(mask) if is_added else mask.bool() ^ is_padding
    return valid if valid.dim() == 2 else valid.flatten(1, -2).any(1)  # which keys any query may attend to


def share(part: Tensor, whole: Tensor, valid: Tensor | None) -> Tensor:
    """Return the share of counts ``(B, T)`` in others, over all tokens that are not padding, 0-d.

    Example:
        >>> import torch
        >>> share(torch.tensor([[1, 2]]), torch.tensor([[4, 2]]), torch.tensor([[True, False]]))
        tensor(0.2500)
    """
    if valid is not None:
        part, whole = part.masked_fill(~valid, 0), whole.masked_fill(~valid, 0)
    return part.sum() / whole.sum().clamp(min=1)
