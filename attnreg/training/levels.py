"""The levels of a model: embeddings, its blocks from bottom to top, and all above them."""

from __future__ import annotations

from torch import nn

from attnreg.errors import InputError
from attnreg.injection import Discovery, discover


def base_of(model: nn.Module) -> nn.Module:
    """Return the model without its head, its ``base_model``; the model itself if it has none."""
    base = getattr(model, "base_model", model)
    return base if isinstance(base, nn.Module) else model


def levels_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of a model by level: first those below the blocks, then each block, then all above.

    What runs before the first block is below, such as embeddings and their normalization, and so is what only lends
    its weights, such as DeBERTa's relative positions. What runs after it is above, as is all outside of
    ``model.base_model``, such as a new head.
    """
    discovery = discover(model)
    blocks = blocks_of(model, discovery)
    level_of = {module: number for number, block in enumerate(blocks, 1) for module in block.modules()}
    within = set(base_of(model).modules())
    order = {module: number for number, module in enumerate(discovery.called)}
    first = min(order[block] for block in blocks if block in order)
    levels: list[list[nn.Parameter]] = [[] for _ in range(len(blocks) + 2)]
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        below = owner in within and order.get(owner, -1) < first
        levels[level_of.get(owner, 0 if below else len(blocks) + 1)].append(parameter)
    return levels


def blocks_of(model: nn.Module, discovery: Discovery | None = None) -> list[nn.Module]:
    """Return the Transformer blocks of a model, from bottom to top.

    They have no single order if there are several lists of them (encoder and decoder, stages of an image model, two
    towers), they share weights (ALBERT), or attention runs outside of them.
    """
    discovery = discovery or discover(model)
    sites = [site for site in discovery.sites if site.info.stack != "cross"]
    names = {}  # of lists, in the order in which they run
    for site in sites:
        if site.block is None or site.block.module is model:
            raise _unknown(model, f"{site.info.name} is in no list of blocks")
        if site.block.index:
            raise _unknown(model, f"{discovery.names[site.block.module]} runs more than once")
        names[discovery.names[site.block.module].rpartition(".")[0]] = True
    if len(names) != 1:
        raise _unknown(model, f"they are in {len(names)} lists, {', '.join(names)}" if names else "it has none")
    blocks = list(model.get_submodule(*names).children())
    ran = [module for module in discovery.called if module in set(blocks)]
    if ran != [block for block in blocks if block in set(ran)]:
        raise _unknown(model, "they do not run in the order of their list")
    owned = [parameter for block in blocks for parameter in block.parameters()]
    if len(set(owned)) < len(owned):
        raise _unknown(model, "they share weights")
    return blocks


def _unknown(model: nn.Module, reason: str) -> InputError:
    return InputError(
        f"The blocks of {type(model).__name__} have no single order from bottom to top, because {reason}: train "
        "without layer-wise decay and re-initialized layers."
    )
