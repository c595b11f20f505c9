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
    """Return the parameters of a model by level: below the blocks, then block by block, then above the blocks.

    A module is below if it runs before the first block, such as embeddings and their normalization, or only lends
    its weights, such as DeBERTa's relative positions. A module is above if it runs later, or is outside of
    ``model.base_model``, such as a new head.
    """
    discovery = discover(model)
    blocks = blocks_of(model, discovery)
    level_of = {module: number for number, block in enumerate(blocks, 1) for module in block.modules()}
    base = set(base_of(model).modules())
    order = {module: number for number, module in enumerate(discovery.called)}
    first = min(order[block] for block in blocks if block in order)
    levels: list[list[nn.Parameter]] = [[] for _ in range(len(blocks) + 2)]
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        is_below = owner in base and order.get(owner, -1) < first
        levels[level_of.get(owner, 0 if is_below else len(blocks) + 1)].append(parameter)
    return levels


def blocks_of(model: nn.Module, discovery: Discovery | None = None) -> list[nn.Module]:
    """Return the Transformer blocks of a model, from bottom to top.

    Blocks have no single order if they are in several lists (encoder and decoder, stages of an image model, two
    towers), they share weights (ALBERT), or attention runs outside of blocks.
    """
    discovery = discovery or discover(model)
    sites = [site for site in discovery.sites if site.info.stack != "cross"]
    names = {}  # names of lists of blocks, in the order in which they run
    for site in sites:
        if site.block is None or site.block.module is model:
            raise _no_order(model, f"{site.info.name} is in no list of blocks")
        if site.block.index:
            raise _no_order(model, f"{discovery.names[site.block.module]} runs more than once")
        names[discovery.names[site.block.module].rpartition(".")[0]] = True
    if len(names) != 1:
        raise _no_order(model, f"they are in {len(names)} lists, {', '.join(names)}" if names else "it has none")
    blocks = list(model.get_submodule(*names).children())
    called = [module for module in discovery.called if module in set(blocks)]
    if called != [block for block in blocks if block in set(called)]:
        raise _no_order(model, "they do not run in the order of their list")
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    if len(set(parameters)) < len(parameters):
        raise _no_order(model, "they share weights")
    return blocks


def _no_order(model: nn.Module, reason: str) -> InputError:
    return InputError(
        f"The blocks of {type(model).__name__} have no single order from bottom to top, because {reason}: train "
        "without layer-wise decay and re-initialized layers."
    )
