"""Make tiny inputs, to run a model once and find its attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

# Differs from the usual numbers of labels, heads and layers of tiny models, so that shapes identify tokens.
LENGTH = 7
SAMPLES = 2  # shows the order of samples and heads in a shared dimension
SIZE = 64  # pixels per side of an image, if the configuration gives none
FRAMES = 40  # frames of a spectrogram
SOUND = 4000  # samples of a waveform
CLIP = 2  # frames of a video

Inputs = dict[str, Any]


def example_inputs(model: nn.Module) -> list[Inputs]:
    """Make keyword arguments for one forward pass of a model on two samples: candidates, the most likely first.

    Covers torch's own Transformer modules, and transformers models whose inputs have usual names: token ids, images,
    videos, waveforms, spectrograms, text with one of these. The list is empty for other models.
    """
    # Made on the device, not moved to it: a moved tensor that is query, key and value would become three.
    like = next(model.parameters(), torch.empty(0))
    is_theirs = hasattr(model, "config") and hasattr(model, "main_input_name")
    with torch.device(like.device):
        found = list(_transformers_inputs(model) if is_theirs else _torch_inputs(model))
    # An input that is given twice stays one tensor.
    cast = {id(x): x.to(like.dtype) if x.is_floating_point() else x for inputs in found for x in inputs.values()}
    return [{name: cast[id(x)] for name, x in inputs.items()} for inputs in found]


def _transformers_inputs(model: nn.Module) -> Iterator[Inputs]:
    config: Any = model.config
    main = str(model.main_input_name)
    taken = inspect.signature(type(model).forward).parameters
    if main not in taken:  # a part of a model that names the input of the whole
        main = next((name for name in taken if name in FORMS), main)
    has_decoder = "decoder_input_ids" in taken or getattr(config, "is_encoder_decoder", False)
    target = {"decoder_input_ids": torch.arange(1, LENGTH).repeat(SAMPLES, 1)} if has_decoder else {}
    if main == "input_ids":
        yield {**_ids(), **target}
    for name in dict.fromkeys((main, *taken)):
        for form in FORMS.get(name, ()):
            with suppress(AttributeError, TypeError, ValueError, RuntimeError):  # the configuration is unusual
                made = form(config)
                made = {name: made} if isinstance(made, Tensor) else made
                if name == main:
                    yield {**made, **target}
                if "input_ids" in taken:
                    yield {**_ids(), **made, **target}


def _value(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of these fields that a configuration, or one nested in it, has."""
    waiting = [config]
    for each in waiting:  # grows during the loop
        for name in names:
            if (value := getattr(each, name, None)) is not None:
                return value
        waiting += [inner for inner in vars(each).values() if hasattr(inner, "model_type")]
    return default


def _ids() -> Inputs:
    # Token 0 is padding in many vocabularies, and position ids may count only tokens that are not padding.
    ids = torch.arange(1, LENGTH + 1).repeat(SAMPLES, 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _image(config: Any, *before: int) -> Tensor:
    size = _value(config, "image_size", default=SIZE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = _value(config, "num_channels", "in_channels", "in_chans", default=3)
    return torch.zeros(SAMPLES, *before, channels, height, width)


def _video(config: Any) -> Tensor:
    return _image(config, _value(config, "num_frames", "frames_per_clip", default=CLIP))


def _bands(config: Any) -> int:
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "input_dim")
    return _value(config, *names, default=80)


# The input of a name, or it and others that it needs, in the shapes that models accept.
FORMS: dict[str, tuple[Callable[[Any], Tensor | Inputs], ...]] = {
    "pixel_values": (_image, lambda config: _image(config, CLIP), _video),
    "pixel_values_videos": (lambda config: _image(config, CLIP), _video),
    "input_features": (
        lambda config: torch.zeros(SAMPLES, _bands(config), FRAMES),
        lambda config: torch.zeros(SAMPLES, FRAMES, _bands(config)),
        lambda config: torch.zeros(SAMPLES, 1, FRAMES, _bands(config)),
        # Whisper and similar models accept only one length.
        lambda config: torch.zeros(SAMPLES, _bands(config), 2 * config.max_source_positions),
    ),
    "input_values": (
        lambda config: torch.zeros(SAMPLES, SOUND),
        lambda config: torch.zeros(SAMPLES, 1, SOUND),
        lambda config: torch.zeros(SAMPLES, config.max_length, _bands(config)),
    ),
    "bbox": (lambda config: torch.zeros(SAMPLES, LENGTH, 4, dtype=torch.long),),
}


def _torch_inputs(model: nn.Module) -> Iterator[Inputs]:
    attention = next((m for m in model.modules() if isinstance(m, nn.MultiheadAttention)), None)
    if attention is None:
        return
    x = torch.zeros(SAMPLES, LENGTH, attention.embed_dim)
    if isinstance(model, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
        yield {"src": x}
    if isinstance(model, (nn.TransformerDecoder, nn.TransformerDecoderLayer)):
        yield {"tgt": x, "memory": x.clone()}
    if isinstance(model, nn.Transformer):
        yield {"src": x, "tgt": x.clone()}
    if isinstance(model, nn.MultiheadAttention):
        yield {"query": x, "key": x, "value": x}
