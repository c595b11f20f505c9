"""Makes the default configuration of any model type tiny, by the names of its fields; the sizes of what is tiny."""

import dataclasses
import re
from collections.abc import Mapping

from transformers import CONFIG_MAPPING, PreTrainedConfig

WIDTH = 32
HEADS = 4
LAYERS = 2
VOCABULARY = 99
POSITIONS = 64
IMAGE = 32
PATCH = 8
WINDOW = 4
FIRST_WORD = 40  # smaller token ids may be special ones
# Of what a model is given.
BATCH = 2
LENGTH = 7
TARGET = 5
PADDED = 2  # tokens at the end of the second sample
FRAMES = 40  # of a spectrogram
SAMPLES = 2000  # of a sound
GRID = 4  # patches on each side of an image that is handed over in patches

HEAD_COUNT = r"heads$|^(n|num)_head$|_heads_"
# The first pattern that is found in a field's name gives the most that its number may be (None: as it is).
LIMITS = [
    (r"sampl(e|ing)_rate|^hop_length|stride|^input_dim$|input_feat|num_channels$", None),
    (r"type_vocab|max_sequence_length|num_labels|token_len", None),
    (r"_theta|_freq|scal(e|ing)|ratio|factor|temperature|timestep|kernel|_idx|_index", None),
    (r"mel_bins", 16),
    (r"max_(source|target)_positions", 20),
    (r"codebook_size", 64),
    (r"num_pos_feats", WIDTH // 2),
    (r"vocab(ulary)?(_size)?$|^vocab|num_embeddings|num_codevectors", VOCABULARY),
    (r"(mamba|ssm)\w*heads", 8),
    (r"^rotary_dim$", 4),
    (r"(key_value|kv)_(attention_)?heads|n_kv_heads", 2),
    (r"head_dim$|d_kv|dim_head|d_head|attention_head_size|head_size$|qk_\w+_dim", WIDTH // HEADS),
    (HEAD_COUNT, HEADS),
    (r"first_k_dense", 1),
    (r"layers?$|num_(.*_)?blocks|^depths?$|n_layers?$|layers_per|depth$", LAYERS),
    (r"experts_per_tok|top_?k|n_group$|num_group$|moe_k$|num_selected", 2),
    (r"experts?$", 4),
    (r"position(s|al)?(_embeddings)?$|n_ctx|context_length|max_seq_len|^seq_len|max_length", POSITIONS),
    (r"image_size|img_size|^input_size$", IMAGE),
    (r"^patch_sizes?$", PATCH),
    (r"sliding_window|window_size$|local_attention|attention_window", WINDOW),
    (r"intermediate|ffn_dim|ffn_size|d_ff|mlp_dim|feed_?forward|inner", 48),
    (r"rank$", 16),
    (r"upsample_groups|_features$", WIDTH),
    (r"hidden|dim|channels?$|size$|width|n_embd|d_model|filters|units|emb_", WIDTH),
    (r"num_queries|num_latents|num_query|num_denoising|num_detection_tokens|max_num", 10),
]

# Whatever would make two runs of the same model differ.
RANDOM = re.compile(r"drop(?!less)|jitter|(time|feature)_prob$|noise")
# A cache or a spectrogram's mask is of no use to one pass in training mode.
SWITCHED_OFF = {"use_cache", "apply_spec_augment"}
SPECIAL = re.compile(r"token_id|token_index|_token$|(pad|bos|eos|sep|cls|unk|mask)_(index|id)$")
PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)$")
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
# A hybrid's layers without it are no use to look for attention in: it comes last, as some models want.
ATTENDING = ("indexed_attention", "hybrid", "full_attention", "sparse")
KEPT = set(PreTrainedConfig().to_dict()) - {"use_cache"}  # not a dataclass in transformers 5.0


def shrink(config, changes):
    """A tiny configuration of the same class.

    ``changes`` are what else differs, by model type, and apply to the configurations inside as well; they may hold a
    dictionary for one of those, which goes before what its own type says and may name another ``model_type``.
    """
    return _shrink(config, changes, {}, {})


def _shrink(config, table, here, tokens):
    values = {}
    changes = {**table.get(config.model_type, {}), **here}
    for field in dataclasses.fields(config):
        # Not by getattr, which refuses what may differ from layer to layer.
        value = vars(config).get(config.attribute_map.get(field.name, field.name), field.default)
        change = changes.get(field.name)
        if isinstance(change, Mapping) and "model_type" in change:
            value = CONFIG_MAPPING[change["model_type"]]()
        if isinstance(value, PreTrainedConfig) and (change is None or isinstance(change, Mapping)):
            values[field.name] = _shrink(value, table, change or {}, tokens)
        elif field.name in changes:
            continue
        elif SPECIAL.search(field.name):
            values[field.name] = _token(field.name, value, tokens)
        elif field.name in KEPT or (field.default is None and value is not None):
            continue  # what is left out by default is derived from the other fields
        elif (small := _small(field.name, value)) != field.default:
            values[field.name] = small
    values |= _outputs(config, values)
    if values.get("kv_lora_rank"):
        values["num_key_value_heads"] = HEADS  # a latent is not shared by groups of heads
    own = {name: change for name, change in changes.items() if not isinstance(values.get(name), PreTrainedConfig)}
    own.pop("model_type", None)
    made = type(config)(**{**values, **_kinds(config), **own})
    for each in [made, *(vars(made).get(name) for name in made.sub_configs)]:
        if getattr(each, "use_cache", False):
            each.use_cache = False  # some turn it on again in what is inside of them
    return made


def _small(name, value):
    if name in SWITCHED_OFF:
        return False if value is not None else None
    if isinstance(value, (list, tuple)):
        return type(value)(_small(name, each) for each in value)
    if name == "head_dim" and value is None:
        return WIDTH // HEADS
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if RANDOM.search(name):
        return type(value)(0)
    if name == "initializer_range":
        return max(value, 0.01)  # with next to nothing for weights, nothing can be seen of what they do
    limit = next((most for pattern, most in LIMITS if re.search(pattern, name)), None)
    if limit is None or isinstance(value, float):
        return value
    if re.search(HEAD_COUNT, name) and value == 3:
        return 2  # the width is no multiple of three
    return min(value, limit)


def _token(name, value, tokens):
    """A small id for a special token, the same one wherever its name stands in a model's configurations."""
    if isinstance(value, (list, tuple)):
        return type(value)(_token(f"{name}{i or ''}", each, tokens) for i, each in enumerate(value))
    if value is None and not PLACEHOLDER.match(name):
        return None
    if isinstance(value, bool) or (isinstance(value, int) and value < 10):
        return value
    return tokens.setdefault(name, 10 + len(tokens))


def _outputs(config, values):
    """For a backbone, as many of its outputs as there were: its last ones."""
    wanted = vars(config).get("_out_indices")
    if not wanted:
        return {}
    stages = len(vars(config).get("stage_names", [])) - 1
    if stages != vars(config).get("num_hidden_layers"):
        return {"out_indices": list(wanted)}
    count = max(LAYERS, len(wanted))
    return {"num_hidden_layers": count, "out_indices": list(range(count + 1))[-len(wanted) :]}


def _kinds(config):
    """A layer of each kind of layers, and full attention last."""
    fields = {field.name for field in dataclasses.fields(config)}
    kinds = {}
    for name in KINDS:
        if name in fields and isinstance(vars(config).get(name), (list, tuple)):
            found = list(dict.fromkeys(vars(config)[name]))
            kinds[name] = sorted(found, key=lambda kind: kind in ATTENDING and 1 + ATTENDING.index(kind))
    length = max([LAYERS, *map(len, kinds.values())])
    for name, found in kinds.items():
        kinds[name] = [*found[:1] * (length - len(found)), *found]
    if kinds and length > LAYERS:
        for name in ("num_hidden_layers", "num_layers"):
            if name in fields:
                kinds[name] = length
    return kinds
