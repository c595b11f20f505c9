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
SIZE = 64  # pixels per side of an image, if the configuration has no size
FRAMES = 40  # frames of a spectrogram
SOUND = 4000  # samples of a waveform
CLIP = 2  # frames of a video

Inputs = dict[str, Any]


def example_inputs(model: nn.Module) -> list[Inputs]:
    """Make keyword arguments for one forward pass of a model on two samples: candidates, the most likely first.

    Covers torch's Transformer modules, and transformers models whose inputs have usual names: token ids, images,
    videos, waveforms, spectrograms, text with one of these. The list is empty for other models.
    """
    # Tensors are created on the device, because moving one that is query, key and value would make three of it.
    like = next(model.parameters(), torch.empty(0))
    from_transformers = hasattr(model, "config") and hasattr(model, "main_input_name")
    with torch.device(like.device):
        candidates = list(_transformers_inputs(model) if from_transformers else _torch_inputs(model))
    # A tensor that is the value of two arguments stays one tensor.
    cast = {id(x): x.to(like.dtype) if x.is_floating_point() else x for inputs in candidates for x in inputs.values()}
    return [{name: cast[id(x)] for name, x in inputs.items()} for inputs in candidates]


def whole_inputs(model: nn.Module) -> list[Inputs]:
    """Make candidates as :func:`example_inputs`, which also suit heads that need more than their backbone."""
    candidates, head = example_inputs(model), type(model).__name__
    config: Any = getattr(model, "config", None)
    if head.endswith("ForMultipleChoice"):
        return [{name: torch.stack([x, x], 1) for name, x in made.items()} for made in candidates]
    if head.endswith("ForSequenceClassification") and getattr(config, "is_encoder_decoder", False):
        for made in candidates:
            made.pop("decoder_input_ids", None)  # the decoder reads the same tokens
            made["input_ids"][:, -1] = config.eos_token_id  # whose state is classified
    return candidates


def _transformers_inputs(model: nn.Module) -> Iterator[Inputs]:
    config: Any = model.config
    main = str(model.main_input_name)
    parameters = inspect.signature(type(model).forward).parameters
    if main not in parameters:  # a part of a model may name the main input of the whole model
        main = next((name for name in parameters if name in FORMS), main)
    has_decoder = "decoder_input_ids" in parameters or getattr(config, "is_encoder_decoder", False)
    target = {"decoder_input_ids": torch.arange(1, LENGTH).repeat(SAMPLES, 1)} if has_decoder else {}
    if main == "input_ids":
        yield {**_ids(), **target}
    for name in dict.fromkeys((main, *parameters)):
        for form in FORMS.get(name, ()):
            with suppress(AttributeError, TypeError, ValueError, RuntimeError):  # the configuration is unusual
                value = form(config)
                inputs = {name: value} if isinstance(value, Tensor) else value
                if name == main:
                    yield {**inputs, **target}
                if "input_ids" in parameters:
                    yield {**_ids(), **inputs, **target}


def _value(config: Any, *names: str, default: Any = None) -> Any:
    """Return the value of the first of these fields that a configuration, or one nested in it, has."""
    waiting = [config]
    for candidate in waiting:  # grows during the loop
        for name in names:
            if (value := getattr(candidate, name, None)) is not None:
                return value
        waiting += [inner for inner in vars(candidate).values() if hasattr(inner, "model_type")]
    return default


def _ids() -> Inputs:
    # Token 0 is padding in many vocabularies, and position ids may count only tokens that are not padding.
    ids = torch.arange(1, LENGTH + 1).repeat(SAMPLES, 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _image(config: Any, *frames: int) -> Tensor:
    size = _value(config, "image_size", default=SIZE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = _value(config, "num_channels", "in_channels", "in_chans", default=3)
    return torch.zeros(SAMPLES, *frames, channels, height, width)


def _video(config: Any) -> Tensor:
    return _image(config, _value(config, "num_frames", "frames_per_clip", default=CLIP))


def _bands(config: Any) -> int:
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "input_dim")
    return _value(config, *names, default=80)


# By name: functions that make the input, or the input and others that it needs, in the shapes that models accept.
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
