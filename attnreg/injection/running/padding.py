"""Find the tokens of hidden states that are not padding, from the masks that a model is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnreg.functional.seeded import is_traced
from attnreg.functional.validity import allowed
from attnreg.injection.running.seeds import REMEMBERED, mark
from attnreg.sites import Stack

ENCODER, DECODER = ("attention_mask", "src_key_padding_mask"), ("decoder_attention_mask", "tgt_key_padding_mask")
DECODES = {"decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"}
OF_BLOCKS = ("src_key_padding_mask", "tgt_key_padding_mask", "attention_mask")


class Padding:
    """The padding masks of one forward pass.

    Args:
        inputs: the inputs of the model by name.
        names: the names of all inputs that the model takes.
        has_two: whether the model has an encoder and a decoder, so that the masks of one are not those of the other.
    """

    def __init__(
        self, inputs: Mapping[str, Any] | None = None, names: Iterable[str] = (), *, has_two: bool = False
    ) -> None:
        given = inputs or {}
        self.masks = {name: given[name] for name in (*ENCODER, *DECODER) if given.get(name) is not None}
        self.has_two = has_two or takes_two([*names, *given]) or "tgt_key_padding_mask" in {*names, *given}

    def tokens(
        self, stack: Stack, shape: tuple[int, ...], own: Mapping[str, Any] | None = None
    ) -> tuple[Tensor | None, bool]:
        """Return the tokens of hidden states ``(B, T, C)`` that are not padding.

        Args:
            stack: the stack of the states.
            shape: their shape.
            own: the masks that the block itself is given, by name.

        Returns:
            bool, ``(B, T)``, or ``None`` without a mask; and whether there is a mask, but of other tokens.
        """
        names = DECODER if stack == "decoder" and self.has_two else ENCODER
        masks = [(name, self.masks[name]) for name in names if name in self.masks]
        given = list((own or {}).items())
        # A block's attention mask comes last: it may let padding attend to everything, and then hides what is padding.
        certain = [each for each in given if "padding" in each[0]]
        for name, mask in (*certain, *masks, *given):
            valid = _tokens_in(mask, is_padding="padding" in name)
            if valid is not None and valid.shape[1] == shape[1] and valid.shape[0] in (1, shape[0]):
                return valid.expand(shape[:2]), False
        return None, bool(masks)

    def same(self, other: Padding) -> bool:
        """Whether two passes have the same masks."""
        if self is other or self.masks.keys() != other.masks.keys():
            return self is other
        pairs = [(mask, other.masks[name]) for name, mask in self.masks.items()]
        return all(a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)) for a, b in pairs)


def takes_two(names: Iterable[str]) -> bool:
    """Whether a model with these inputs has an encoder and a decoder, each with its own masks.

    Example:
        >>> takes_two(["input_ids", "attention_mask"]), takes_two(["input_ids", "decoder_input_ids"])
        (False, True)
    """
    return bool(DECODES & set(names))


@dataclass
class _Noted:
    mark: int  # of the state of torch's generator, by which this computation is known again
    padding: Padding
    repeated: bool = False


class Paddings:
    """The padding masks of earlier forward passes, for the parts of them that gradient checkpointing repeats."""

    def __init__(self) -> None:
        self._noted: dict[str, deque[_Noted]] = {}

    def note(self, label: str, padding: Padding) -> None:
        """Note the masks with which hidden states are computed in a forward pass with gradients."""
        if not is_traced():
            self._noted.setdefault(label, deque(maxlen=REMEMBERED)).append(_Noted(mark(), padding))

    def again(self, label: str, name: str) -> Padding:
        """Return the masks of the computation that is now repeated.

        Raises:
            RuntimeError: if it may be one of several with different masks.
        """
        done, now = list(self._noted.get(label, ())), mark()
        marked = [each for each in done if each.mark == now] or done
        found = [each for each in marked if not each.repeated] or marked
        if not found:
            return Padding()
        if not all(each.padding.same(found[0].padding) for each in found):
            raise RuntimeError(
                f"Gradient checkpointing repeats {name}, and any of {len(found)} forward passes with different padding "
                "may be the one: run the backward pass of each forward pass before the next, or call `handle.step()` "
                "after each optimizer step."
            )
        found[-1].repeated = True
        return found[-1].padding

    def forget(self) -> None:
        """Forget all passes, because the step is done."""
        self._noted = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_noted": {}}


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
