"""Hidden-state sites: the places in a model, outside of attention, where a provider may change hidden states.

T is the number of tokens (or patches), C the number of features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from attnreg.draws import Draws, DrawsHere
from attnreg.errors import InputError
from attnreg.masks import Site

Where = Literal["embeddings", "input", "output", "pooled"]


@dataclass(frozen=True, kw_only=True)
class HiddenInfo(Site):
    """Position of a hidden-state site in its model.

    Args:
        where: ``"embeddings"`` (the states that enter the first block of a list of blocks), ``"input"`` or ``"output"``
            of a Transformer block, or ``"pooled"`` (the one vector per sample that the last linear layer takes).
        name: qualified name of the block or linear layer, as in :class:`Site`, as are ``layer``, ``num_layers`` and
            ``stack``. Embeddings have the layer of the block that they enter, the pooled state that of the last block.

    Example:
        >>> HiddenInfo(where="output", layer=3, num_layers=12).label
        'encoder.3.output'
    """

    name: str = "block"
    where: Where = "output"

    @property
    def label(self) -> str:
        """Short unique name, ``"<stack>.<layer>.<where>"``, or ``"pooled"``."""
        # Spelled out: torch.compile does not find a dict entry again whose key was made with `super()`.
        return self.where if self.where == "pooled" else f"{self.stack}.{self.layer}.{self.where}"


@dataclass(frozen=True, kw_only=True, eq=False)
class HiddenSite(HiddenInfo, DrawsHere):
    """Hidden states in one forward pass.

    Args:
        shape: ``(B, T, C)``; ``(B, C)`` for the pooled state.
        valid: bool, ``(B, T)``, ``True`` = a token that is not padding; ``None`` means all.
        padding_unknown: whether the model was given a mask whose tokens are not those of the hidden states, so that
            ``valid`` is ``None`` although there may be padding.
        draws: the source of randomness; see :meth:`keep`, :meth:`uniform` and :meth:`normal`.
        device: device of the states.
        dtype: dtype of the states.

    Example:
        >>> site = HiddenSite(shape=(2, 3, 8), valid=torch.tensor([[True, True, False], [True, True, True]]))
        >>> site.lengths.tolist()
        [2, 3]
    """

    shape: tuple[int, ...]
    valid: Tensor | None = field(default=None, repr=False)
    padding_unknown: bool = False
    draws: Draws = field(default_factory=Draws, repr=False)
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    dtype: torch.dtype = torch.float32

    @property
    def tokens(self) -> Tensor:
        """The tokens that are not padding, bool, ``(B, T)``.

        Raises:
            InputError: if the site has no tokens, or padding is unknown.
        """
        if len(self.shape) != 3:
            raise InputError(f"The pooled state at {self.name} has no tokens.")
        if self.padding_unknown:
            raise InputError(
                f"The padding of the hidden states of {self.name} is unknown: they have {self.shape[1]} tokens, which "
                "are not those of the attention mask. Use a provider that needs no lengths, or batches without padding."
            )
        everything = torch.ones(self.shape[:2], dtype=torch.bool, device=self.device)
        return everything if self.valid is None else self.valid

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sample without padding, ``(B,)``, at least 1; raises as :attr:`tokens`."""
        return self.tokens.sum(1).clamp(min=1)
