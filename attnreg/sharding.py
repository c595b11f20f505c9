"""Whole state dicts of models that FSDP2 shards over processes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer


def is_sharded(module: nn.Module) -> bool:
    """Whether a module's parameters are spread over several processes: by FSDP2, or by tensor parallelism."""
    return any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())


def whole_state(part: Any, model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model, of its optimizer, or of another part of its training.

    Of a sharded model and its optimizer, the first process gets the whole state and the others get nothing. All of them
    must call this at the same time.
    """
    if not (is_sharded(model) and (part is model or isinstance(part, Optimizer))):
        return part.state_dict()
    from torch.distributed.checkpoint import state_dict as dcp  # late: it is slow to import

    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    if part is model:
        return dcp.get_model_state_dict(model, options=options)
    inner: Any = getattr(part, "optimizer", part)  # accelerate wraps the optimizer
    return dict(dcp.get_optimizer_state_dict(model, inner, options=options))


def load_whole_state(part: Any, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what :func:`whole_state` returned; of a sharded model, the state of the first process counts."""
    if not (is_sharded(model) and (part is model or isinstance(part, Optimizer))):
        # An optimizer would go on with the tensors of the state, and change them.
        part.load_state_dict(copy.deepcopy(state) if isinstance(part, Optimizer) else state)
        return
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if part is model:
        dcp.set_model_state_dict(model, dict(state), options=options)
    else:
        inner: Any = getattr(part, "optimizer", part)
        dcp.set_optimizer_state_dict(model, inner, dict(state), options=options)
