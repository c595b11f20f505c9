"""Load the model of a task, and its tokenizer or image processor; warn where transformers silently fills gaps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from attnreg.errors import AttnRegWarning, InputError, listed, one_line
from attnreg.experiments.tasks import agreement
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.models.lora import adapter_base, saved_modules, with_adapter
from attnreg.experiments.tasks.models.place import located
from attnreg.experiments.tasks.models.pooling import POOLED, Pooling, pool, saved_pooling, usual_pooling
from attnreg.experiments.tasks.task import Task

_LENGTH = 64  # of a tiny model


class Loaded(NamedTuple):
    """A loaded model."""

    model: Any
    tokenizer: Any
    new: frozenset[str] | None  # names of weights that were not pretrained, such as a new head's; None if none were
    warnings: tuple[str, ...] = ()  # sentences on doubts whether the user meant this model


def load_model(task: Task, name: str | None = None, dropout: float | None = None) -> tuple[Any, Any]:
    """Load a model with a head for a task, and its tokenizer. A new head is initialized by torch's global generator.

    Args:
        task: the task.
        name: a folder, also one with an adapter of peft, or a hub name (default: the task's model).
        dropout: rate of the model's dropout (default: as in its configuration).

    Returns:
        the model and the tokenizer.

    Raises:
        InputError: if the model cannot be loaded, its architecture lacks the head that the task needs, it has no
            dropout to set, or its tokenizer is missing or does not fit.

    Warns:
        AttnRegWarning: if weights besides a head's are new or not used, or a classifier was trained on other classes.

    Example:
        >>> from attnreg.experiments.tasks import get_task
        >>> model, tokenizer = load_model(get_task("agreement"))
        >>> model(**tokenizer("the boys sleep", return_tensors="pt")).logits.shape
        torch.Size([1, 2])
    """
    loaded = load_pretrained(task, name, dropout)
    for sentence in loaded.warnings:
        warnings.warn(sentence, AttnRegWarning, stacklevel=2)
    return loaded.model, loaded.tokenizer


def load_pretrained(
    task: Task, name: str | None = None, dropout: float | None = None, pooling: Pooling | None = None
) -> Loaded:
    """Load a model as :func:`load_model` does; return its new weights and the warnings, too.

    ``pooling`` is as in :func:`pool` (default: that of the checkpoint).
    """
    import transformers
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.set_verbosity_error()  # a new head is intended, so transformers need not warn about it
    logging.disable_progress_bar()
    name = name or task.model
    kind = kind_class(task.kind)(task)
    if pooling is not None and kind.head != POOLED:
        raise InputError(f"--pooling is for heads that read one state of a text, but not for {task.name}: remove it.")
    if name is None:
        model, tokenizer = _tiny_model(task, dropout)
        pool(model, pooling or "own")
        return Loaded(model, tokenizer, None)
    if (base := adapter_base(name)) is not None:
        return _load_adapted(task, base, name, dropout, pooling)
    where = located(Path(name), "--model")
    try:
        reads_text = not kind.reads_images
        tokenizer = _load_processor(name, reads_text)
        kind.fit_tokenizer(tokenizer, name)
        config, head = transformers.AutoConfig.from_pretrained(name), getattr(transformers, kind.head)
        if type(config) not in head._model_mapping:
            architecture = f"the architecture of --model {name} ({config.model_type})"
            raise InputError(f"The task needs {kind.head}, which does not support {architecture}.")
        names = [str(config.id2label[number]) for number in sorted(config.id2label)]
        options = {**dropout_options(config, dropout, name), **kind.head_options()}
        # A head with another number of classes is replaced by a new one.
        model, info = head.from_pretrained(name, ignore_mismatched_sizes=True, output_loading_info=True, **options)
        # Marian's positions are constants that are not saved, but transformers 5.24 computes their gradients.
        for key in {*(model._keys_to_ignore_on_save or ())} & {key for key, _ in model.named_parameters()}:
            model.get_parameter(key).requires_grad_(False)
    except InputError:
        raise
    except (OSError, ValueError, ImportError, SafetensorError) as error:  # ImportError: a package that the model needs
        reason = f"its weights are damaged ({error})" if isinstance(error, SafetensorError) else one_line(error)
        raise InputError(f"Cannot load --model {name!r} ({where}): {reason}") from error
    if reads_text:
        _fit_together(model, tokenizer, name)
    kind.check_model(model, name)
    if kind.head == POOLED:
        usual = usual_pooling(config, name)
        pool(model, pooling or usual, usual)
    doubts = weight_warnings(model, info, name, kind.head_is_new)
    new = frozenset(info["missing_keys"]) | {mismatch[0] for mismatch in info["mismatched_keys"]}
    if kind.has_classes and not new and [*map(str.casefold, names)] != [*map(str.casefold, task.labels)]:
        theirs, ours = listed(names), listed(task.labels)
        doubts.append(f"the classifier of --model {name} is kept, but it was trained on {theirs}: they become {ours}.")
    return Loaded(model, tokenizer, new, tuple(doubts))


def _load_adapted(task: Task, base: str, name: str, dropout: float | None, pooling: Pooling | None) -> Loaded:
    """Load the model ``base`` with the adapter in the folder ``name``."""
    import transformers

    if pooling is None and (Path(name) / "config.json").is_file():  # of the trained model
        pooling = saved_pooling(transformers.AutoConfig.from_pretrained(name))
    try:
        loaded = load_pretrained(task, base, dropout, pooling)
    except InputError as error:
        raise InputError(f"Cannot load the model that the adapter in {name} belongs to: {error}") from error
    model = with_adapter(loaded.model, name)
    # The adapter also has the modules that were new in training, such as the head.
    new = frozenset(weight for weight in loaded.new or () if weight.rpartition(".")[0] not in saved_modules(model))
    return Loaded(model, loaded.tokenizer, new, loaded.warnings if new else ())


def _fit_together(model: Any, tokenizer: Any, name: str) -> None:
    """Give tokenizer and model the same padding token; raise if there is none, or if the model lacks tokens."""
    has_padding = tokenizer.pad_token is not None
    if not has_padding and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # GPT-like models have no padding token
    finds_last = hasattr(model, "score")  # GPT-like classifiers find the last token by the id of padding
    for config in (model.config, model.config.get_text_config()):  # models of text and images have one inside
        if getattr(config, "pad_token_id", None) is None or not has_padding or finds_last:
            config.pad_token_id = tokenizer.pad_token_id
    try:
        embedded = model.get_input_embeddings().num_embeddings
    except (NotImplementedError, AttributeError):
        embedded = math.inf  # CANINE has none: it hashes characters
    if tokenizer.pad_token is None or len(tokenizer) > embedded:
        raise InputError(
            f"The tokenizer of --model {name} needs a padding token and at most {embedded} tokens, as many "
            f"as the model embeds; got {len(tokenizer)} tokens, padding {tokenizer.pad_token!r}."
        )


def longest_input(model: nn.Module, max_length: int | None, usual: int) -> int:
    """Return a maximum input length, by default the usual one or what the position embeddings of a model allow.

    Raises:
        InputError: if ``max_length`` is more than the position embeddings allow.
    """
    limits = (getattr(model.config, name, 0) for name in ("max_position_embeddings", "max_seq_len"))  # MPT has the last
    limit = int(next(filter(None, limits), 0))
    tables = (m for name, m in model.named_modules() if name.endswith("position_embeddings"))
    table = next((m for m in tables if isinstance(m, nn.Embedding) or hasattr(m, "padding_idx")), None)  # I-BERT's
    if table is not None and table.padding_idx is not None:
        limit -= table.padding_idx + 1  # RoBERTa counts positions from there
    if max_length is None:
        return min(usual, limit) if limit > 0 else usual
    if 0 < limit < max_length:
        raise InputError(f"Expected --max-length of at most {limit} for this model, got {max_length}.")
    return max_length


def _load_processor(name: str, reads_text: bool) -> Any:
    """Load the tokenizer or image processor of a model, or raise where transformers makes an empty tokenizer."""
    import transformers

    noun = "tokenizer" if reads_text else "image processor"
    files = "tokenizer.json or vocab.txt" if reads_text else "preprocessor_config.json"
    try:
        loader: Any = transformers.AutoTokenizer if reads_text else transformers.AutoImageProcessor
        processor = loader.from_pretrained(name)
    except ImportError:  # a package is missing
        raise
    except Exception as error:  # the tokenizers library raises plain exceptions for broken files
        reason = f"{type(error).__name__}: {one_line(error)}"
        if not Path(name).is_dir():
            raise ValueError(reason) from error
    else:
        if not reads_text or _has_vocabulary(processor):
            return processor
        reason = "it has no vocabulary"
    raise InputError(
        f"Cannot load the {noun} of --model {name} ({reason}). Save the model's own {noun}, such as {files}, in this "
        "folder (`save_pretrained`)."
    )


def _has_vocabulary(tokenizer: Any) -> bool:
    """Whether a tokenizer has tokens besides the special ones, or needs none because it reads bytes or characters."""
    special = {*tokenizer.all_special_tokens, "▁"}  # sentencepiece's space, which an empty T5 tokenizer has
    return not tokenizer.vocab_files_names or bool(tokenizer.get_vocab().keys() - special)


def weight_warnings(model: nn.Module, info: Mapping[str, Any], name: str, head_is_new: bool = True) -> list[str]:
    """Return a sentence per kind of weights that should probably be read but are not; raise if none is read.

    A new head is not mentioned if it is usual (``head_is_new``), nor are unused weights of the checkpoint's head.
    ``info`` is the loading information of transformers.
    """
    prefix = str(getattr(model, "base_model_prefix", ""))
    # How the names of pretrained weights begin; T5 with a language-model head has no module around them.
    inside = (f"{prefix}.",) if hasattr(model, prefix) else ("shared.", "encoder.", "decoder.")
    other_sizes = [mismatch[0] for mismatch in info["mismatched_keys"]]
    new = {*info["missing_keys"], *other_sizes}
    # Nothing reads the model's pooler where another pooling replaces it.
    unread = () if saved_pooling(model.config) in (None, "own") else (f"{prefix}.pooler.",)
    pretrained = {key for key, _ in model.named_parameters() if key.startswith(inside)}
    if pretrained and pretrained <= new:
        others = sorted({*info["unexpected_keys"], *other_sizes})
        content = f"other names or sizes, such as {listed(others)}" if others else "none of them"
        raise InputError(f"No pretrained weight of --model {name} fits {type(model).__name__}: its file has {content}.")
    unused = _unused(model, info["unexpected_keys"], inside)
    doubts = {
        "lacks pretrained weights of the right size, which are newly initialized": [
            key for key in new if (not head_is_new or key.startswith(inside)) and not key.startswith(unread)
        ],
        "has weights for which its configuration has no place, so they are not used": unused,
    }
    modules = {doubt: sorted({key.rpartition(".")[0] or key for key in keys}) for doubt, keys in doubts.items()}
    return [f"--model {name} {doubt}: {listed(names)}." for doubt, names in modules.items() if names]


def _unused(model: nn.Module, keys: Iterable[str], inside: tuple[str, ...]) -> list[str]:
    """Return unused weights of modules that the backbone has; others, such as poolers, are left out on purpose."""
    modules, unused = dict(model.named_modules()), []
    for key in keys:
        whole = key if key.startswith(inside) else f"{inside[0]}{key}"
        known, _, leaf = whole.rpartition(".")
        while known and known not in modules:
            known = known.rpartition(".")[0]
        first, *further = whole[len(known) + 1 :].split(".")  # what the module lacks
        # Buffers of older versions, such as GPT-2's `attn.bias`, belong to no leaf module.
        is_leaf = not any(modules[known].children()) and any(True for _ in modules[known].parameters())
        if leaf in ("weight", "bias") and known.startswith(inside) and (further or is_leaf):
            unused.append(f"{known}.{first}." if further else whole)
    return unused


def _tiny_model(task: Task, dropout: float | None) -> tuple[Any, Any]:
    """Create a BERT, or a GPT-2 for a causal language model, and its tokenizer, which splits text into words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    kind = kind_class(task.kind)(task)
    is_causal = kind.head == "AutoModelForCausalLM"
    ends = {"bos_token": "[BOS]", "eos_token": "[EOS]"} if is_causal else {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", **ends}  # the first words, in their order
    mask = {} if is_causal or kind.needs_labels else {"mask_token": "[MASK]"}
    further = [agreement.SEPARATOR] if is_causal else mask.values()
    words = [*special.values(), *agreement.vocabulary(), *further]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if is_causal:
        backend.post_processor = processors.TemplateProcessing("[BOS] $A", special_tokens=[("[BOS]", 2)])
    else:
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special, **mask)
    sizes: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6}
    sizes |= {"vocab_size": len(tokenizer), "initializer_range": 0.04}  # twice the usual, which is meant for 768
    config: Any
    if is_causal:
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = transformers.GPT2Config(**sizes, n_inner=192, n_positions=_LENGTH, **ids)
    else:
        sizes |= {"intermediate_size": 192, "max_position_embeddings": _LENGTH, "type_vocab_size": 2}
        config = transformers.BertConfig(**sizes, **kind.head_options())
    config.update(dropout_options(config, dropout, "of the task"))
    return getattr(transformers, kind.head).from_config(config), tokenizer


def dropout_options(config: Any, p: float | None, name: str) -> dict[str, Any]:
    """Return the options that set all dropout rates of a configuration; none if ``p`` is ``None``.

    A rate that is ``None`` follows another one and is left out. Rates of whole layers (``layerdrop``) are no dropout.
    """
    if p is None:
        return {}
    values = {name: value for name, value in config.to_dict().items() if "dropout" in name or name.endswith("pdrop")}
    if not (rates := [name for name, value in values.items() if type(value) in (int, float)]):
        raise InputError(
            f"Model {name} ({config.model_type}) has no dropout rate in its configuration: remove --model-dropout."
        )
    return dict.fromkeys(rates, p)
