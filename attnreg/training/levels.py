"""The levels of a model: embeddings, its blocks from bottom to top, and all above them."""

from __future__ import annotations

from torch import nn

from attnreg.errors import InputError
from attnreg.injection import Discovery, discover


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the Transformer blocks of a model, from bottom to top.

    Args:
        model: any model that :func:`attnreg.attach` can find the attention of.

    Raises:
        NoAttentionError: if no attention is found.
        InputError: if the blocks have no single order: there are several lists of them (encoder and decoder, stages of
            an image model, two towers), they share weights (ALBERT), or attention runs outside of them.

    Example:
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
        >>> [block is layer for block, layer in zip(blocks_of(model), model.layers)]
        [True, True, True]
    """
    return _blocks(model, discover(model))


def levels_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of a model by level: first those below the blocks, then each block, then all above.

    What runs before the first block is below, such as embeddings and their normalization, and so is what only lends
    its weights, such as DeBERTa's relative positions. What runs after it is above, as is all outside of
    ``model.base_model``, such as a new head.

    Raises:
        InputError: see :func:`blocks_of`.

    Example:
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, nn.LayerNorm(8))
        >>> [len(level) for level in levels_of(model)]
        [0, 12, 12, 12, 2]
    """
    found = discover(model)
    blocks = _blocks(model, found)
    level_of = {module: number for number, block in enumerate(blocks, 1) for module in block.modules()}
    base = getattr(model, "base_model", model)
    within = set(base.modules() if isinstance(base, nn.Module) else model.modules())
    order = {module: number for number, module in enumerate(found.called)}
    first = min(order[block] for block in blocks if block in order)
    levels: list[list[nn.Parameter]] = [[] for _ in range(len(blocks) + 2)]
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        below = owner in within and order.get(owner, -1) < first
        levels[level_of.get(owner, 0 if below else len(blocks) + 1)].append(parameter)
    return levels


def _blocks(model: nn.Module, found: Discovery) -> list[nn.Module]:
    sites = [site for site in found.sites if site.info.stack != "cross"]
    names = {}  # of lists, in the order in which they run
    for site in sites:
        if site.block is None or site.block.module is model:
            raise _unknown(model, f"{site.info.name} is in no list of blocks")
        if site.block.call:
            raise _unknown(model, f"{found.names[site.block.module]} runs more than once")
        names[found.names[site.block.module].rpartition(".")[0]] = True
    if len(names) != 1:
        raise _unknown(model, f"they are in {len(names)} lists, {', '.join(names)}" if names else "it has none")
    blocks = list(model.get_submodule(*names).children())
    ran = [module for module in found.called if module in set(blocks)]
    if ran != [block for block in blocks if block in set(ran)]:
        raise _unknown(model, "they do not run in the order of their list")
    seen: set[int] = set()
    for block in blocks:
        own = {id(parameter) for parameter in block.parameters()}
        if own & seen:
            raise _unknown(model, "they share weights")
        seen |= own
    return blocks


def _unknown(model: nn.Module, reason: str) -> InputError:
    return InputError(
        f"The blocks of {type(model).__name__} have no single order from bottom to top, because {reason}: train "
        "without layer-wise decay and re-initialized layers."
    )
