"""One forward pass of an attached model: where it began, its seed, and the tokens that are not padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnreg.draws import Batch
from attnreg.errors import InputError
from attnreg.functional.seeded import is_traced
from attnreg.injection.discovery.padding import NAMES, OF_DECODERS, OF_ENCODERS, Convention, tokens_in
from attnreg.sites import Stack

DECODES = {"decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"}
OF_BLOCKS = ("src_key_padding_mask", "tgt_key_padding_mask", "attention_mask")


class Padding:
    """The padding masks of one forward pass, given its inputs and the names of all inputs that the model takes.

    Args:
        has_two: whether the model has an encoder and a decoder, so that the masks of one are not those of the other.
        conventions: what the masks say, by name and rank, as the dry run has found out.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any] | None = None,
        names: Iterable[str] = (),
        *,
        has_two: bool = False,
        conventions: Mapping[tuple[str, int], Convention] | None = None,
    ) -> None:
        given = inputs or {}
        self.masks = {name: given[name] for name in NAMES if given.get(name) is not None}
        self._conventions = conventions
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
        names = OF_DECODERS if stack == "decoder" and self.has_two else OF_ENCODERS
        masks = [(name, self.masks[name]) for name in names if name in self.masks]
        given = list((own or {}).items())
        # A block's attention mask comes last: it may let padding attend to everything, and then hides what is padding.
        certain = [each for each in given if "padding" in each[0]]
        for name, mask in (*certain, *masks, *given):
            convention = self._convention(name, mask)
            if convention in ("pairs", "other"):
                continue
            valid = tokens_in(mask, convention)
            if valid.shape[1] == shape[1] and valid.shape[0] in (1, shape[0]):
                return valid.expand(shape[:2]), False
        return None, any(self._convention(name, mask) != "pairs" for name, mask in masks)

    def batch(self, inputs: Mapping[str, Any], rows: Tensor | None) -> Batch:
        """Return the samples and tokens of a pass with these inputs, which are ``rows`` of a larger batch."""
        size, tokens = next((x.shape[:2] for x in inputs.values() if isinstance(x, Tensor) and x.dim() > 1), (0, 0))
        if rows is not None and len(rows) != size:
            raise InputError(f"Expected `rows` to have an index for each of {size} samples, got {len(rows)}.")
        lengths = [each.get_seq_length() for each in inputs.values() if hasattr(each, "get_seq_length")]
        cached = lengths[0] if lengths and not is_traced() else 0
        decoded = [x for x in map(inputs.get, ("decoder_input_ids", "decoder_inputs_embeds")) if isinstance(x, Tensor)]
        if cached and decoded:
            tokens = decoded[0].shape[1]  # the cache is the decoder's
        valid = None if self.has_two else self.tokens("encoder", (size, tokens + cached, 0))[0]
        first = None if valid is None else valid.int().argmax(1)
        return Batch(size, tokens, first, cached, rows, has_encoder=bool(decoded))

    def _convention(self, name: str, mask: Any) -> Convention:
        if not isinstance(mask, Tensor) or mask.dim() < 2:
            return "other"
        if self._conventions is not None and (name, mask.dim()) in self._conventions:
            return self._conventions[name, mask.dim()]
        if "padding" in name:
            return "padding"
        # In a model of one's own, True may be padding, and a mask of as many rows as samples may be one of pairs.
        is_plain = self._conventions is None or mask.dim() > 2
        return "token" if is_plain or not (mask.dtype == torch.bool or mask.is_floating_point()) else "other"

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


@dataclass(eq=False)
class Pass:
    """One forward pass of an attached model, or of a part of it."""

    module: nn.Module | None = None  # the module at which it began
    whole: bool = True  # whether this module contains all attention
    is_open: bool = False  # whether it goes on when another part of the model is called
    is_checked: bool = False  # whether it is known that all masked modules ran in it
    with_gradients: bool = False  # whether gradients were enabled when it began
    is_running: bool = False  # whether the module, or another part of the model in this pass, is running
    padding: Padding | None = None  # its padding masks, while it runs or is repeated
    seed: Tensor | None = None  # the seed from which all its masks follow, once it draws
    drew_first: bool = False  # whether it drew before its sites
    counts: dict[tuple[str, str], int] = field(default_factory=dict)  # number of draws so far, by place and site
    own_counts: dict[tuple[str, int], int] = field(default_factory=dict)  # of the model's own draws, by module and kind
    batch: Batch | None = None  # its samples and tokens, if the model's own draws need them

    @property
    def has_gradients(self) -> bool:
        """Whether what is computed now has gradients."""
        return self.with_gradients if self.is_running else torch.is_grad_enabled()
