"""Attention inside torch's ``nn.MultiheadAttention``."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from attnreg.injection.mode import AttentionMode

FUNCTIONS = (F.multi_head_attention_forward,)


def _without_dispatch(function: Any) -> Any:
    """The same function, reading a ``has_torch_function`` that answers no.

    ``F.multi_head_attention_forward`` hands itself to the active mode before it does anything, so under a mode its
    inner softmax or fused attention can never be seen. This is torch's own code, run past that first question.
    """
    twin = FunctionType(
        function.__code__,
        {**function.__globals__, "has_torch_function": lambda tensors: False},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


undispatched = _without_dispatch(F.multi_head_attention_forward)


def intercept(mode: AttentionMode, func: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Run torch's own implementation under the mode, which then meets its softmax or fused attention."""
    query = args[0] if args else kwargs["query"]
    with mode.of_batch(query.shape[1] if query.dim() == 3 else 1), mode:
        return undispatched(*args, **kwargs)
