"""Attention through torch's ``nn.MultiheadAttention``."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch.nn.functional as F

from attnreg.injection.backends.base import Backend, Call, Noting, Watching

CHECKS = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"


class MultiheadAttention(Backend):
    """``F.multi_head_attention_forward``, which calls the softmax or fused attention of other backends."""

    name = "multihead"
    functions = (F.multi_head_attention_forward,)

    def read(self, *args: Any, **kwargs: Any) -> Call | None:
        """Return ``None``; the functions that it calls are read instead."""
        return None

    def intercept(self, mode: Watching, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run torch's implementation under the mode, which then sees its softmax or fused attention."""
        with mode.of_heads(heads_of(args, kwargs)), mode:
            return _UNDISPATCHED(*args, **kwargs)

    def discover(self, finder: Noting, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run it under the finder, in the dry run."""
        return self.intercept(finder, func, *args, **kwargs)


def heads_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of heads from the arguments of ``F.multi_head_attention_forward``."""
    return args[4] if len(args) > 4 else kwargs["num_heads"]


def undispatched(function: Any) -> Any:
    """Copy a function of torch, written in Python, so that it does not dispatch itself to the active function mode.

    ``F.multi_head_attention_forward`` first dispatches itself, so a mode would never see its inner softmax or fused
    attention. The copy runs torch's code with a ``has_torch_function`` that returns False.
    """
    twin = FunctionType(
        function.__code__,
        {**function.__globals__, **dict.fromkeys(CHECKS, lambda *tensors: False)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


_UNDISPATCHED = undispatched(F.multi_head_attention_forward)

BACKEND = MultiheadAttention()
