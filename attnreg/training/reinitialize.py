"""Re-initialize the top of a pretrained model."""

from __future__ import annotations

from torch import Tensor, nn, no_grad

from attnreg.arguments import Count, whole_number
from attnreg.errors import InputError
from attnreg.training.levels import blocks_of

_FLAG = "_is_hf_initialized"  # transformers does not initialize what carries it


@no_grad()
def reinitialize_top(model: nn.Module, layers: Count) -> list[str]:
    """Re-initialize the top blocks and the pooler of a pretrained model, as a new model of its class would be.

    Call it before you make the optimizer. The values are drawn from torch's global generator.

    Args:
        model: a transformers model, whose ``_init_weights`` initializes them.
        layers: number of blocks, counted from the top.

    Returns:
        the names of the modules.

    Raises:
        InputError: if the model has no ``_init_weights`` or it leaves a matrix as it is, ``layers`` is more than the
            number of blocks, or their order is not known. The model is
            unchanged then.

    Reference:
        Zhang et al., Revisiting Few-sample BERT Fine-tuning (ICLR 2021, arXiv 2006.05987), Section 5. What is
        initialized is that of the authors' code.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=3, num_attention_heads=2)
        >>> reinitialize_top(BertForSequenceClassification(config), 1)
        ['bert.encoder.layer.2', 'bert.pooler']
    """
    blocks = blocks_of(model)
    if whole_number("layers", layers) > len(blocks):
        raise InputError(f"{type(model).__name__} has {len(blocks)} blocks, too few to re-initialize {layers}.")
    initialize = getattr(model, "_init_weights", None)
    if not callable(initialize):
        raise InputError(f"{type(model).__name__} has no `_init_weights`, which transformers models initialize by.")
    pooler = getattr(getattr(model, "base_model", model), "pooler", None)
    parts = [*blocks[-layers:], *([pooler] if isinstance(pooler, nn.Module) else [])]
    tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    before = [tensor.clone() for tensor in tensors]
    flags = [vars(tensor).pop(_FLAG, None) for tensor in tensors]
    for part in parts:
        part.apply(initialize)
    for tensor, flag in zip(tensors, flags, strict=True):
        if flag is not None:
            setattr(tensor, _FLAG, flag)
    names = {module: name for name, module in model.named_modules()}
    left = [tensor for tensor, old in zip(tensors, before, strict=True) if _is_weight(tensor) and tensor.equal(old)]
    if left:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        name = next(name for name, parameter in model.named_parameters() if parameter is left[0])
        raise InputError(f"`_init_weights` of {type(model).__name__} does not initialize {name}.")
    return [names[part] for part in parts]


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.dim() > 1
