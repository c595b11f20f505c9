"""What a Generator takes over from a model: its sizes, and the embeddings to begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnreg.attendout.network import image_in, number_of_patches
from attnreg.errors import InputError
from attnreg.injection import discover, undisturbed
from attnreg.injection.discovery.blocks import ModuleCall
from attnreg.injection.discovery.example_inputs import example_inputs as make_example_inputs
from attnreg.sites import SiteInfo


class Measured(NamedTuple):
    """What a Generator takes over from a model."""

    sizes: dict[str, Any]  # arguments of the G-Net
    weights: Mapping[str, Tensor]  # of its network, by name
    device: torch.device
    heads: int | None  # of each layer that it masks; None if they differ

    def number(self, name: str, number: int | str) -> int:
        """Return an argument that is a number, or "heads" for the number of heads."""
        if not isinstance(number, str):
            return number
        if number != "heads":
            raise InputError(f"Expected `{name}` to be a whole number or 'heads', got {number!r}.")
        if self.heads is None:
            raise InputError(f"Expected `{name}` to be a number, because the layers of this model differ in heads.")
        return self.heads


def measured(model: nn.Module, example_inputs: Any) -> Measured:
    """Measure a model that takes token ids, or a Vision Transformer."""
    try:
        tokens, positions, offset = embedding_tables(model)
    except InputError:
        if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
            raise
        return _of_images(model, example_inputs)
    found = [site.info for site in discover(model, example_inputs).sites]
    stack = "encoder" if any(site.stack == "encoder" for site in found) else "decoder"
    sites = [site for site in found if site.stack == stack]
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    sizes = {
        "vocab_size": tokens.weight.shape[0],
        "hidden_size": tokens.weight.shape[1],
        "num_layers": max((site.num_layers for site in sites), default=0),
        "max_length": 512 if positions is None else positions.weight.shape[0] - offset,
        "causal": stack == "decoder",
        "position_offset": offset,
        "pad_token_id": None if padding is None or padding < 0 else padding,
    }
    weights: dict[str, Tensor] = {"tokens.weight": tokens.weight}
    weights |= {} if positions is None else {"positions.weight": positions.weight}
    return Measured(sizes, weights, tokens.weight.device, _heads_of(model, sites))


def _of_images(model: nn.Module, example_inputs: Any) -> Measured:
    """Measure a Vision Transformer, whose tokens must be the patches of one convolution, perhaps after other tokens."""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    projection, found = convolutions[0], discover(model, example_inputs)
    is_cut = len(convolutions) == projection.groups == 1 and projection.kernel_size == projection.stride
    is_cut = is_cut and projection.padding in ((0, 0), "valid")
    given = make_example_inputs(model) if example_inputs is None else [example_inputs]
    example = next((each for each in given if image_in(each) is not None), None)
    images = None if example is None else image_in(example)
    sites = [site for site in found.sites if site.info.stack == "encoder"]
    shapes = (site.layout.sizes(site.sighting.shape) for site in sites)
    sizes = {(batch, queries, keys) for batch, _, queries, keys in shapes}
    batch, length, keys = sizes.pop() if len(sizes) == 1 else (0, 0, 0)
    patches = 0 if images is None else number_of_patches(images, *projection.kernel_size)
    if not is_cut or images is None or (batch, keys) != (len(images), length) or length < patches:
        raise InputError(
            f"G-Net reads equal patches of an image, one for each token, which {type(model).__name__} does not have: "
            "use another provider, or a Vision Transformer such as ViT."
        )
    before, block = length - patches, found.sites[0].block
    if block is None or not _in_order(model, block, example, projection.kernel_size, before):
        raise InputError(
            "G-Net reads the patches of an image row by row, after all other tokens, but "
            f"{type(model).__name__} has them in another order: use another provider."
        )
    width = projection.out_channels
    weights: dict[str, Tensor] = {f"tokens.projection.{name}": each for name, each in projection.named_parameters()}
    for name, parameter in model.named_parameters():
        if "pos" in name and parameter.numel() == length * width:
            weights.setdefault("positions.weight", parameter.reshape(length, width))
    arguments = {
        "vocab_size": before,
        "hidden_size": width,
        "num_layers": found.sites[0].info.num_layers,
        "max_length": length,
        "patch": [projection.in_channels, *projection.kernel_size],
    }
    return Measured(arguments, weights, projection.weight.device, _heads_of(model, [each.info for each in sites]))


def _heads_of(model: nn.Module, sites: Sequence[SiteInfo]) -> int | None:
    known = {site.heads for site in sites if site.heads is not None}
    return known.pop() if len(known) == 1 else getattr(getattr(model, "config", None), "num_attention_heads", None)


def embedding_tables(model: nn.Module) -> tuple[nn.Embedding, nn.Embedding | None, int]:
    """Find a model's token embeddings, its absolute position embeddings, and the index of the first position."""
    tables = {name: module for name, module in model.named_modules() if _is_table(module)}
    tokens: Any = None
    if not hasattr(model, "get_input_embeddings"):
        tokens = next((table for name, table in tables.items() if not _is_position(name)), None)
    else:
        with suppress(NotImplementedError):  # raised by transformers' models that have none
            tokens = model.get_input_embeddings()  # type: ignore[operator]
    if not _is_table(tokens):
        why = "takes no token ids, or has no single embedding table for them, which G-Net needs"
        raise InputError(f"{type(model).__name__} {why}: use another provider.")
    around = next((name for name, table in tables.items() if table is tokens), "").rpartition(".")[0]
    width = tokens.weight.shape[1]
    near = (table for name, table in tables.items() if _is_position(name) and _is_beside(name, around))
    positions = next((table for table in near if table.weight.shape[1] == width), None)
    if positions is None:
        return tokens, None, 0
    first = -1 if positions.padding_idx is None else positions.padding_idx
    return tokens, positions, getattr(positions, "offset", first + 1)


def _is_table(module: Any) -> bool:
    """Whether a module is an embedding, perhaps not torch's own (I-BERT's)."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and hasattr(module, "padding_idx")


def _is_position(name: str) -> bool:
    last = name.rpartition(".")[2]
    return "position" in last or last == "wpe"


def _is_beside(name: str, around: str) -> bool:
    """Whether a table is inside or above the module around another, and not, say, in a model's image encoder."""
    own = name.rpartition(".")[0]
    return not around or f"{name}.".startswith(f"{around}.") or not own or f"{around}.".startswith(f"{own}.")


def _in_order(model: nn.Module, block: ModuleCall, example: Any, patch: Sequence[int], before: int) -> bool:
    """Whether each patch of an image changes the token in its place, and no other, where tokens enter a block."""
    images = image_in(example)
    assert images is not None
    (height, width), columns = patch, images.shape[-1] // patch[1]
    corners = [(0, 0), (0, columns - 1), (images.shape[-2] // height - 1, columns - 1)]
    entered: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append((args[0] if args else kwargs[block.first]).detach())

    def run(other: Tensor) -> None:
        if isinstance(example, Mapping):
            model(**{name: other if value is images else value for name, value in example.items()})
        else:
            model(*(other if value is images else value for value in example))

    with block.module.register_forward_pre_hook(note, with_kwargs=True), undisturbed(model), torch.no_grad():
        run(images)
        for row, column in corners:
            other = images.clone()
            other[..., row * height : (row + 1) * height, column * width : (column + 1) * width] += 1.0
            run(other)
    plain, *changed = entered
    places = [(states != plain).any(-1).any(0).flatten().nonzero().flatten().tolist() for states in changed]
    return places == [[before + row * columns + column] for row, column in corners]
