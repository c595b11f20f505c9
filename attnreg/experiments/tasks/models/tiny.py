"""The tiny, randomly initialized models of the built-in tasks, with the grammar's own vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnreg.experiments.tasks import agreement
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.models.dropout import dropout_options
from attnreg.experiments.tasks.task import Task

LENGTH = 64
_SIZES: Mapping[str, Any] = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6}


def tiny_model(task: Task, dropout: float | None = None) -> tuple[Any, Any]:
    """Make a BERT, or a GPT-2 for a causal language model, and its tokenizer, which splits text into words."""
    return (_gpt2 if kind_class(task.kind).head == "AutoModelForCausalLM" else _bert)(task, dropout)


def _gpt2(task: Task, dropout: float | None) -> tuple[Any, Any]:
    import transformers
    from tokenizers import processors

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    tokenizer = _tokenizer([*agreement.vocabulary(), agreement.SEPARATOR], special)
    begin = ("[BOS]", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("[BOS] $A", special_tokens=[begin])
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        **_SIZES,
        n_inner=192,
        initializer_range=0.04,
        n_positions=LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **dropout_options(transformers.GPT2Config(), dropout, "of the task"),
    )
    return transformers.AutoModelForCausalLM.from_config(config), tokenizer


def _bert(task: Task, dropout: float | None) -> tuple[Any, Any]:
    import transformers
    from tokenizers import processors

    kind = kind_class(task.kind)(task)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    hidden = {} if kind.needs_labels else {"mask_token": "[MASK]"}
    tokenizer = _tokenizer([*agreement.vocabulary(), *hidden.values()], special, hidden)
    tokenizer.backend_tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        **_SIZES,
        intermediate_size=192,
        initializer_range=0.04,  # twice BERT's 0.02, which is meant for 768 dimensions
        max_position_embeddings=LENGTH,
        type_vocab_size=2,
        **dropout_options(transformers.BertConfig(), dropout, "of the task"),
        **kind.head_options(),
    )
    return getattr(transformers, kind.head).from_config(config), tokenizer


def _tokenizer(words: Sequence[str], special: Mapping[str, str], further: Mapping[str, str] | None = None) -> Any:
    """Make a tokenizer of words, whose first tokens are the special ones; ``further`` are among the words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate([*special.values(), *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special, **(further or {}))
