"""Where a provider belongs in the model of a Trainer."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from attnreg.errors import InputError
from attnreg.injection import AttachHandle, attach
from attnreg.regularizer.base import MaskProvider


def attach_in_trainer(model: nn.Module, provider: MaskProvider) -> AttachHandle:
    """Attach a provider to a Trainer's model: to all of it, or to the model of transformers that it wraps.

    Models of transformers and PEFT are taken as they are. Others, such as ``SentenceTransformer``, contain a model of
    transformers but take other inputs.

    Raises:
        InputError: if the model contains several models of transformers, so that the choice is the user's.
    """
    if isinstance(model, PreTrainedModel) or callable(getattr(model, "get_base_model", None)):  # of PEFT
        return attach(model, provider)
    inner: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(name.startswith(f"{outer}.") for outer in inner):
            inner[name] = module
    if len(inner) > 1:
        raise InputError(
            f"{type(model).__name__} contains {len(inner)} models: {', '.join(inner)}. Attach the provider to one of "
            "them with `attnreg.attach`, and pass the handle."
        )
    return attach(next(iter(inner.values()), model), provider)
