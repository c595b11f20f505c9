"""What a Generator reads of images: one vector for each patch, as Vision Transformers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnreg.errors import InputError
from attnreg.injection import discover, undisturbed
from attnreg.injection.discovery.blocks import Block
from attnreg.injection.discovery.example_inputs import example_inputs as make_example_inputs


class PatchTokens(nn.Module):
    """A learned vector for each token before the patches, then a linear map of each patch, row by row.

    Args:
        hidden_size: the width d of a vector.
        patch: channels, height and width of a patch.
        before: number of tokens before the patches, such as the class token.

    Shape:
        images ``(B, C, height, width)`` give ``(B, N, d)``.
    """

    def __init__(self, hidden_size: int, patch: Sequence[int], before: int) -> None:
        super().__init__()
        channels, height, width = patch
        self.projection = nn.Conv2d(channels, hidden_size, (height, width), stride=(height, width))
        self.before = nn.Parameter(0.02 * torch.randn(before, hidden_size))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return one state per patch, ``(B, T, C)``, after those that stand before the patches."""
        patches = self.projection(pixels.to(self.before.dtype)).flatten(2).transpose(1, 2)
        return torch.cat([self.before.expand(len(patches), -1, -1).to(patches.dtype), patches], 1)


class ImageInputs:
    """Reads images from a model's inputs. No position is padding.

    Args:
        patch: channels, height and width of a patch.
        before: number of tokens before the patches.
        max_length: largest number of tokens.
    """

    def __init__(self, patch: Sequence[int], before: int, max_length: int) -> None:
        self.patch, self.before, self.max_length = patch, before, max_length

    def read(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the images, ``(B, C, height, width)``."""
        pixels = _image_in(inputs)
        if pixels is None or pixels.shape[1:2] != (self.patch[0],):
            shape = "none" if pixels is None else tuple(pixels.shape)
            raise InputError(
                f"Expected images of {self.patch[0]} channels, which this G-Net reads, as `pixel_values`, got {shape}."
            )
        if (length := self._length(pixels)) > self.max_length:
            raise InputError(
                f"Expected images of at most {self.max_length} tokens, got {length}: resize them, or make the G-Net "
                "with a larger `max_length`."
            )
        return pixels

    def allowed(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return which positions attention allows, bool, ``(B, N, N)``: all."""
        pixels = self.read(inputs)
        length = self._length(pixels)
        return torch.ones((), dtype=torch.bool, device=pixels.device).expand(len(pixels), length, length)

    def _length(self, pixels: Tensor) -> int:
        return self.before + _count(pixels, *self.patch[1:])


class Patches(NamedTuple):
    """How a model cuts images into tokens.

    Args:
        projection: the convolution that maps a patch to a vector.
        before: number of tokens before the patches.
        length: number of all tokens, N.
        num_layers: number of layers.
        positions: its position embeddings, N vectors, if it has any.
    """

    projection: nn.Conv2d
    before: int
    length: int
    num_layers: int
    positions: Tensor | None


def patches_of(model: nn.Module, example_inputs: Any = None) -> Patches:
    """Find out how a Vision Transformer cuts images into tokens.

    Args:
        model: the model.
        example_inputs: as in :func:`attnreg.attach`.

    Raises:
        InputError: if its tokens are not the patches of one convolution, perhaps after others such as a class token.
        NoAttentionError: if no attention is found in the model.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    first, found = convolutions[0], discover(model, example_inputs)
    is_cut = (
        len(convolutions) == 1
        and first.kernel_size == first.stride
        and first.groups == 1
        and first.padding in ((0, 0), "valid")
    )
    given = make_example_inputs(model) if example_inputs is None else [example_inputs]
    images = next((image for each in given if (image := _image_in(each)) is not None), None)
    shapes = {site.layout.sizes(site.sighting.shape) for site in found.sites if site.info.stack == "encoder"}
    sizes = {(batch, queries, keys) for batch, _, queries, keys in shapes}
    batch, length, keys = sizes.pop() if len(sizes) == 1 else (0, 0, 0)
    patches = 0 if images is None else _count(images, *first.kernel_size)
    if not is_cut or images is None or (batch, keys) != (len(images), length) or length < patches:
        raise InputError(
            f"G-Net reads equal patches of an image, one for each token, which {type(model).__name__} does not have: "
            "use another provider, or a Vision Transformer such as ViT."
        )
    example = next(each for each in given if _image_in(each) is not None)
    block = found.sites[0].block
    if block is None or not _in_order(model, block, example, first.kernel_size, length - patches):
        raise InputError(
            "G-Net reads the patches of an image row by row, after all other tokens, but "
            f"{type(model).__name__} has them in another order: use another provider."
        )
    width = first.out_channels
    positions = next(
        (
            parameter.detach().reshape(length, width)
            for name, parameter in model.named_parameters()
            if "pos" in name and parameter.numel() == length * width
        ),
        None,
    )
    return Patches(first, length - patches, length, found.sites[0].info.num_layers, positions)


def _in_order(model: nn.Module, block: Block, example: Any, patch: Sequence[int], before: int) -> bool:
    """Whether each patch of an image changes the token in its place, and no other, where tokens enter a block."""
    images = _image_in(example)
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

    hook = block.module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with undisturbed(model), torch.no_grad():
            run(images)
            for row, column in corners:
                other = images.clone()
                other[..., row * height : (row + 1) * height, column * width : (column + 1) * width] += 1.0
                run(other)
    finally:
        hook.remove()
    plain, *changed = entered
    places = [(states != plain).any(-1).any(0).flatten().nonzero().flatten().tolist() for states in changed]
    return places == [[before + row * columns + column] for row, column in corners]


def _image_in(inputs: Any) -> Tensor | None:
    """Return the images among a model's inputs, ``(B, C, height, width)``."""
    values = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    named = inputs.get("pixel_values") if isinstance(inputs, Mapping) else None
    images = (v for v in (named, *values) if isinstance(v, Tensor) and v.is_floating_point() and v.dim() == 4)
    return next(images, None)


def _count(images: Tensor, height: int, width: int) -> int:
    """Return the number of patches of an image."""
    return (images.shape[-2] // height) * (images.shape[-1] // width)
