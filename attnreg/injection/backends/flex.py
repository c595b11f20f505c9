"""Attention in ``flex_attention``, torch's kernel for scores that are written as a function."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.overrides import handle_torch_function, has_torch_function

from attnreg import functional
from attnreg.functional.attention import ScoreMod
from attnreg.injection.backends.base import BY_FUNCTION, Backend, Call
from attnreg.injection.errors import NoAttentionError
from attnreg.injection.validity import allowed

if TYPE_CHECKING:
    from attnreg.injection.discovery.finder import Finder
    from attnreg.injection.mode import AttentionMode

TRANSFORMERS = "transformers.integrations.flex_attention", "compile_friendly_flex_attention"


class FlexAttention(Backend):
    """``flex_attention``, called as it is or by transformers (``attn_implementation="flex_attention"``).

    It is no torch function: a torch function mode would be compiled into it instead of being asked. So its name is
    bound to something that asks, wherever it stands, while an attached attention module runs.
    """

    name = "flex"
    functions = (flex_attention,)

    def __init__(self) -> None:
        super().__init__()
        self._bound: list[tuple[dict[str, Any], str, Any]] = []
        self._modules = 0

    def read(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: ScoreMod | None = None,
        block_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Call:
        """Always attention."""
        shape = (*query.shape[:-1], key.shape[-2])
        return Call(shape, query=query, key=key, valid=_valid(score_mod, block_mask, shape, query))

    def discover(self, finder: Finder, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the call, and give zeros: compiling a kernel for the dry run would take seconds."""
        return finder.note(self.name, self.read(*args, **kwargs), _zeros, *args, **kwargs)

    def intercept(
        self,
        mode: AttentionMode,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: ScoreMod | None = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **options: Any,
    ) -> Any:
        """The kernel with a score function that drops scores; attention written out where weights are to be seen."""
        shape = (*query.shape[:-1], key.shape[-2])
        site = mode.expect(self.name, Call(shape, query=query, key=key))
        more = {"block_mask": block_mask, "scale": scale, "enable_gqa": enable_gqa, **options}
        if site is None:
            return func(query, key, value, score_mod=score_mod, **more)
        valid = _valid(score_mod, block_mask, shape, query)
        mask = mode.ask(site, shape, valid, like=query, query=query, key=key, scale=scale, score_mod=score_mod)
        if mask is not None and mask.scores is not None and not mask.has_factors and mode.tap is None:
            score_mod = _dropping(score_mod, mask.scores, valid, shape)
        elif mask is not None or mode.tap is not None:
            groups = query.shape[1] // key.shape[1]
            scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2)
            scores = functional.apply_score_mod(
                score_mod, scores * (query.shape[-1] ** -0.5 if scale is None else scale)
            )
            scores = scores if valid is None else scores.masked_fill(~valid, -torch.inf)
            if mask is not None and mask.scores is not None:
                scores = functional.masked_scores(scores, mask.scores, valid)
            weights = mode.finish(site.layout, scores.softmax(-1), mask, valid)
            return _returned(weights.to(value.dtype) @ value.repeat_interleave(groups, 1), scores.logsumexp(-1), more)
        try:
            return func(query, key, value, score_mod=score_mod, **more)
        except NotImplementedError as error:
            raise NoAttentionError(
                f"flex_attention cannot train here ({' '.join(str(error).split())}): use another device, or "
                "attn_implementation='sdpa'."
            ) from error

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Within the block, whoever calls one of these functions asks the mode first."""
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._bound = list(self._names())
        for names, name, function in self._bound:
            names[name] = functools.partial(_asking, function)
        try:
            yield
        finally:
            for names, name, function in self._bound:
                names[name] = function

    def _names(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Where the functions stand: the namespace, and the name in it."""
        theirs = getattr(sys.modules.get(TRANSFORMERS[0]), TRANSFORMERS[1], None)
        if theirs is not None:
            BY_FUNCTION[theirs] = self
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is flex_attention or (theirs is not None and value is theirs):
                    yield module.__dict__, name, value


def _valid(score_mod: ScoreMod | None, block_mask: Any, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    valid = None
    with torch.no_grad():
        if block_mask is not None:
            valid = create_mask(block_mask.mask_mod, shape[0], shape[1], shape[2], shape[3], like.device)
        if score_mod is not None:
            open_ = allowed(functional.apply_score_mod(score_mod, like.new_zeros(shape)))
            valid = open_ if valid is None else valid & open_
    return valid


def _dropping(score_mod: ScoreMod | None, keep: Tensor, valid: Tensor | None, shape: tuple[int, ...]) -> ScoreMod:
    """A score function that drops scores; rows of which everything is dropped have equal scores at what is valid."""
    keep = keep.expand(shape)
    open_ = torch.ones((), dtype=torch.bool, device=keep.device).expand(shape) if valid is None else valid.expand(shape)
    dead = ~(keep & open_).any(-1)

    def dropping(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = score if score_mod is None else score_mod(score, b, h, q, k)
        kept = torch.where(keep[b, h, q, k], own, -torch.inf)
        equal = torch.where(open_[b, h, q, k], torch.zeros_like(own), -torch.inf)
        return torch.where(dead[b, h, q], equal, kept)

    return dropping


def _zeros(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
    return _returned(query.new_zeros((*query.shape[:-1], value.shape[-1])), query.new_zeros(query.shape[:-1]), options)


def _returned(out: Tensor, lse: Tensor, options: dict[str, Any]) -> Any:
    """The output as flex_attention gives it: with the log-sum-exp of scores where it is asked for."""
    if options.get("return_aux") is not None:
        return out, torchs.AuxOutput(lse=lse)
    return (out, lse) if options.get("return_lse") else out


def _asking(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, past the torch function mode that is active."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if has_torch_function(tensors):
        return handle_torch_function(function, tensors, *args, **kwargs)
    return function(*args, **kwargs)


BACKEND = FlexAttention()
