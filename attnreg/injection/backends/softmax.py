"""Explicit attention: scores, softmax, product with the values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnreg import functional
from attnreg.injection.backends.allowed import Allowed
from attnreg.injection.backends.base import Backend, Call, Masking


class Softmax(Backend):
    """The softmax functions of torch, applied to scores."""

    name = "softmax"
    functions = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
    modules = (nn.Softmax,)

    def read(self, *args: Any, **kwargs: Any) -> Call | None:
        """Read a softmax; over a known dimension of two or more, it may be attention."""
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(dim, int) or scores.dim() < 2:
            return None
        return Call(tuple(scores.shape), dim, scores=scores)

    def intercept(self, mode: Masking, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        r"""Run softmax with dropped scores at :math:`-\infty`, and apply the factors of the mask to its output."""
        call = self.read(*args, **kwargs)
        site = None if call is None else mode.expect(self.name, call.shape)
        if call is None or site is None:
            return func(*args, **kwargs)
        assert call.scores is not None
        layout, shape = site.layout, call.shape
        scores = layout.canonical(call.scores)
        key_scores = layout.of_keys(scores)
        valid = mode.allowed(key_scores)
        mask = mode.ask(site, tuple(key_scores.shape), Allowed(valid), like=scores, written_scores=key_scores)
        mode.note(mask)
        if mask is None and mode.tap is None:
            return func(*args, **kwargs)
        masked = call.scores
        if mask is not None and mask.scores is not None:
            keep, valid_columns = layout.around_keys(mask.scores, valid, tuple(scores.shape))
            masked = layout.restored(functional.masked_scores(scores, keep, valid_columns), shape)
        options = {name: value for name, value in kwargs.items() if name != "input"}
        weights = layout.canonical(func(masked, *args[1:], **options))
        # Models may rely on a contiguous output, as softmax returns.
        return layout.restored(mode.finish(layout, weights, mask, valid), shape).contiguous()


BACKEND = Softmax()
