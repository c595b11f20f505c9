"""Keyword arguments of one forward pass, by the names of a model's parameters."""

import inspect

import torch
from torch import Tensor

from tests.sweep.shrink import (
    BATCH,
    FIRST_WORD,
    FRAMES,
    GRID,
    IMAGE,
    LENGTH,
    PADDED,
    PATCH,
    SAMPLES,
    TARGET,
    VOCABULARY,
)

IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_index")
AUDIO_TOKENS = ("audio_token_id", "audio_token_index")


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def whole(low, high, *shape):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))


def field(model, *names, default=None):
    """The first of these fields that the model's configuration, or else one inside it, has."""
    configs = [model.config]
    for config in configs:
        for name in names:
            if (value := vars(config).get(config.attribute_map.get(name, name))) is not None:
                return value
        configs += [vars(config)[name] for name in config.sub_configs if vars(config).get(name) is not None]
    return default


def words(model, length=LENGTH):
    most = min(field(model, "vocab_size", default=VOCABULARY), VOCABULARY)
    return whole(min(FIRST_WORD, most // 2), most, BATCH, length)


def mask(length, padded=PADDED):
    """All of the first sample, and of the second all but its end."""
    kept = torch.ones(BATCH, length, dtype=torch.long)
    kept[1, length - padded :] = 0
    return kept


def _pair(size):
    return (size[0], size[1]) if isinstance(size, (list, tuple)) else (size, size)


def image(model, *before):
    """Images; ``before`` are dimensions between the batch's and the channels', such as a video's frames."""
    size = _pair(field(model, "image_size", default=IMAGE))
    return normal(BATCH, *before, field(model, "num_channels", "in_chans", default=3), *size)


def patches(model):
    """The patches of two images, one after the other."""
    patch = field(model, "patch_size", default=PATCH)
    times = field(model, "temporal_patch_size", "patch_temporal", default=1)
    return normal(BATCH * GRID**2, field(model, "num_channels", "in_channels", default=3) * times * patch**2)


def states(length=LENGTH, width="hidden_size"):
    """Vectors, as wide as a field of the configuration says."""
    return lambda model: normal(BATCH, length, getattr(model.config, width))


def grid(model):
    return torch.tensor([[1, GRID, GRID]] * BATCH)


def _boxes(model):
    corners = whole(0, 30, BATCH, LENGTH, 4)
    return torch.cat([corners[..., :2], corners[..., 2:] + 30], -1)


def bands(model):
    """Of a spectrogram."""
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "input_dim")
    return field(model, *names, default=32)


def spectrogram(model, frames=FRAMES):
    return normal(BATCH, bands(model), frames)


def _vectors(model):
    return normal(BATCH, LENGTH, field(model, "hidden_size", "d_model"))


# What a model always gets if it takes it, and what it gets if it has no default.
USUAL = {
    "input_ids": words,
    "decoder_input_ids": lambda model: words(model, TARGET),
    "pixel_values": image,
    "pixel_values_videos": image,
    "input_features": spectrogram,
    "input_values": lambda model: normal(BATCH, SAMPLES),
    "bbox": _boxes,
    "image_grid_thw": grid,
    "input_features_mask": lambda model: mask(FRAMES, FRAMES // 4),
    "image_sizes": lambda model: torch.tensor([_pair(field(model, "image_size", default=IMAGE))] * BATCH),
}
NEEDED = {
    **USUAL,
    "inputs_embeds": _vectors,
    "hidden_states": _vectors,
    "grid_thw": grid,
    "attention_mask": lambda model: mask(LENGTH),
}


def parameters(function):
    """A function's parameters, and whether each one must be given."""
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name: parameter.default is inspect.Parameter.empty
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in variadic
    }


def plain_inputs(model, counts=None, **given):
    """What is made for any model by the names alone, but for what is given; None: left out.

    ``counts`` are how many vectors stand for an ``"image"`` or an ``"audio"`` of a sample, if the model cannot tell.
    """
    taken = parameters(model.forward)
    made = {}
    for name, needed in taken.items():
        if name in given:
            made[name] = given[name]
        elif "grid_thw" in name and "image" not in name and not needed:
            continue
        elif name in ("pixel_values", "hidden_states") and taken.keys() & {"grid_thw", "image_grid_thw"}:
            made[name] = patches(model)
        elif name == "pixel_values_videos" and "pixel_values" in taken:
            continue
        elif name in (NEEDED if needed else USUAL):
            made[name] = NEEDED[name](model)
        elif needed:
            raise ValueError(f"{type(model).__name__} needs `{name}`")
    made = {name: value for name, value in {**made, **given}.items() if value is not None}
    if (
        made.keys() & {"input_ids", "attention_mask"} == set()
        and "attention_mask" in taken
        and "attention_mask" not in given
    ):
        if "input_features" in made:
            made["attention_mask"] = mask(FRAMES, FRAMES // 4)
        elif "input_values" in made:
            made["attention_mask"] = mask(SAMPLES, SAMPLES // 4)
    ids = made.get("input_ids")
    if ids is not None:
        if "input_features" in made and "input_features_mask" in taken:
            made["input_features_mask"] = given.get("input_features_mask", mask(FRAMES, 0))
        ids = made["input_ids"] = with_placeholders(model, made, counts or {})
        if "attention_mask" in taken:
            made["attention_mask"] = given.get("attention_mask", mask(ids.shape[1]))
        for name in taken.keys() & {"mm_token_type_ids", "token_type_ids"}:
            if "pixel_values" in made and (token := field(model, *IMAGE_TOKENS)) is not None:
                made[name] = (ids == token).long()
    return made


def given(**makers):
    """What is made by the names alone, but for these, which may be made from the model."""
    return lambda model: plain_inputs(model, **{name: _call(make, model) for name, make in makers.items()})


def only(**makers):
    """These and nothing else."""
    return lambda model: {name: _call(make, model) for name, make in makers.items()}


def _call(make, model):
    if isinstance(make, Tensor):
        return make.clone()  # the tables' own must survive a model that writes into what it is given
    return make(model) if callable(make) else make


def with_placeholders(model, made, counts):
    """The token ids, with a special token after the second word for each vector that stands for an image or a sound."""
    ids = made["input_ids"]
    for kind, names in (("image", IMAGE_TOKENS), ("audio", AUDIO_TOKENS)):
        token = field(model, *names)
        name = f"get_{kind}_features"
        encode = next((getattr(module, name) for module in model.modules() if hasattr(module, name)), None)
        taken = parameters(encode) if encode else {}
        own = {name: made[name] for name in made.keys() & taken.keys()}
        if kind in counts:
            count = counts[kind]
        elif token is not None and own and all(name in own for name, needed in taken.items() if needed):
            count = vectors(model, encode, own) // BATCH
        else:
            continue
        ids = torch.cat([ids[:, :2], ids.new_full((BATCH, count), token), ids[:, 2:]], 1)
    return ids


def vectors(model, encode, inputs):
    """How many vectors a model makes of its images or sounds."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        found = encode(**inputs)
    for module, training in modes.items():
        module.training = training
    pooled = getattr(found, "pooler_output", None)
    found = pooled if pooled is not None else getattr(found, "last_hidden_state", found)
    found = found if isinstance(found, (list, tuple)) else [found]
    return sum(each.numel() // each.shape[-1] for each in found)
