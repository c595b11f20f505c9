"""Which tokens are padding: read from a model's mask arguments, as they acted on attention in the dry run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnreg.draws import Batch
from attnreg.errors import InputError
from attnreg.functional.seeded import is_traced
from attnreg.functional.validity import allowed
from attnreg.injection.discovery.blocks import ModuleCall, input_names
from attnreg.injection.discovery.sites import ModelSite
from attnreg.sites import Stack

ENCODER_MASKS = "attention_mask", "src_key_padding_mask", "key_padding_mask"
DECODER_MASKS = "decoder_attention_mask", "tgt_key_padding_mask"
MASK_NAMES = *ENCODER_MASKS, *DECODER_MASKS

#: The meaning of True, or of a number other than 0, in a mask; ``"pairs"`` if it is a mask ``(Q, K)`` for all samples,
#: which holds no padding; ``"other"`` if the meaning is not known
Convention = Literal["token", "padding", "pairs", "other"]
Key = tuple[str, int, bool]  # name and rank of a mask, and whether it holds floats
DECODES = {"decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"}  # inputs of two stacks
BLOCK_MASKS = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask", "attention_mask")


class Padding:
    """The padding masks of one forward pass, given its inputs and the names of all inputs that the model takes.

    If the model has an encoder and a decoder (``has_two``), they have separate masks. A model that ``hides`` padding
    masks it without these masks.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any] | None = None,
        names: Iterable[str] = (),
        *,
        has_two: bool = False,
        conventions: Mapping[Key, Convention] | None = None,
        hides: bool = False,
    ) -> None:
        inputs = inputs or {}
        self.masks = {name: inputs[name] for name in MASK_NAMES if inputs.get(name) is not None}
        self._conventions = conventions
        self._hides = hides
        self.has_two = has_two or bool({*DECODES, "tgt_key_padding_mask"} & {*names, *inputs})

    def tokens(
        self,
        stack: Stack,
        shape: tuple[int, ...],
        block_masks: Mapping[str, Any] | None = None,
        foreign: Collection[str] = (),
    ) -> tuple[Tensor | None, bool]:
        """Return which tokens of hidden states of this shape are not padding; ``block_masks`` are by name.

        The model's masks of the ``foreign`` names are for other tokens, even if their number is equal. The result is
        bool, ``(B, T)``, or ``None`` without a mask, and whether there is a mask, but for other tokens.
        """
        names = DECODER_MASKS if stack == "decoder" and self.has_two else ENCODER_MASKS
        masks = [(name, self.masks[name]) for name in names if name in self.masks]
        of_block = list((block_masks or {}).items())
        # A block's attention mask comes last: if it lets padding attend to everything, it does not show the padding.
        certain = [(name, mask) for name, mask in of_block if "padding" in name]
        for name, mask in (*certain, *((name, mask) for name, mask in masks if name not in foreign), *of_block):
            convention = self._convention(name, mask)
            if convention in ("pairs", "other"):
                continue
            if mask.dim() == 3 and shape[0] == mask.shape[0] * mask.shape[1] > mask.shape[0]:
                mask = mask.flatten(0, 1)  # every choice is a row
            valid = tokens_in(mask, convention)
            if valid.shape[1] == shape[1] and valid.shape[0] in (1, shape[0]):
                return valid.expand(shape[:2]), False
        return None, self._hides or any(self._convention(name, mask) != "pairs" for name, mask in masks)

    def batch(self, inputs: Mapping[str, Any], rows: Tensor | None) -> Batch:
        """Return the samples and tokens of a pass with these inputs, which are ``rows`` of a larger batch."""
        size, tokens = next((x.shape[:2] for x in inputs.values() if isinstance(x, Tensor) and x.dim() > 1), (0, 0))
        if rows is not None and len(rows) != size:
            raise InputError(f"Expected `rows` to have an index for each of {size} samples, got {len(rows)}.")
        caches = [value for value in inputs.values() if hasattr(value, "get_seq_length")]
        lengths = [cache.get_seq_length() for cache in caches]
        rooms = rooms_of(caches)
        # A static cache goes on counting in its tensor.
        cached = (lengths[0] + 0 if is_traced() else int(lengths[0])) if lengths else 0
        decoded = [x for x in map(inputs.get, ("decoder_input_ids", "decoder_inputs_embeds")) if isinstance(x, Tensor)]
        if decoded and cached:
            tokens = decoded[0].shape[1]  # the cache is the decoder's
        valid = None if self.has_two else self.tokens("encoder", (size, tokens + cached, 0))[0]
        first = None if valid is None else valid.int().argmax(1)
        return Batch(size, tokens, first, cached, rooms, rows, has_encoder=bool(decoded))

    def _convention(self, name: str, mask: Any) -> Convention:
        if not isinstance(mask, Tensor) or mask.dim() < 2:
            return "other"
        if (known := (self._conventions or {}).get(_key(name, mask))) is not None:
            return known
        if "padding" in name:
            return "padding"
        # In a handwritten model, True may be padding, and a mask with a row per sample may be a mask of pairs.
        is_plain = self._conventions is None or mask.dim() > 2
        return "token" if is_plain or not (mask.dtype == torch.bool or mask.is_floating_point()) else "other"


def rooms_of(inputs: Iterable[Any]) -> set[int]:
    """Return how many keys the layers of static caches of transformers have room for; none without such a cache."""
    layers = (layer for value in inputs for layer in getattr(value, "layers", ()))
    return {layer.max_cache_len for layer in layers if hasattr(layer, "max_cache_len")}


def check_windows(inputs: Mapping[str, Any]) -> None:
    """Raise if a pass that repeats another continues a cache that has forgotten tokens, so that positions moved."""
    for cache in (value for value in inputs.values() if hasattr(value, "get_seq_length")):
        sliding = (layer for layer in getattr(cache, "layers", ()) if getattr(layer, "is_sliding", False))
        windows = [getattr(layer, "sliding_window", None) or layer.max_cache_len for layer in sliding]
        tokens = next((x.shape[1] for x in inputs.values() if isinstance(x, Tensor) and x.dim() > 1), 0)
        if (cached := int(cache.get_seq_length())) and cached + tokens > min(windows, default=math.inf):
            raise InputError(
                f"A cache with a sliding window of {min(windows)} tokens forgets the first ones, so a pass that is "
                "repeated cannot continue it: pass all tokens at once."
            )


def tokens_in(mask: Tensor, convention: Convention) -> Tensor:
    """Return which tokens are not padding, bool, ``(B, T)``, given a mask of two or more dimensions."""
    is_added = mask.is_floating_point() and (convention == "padding" or mask.dim() > 2)  # to scores
    valid = allowed(mask) if is_added else mask.bool() ^ (convention == "padding")
    if mask.is_floating_point() and not is_added:  # blocks of Longformer get 0 and -10000
        valid = torch.where((mask == 1).any(), valid, allowed(mask))
    return valid if valid.dim() == 2 else valid.flatten(1, -2).any(1)  # the keys to which any query may attend


def conventions_of(model: nn.Module, sites: Sequence[ModelSite]) -> dict[Key, Convention] | None:
    """Return the conventions of masks that modules around self-attention got, by name, rank and kind.

    ``None`` for models of transformers, whose names tell the convention.
    """
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        return None
    conventions: dict[Key, Convention] = {}
    for site, tokens in _attended(sites):
        for number, call in enumerate(site.attention.running):
            names = DECODER_MASKS if number == 0 and site.info.stack == "decoder" else ENCODER_MASKS
            masks = {} if hasattr(call.module, "config") else masks_of(call)  # transformers' conventions are known
            for name, mask in masks.items():
                if mask.dim() < 2 or (number == 0 and name not in names and masks.keys() & {*names}):
                    continue
                convention = _convention(mask, tokens.to(mask.device))
                if convention is not None:
                    # A mask of 1 for tokens may come in any type; an added mask, or True for padding, only in this one.
                    is_float = mask.is_floating_point()
                    any_type = convention == "token" and not (is_float and bool((mask < 0).any()))
                    for key in {_key(name, mask), (name, mask.dim(), is_float ^ any_type)}:
                        conventions[key] = convention if conventions.get(key, convention) == convention else "other"
    return conventions


def hides_padding(sites: Sequence[ModelSite], conventions: Mapping[Any, Convention] | None) -> bool:
    """Whether a handwritten model masked padding in the dry run, but without a known mask."""
    is_known = conventions is None or not {"token", "padding"}.isdisjoint(conventions.values())
    states = (tokens for site, tokens in _attended(sites) if site.block and tokens.shape[1] in site.block.shape)
    # In strictly causal attention, no query attends to the last key.
    return not is_known and not all(bool(tokens[:, :-1].all()) for tokens in states)


def _attended(sites: Sequence[ModelSite]) -> Iterator[tuple[ModelSite, Tensor]]:
    """Yield whole self-attention, with the keys ``(B, K)`` to which any query attended."""
    for site in sites:
        if site.attention.tokens is not None and site.info.stack != "cross" and site.parts is None:
            yield site, site.attention.tokens


def masks_of(call: ModuleCall) -> dict[str, Tensor]:
    """Return the masks among the arguments of a call, by name."""
    inputs = {**dict(zip(input_names(call.module), call.args, strict=False)), **call.kwargs}
    return {name: inputs[name] for name in MASK_NAMES if isinstance(inputs.get(name), Tensor)}


def _key(name: str, mask: Tensor) -> Key:
    return name, mask.dim(), mask.is_floating_point()


def _convention(mask: Tensor, tokens: Tensor) -> Convention | None:
    """Return the convention of a mask, given the keys ``(B, K)`` to which any query attends; ``None`` if unknown."""
    batch, keys = tokens.shape
    if mask.shape[-1] != keys:
        return None  # a mask for other tokens
    if mask.dim() == 2 and mask.shape[0] not in (1, batch):
        return "pairs" if mask.shape[0] == keys else "other"
    either: tuple[Convention, ...] = "token", "padding"
    for convention in either:
        if mask.dim() > 2 and mask.is_floating_point() and convention == "padding":
            break
        read = tokens_in(mask, convention)
        if read.shape[0] in (1, batch) and torch.equal(read.expand(batch, keys), tokens):
            return convention
    return "other"
