"""The tiny, randomly initialized models of the built-in tasks, with the grammar's own vocabulary."""

from __future__ import annotations

from typing import Any

from attnreg.experiments.tasks import agreement
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.models.dropout import dropout_options
from attnreg.experiments.tasks.task import Task

LENGTH = 64


def tiny_model(task: Task, dropout: float | None = None) -> tuple[Any, Any]:
    """Make a BERT, or a GPT-2 for a causal language model, and its tokenizer, which splits text into words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    kind = kind_class(task.kind)(task)
    is_causal = kind.head == "AutoModelForCausalLM"
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}  # the first words, in their order
    special |= (
        {"bos_token": "[BOS]", "eos_token": "[EOS]"} if is_causal else {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    )
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
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6}
    # Twice the usual 0.02, which is meant for 768 dimensions.
    shared: dict[str, Any] = {**sizes, "initializer_range": 0.04}
    config: Any
    if is_causal:
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = transformers.GPT2Config(**shared, n_inner=192, n_positions=LENGTH, **ids)
    else:
        config = transformers.BertConfig(
            **shared, intermediate_size=192, max_position_embeddings=LENGTH, type_vocab_size=2, **kind.head_options()
        )
    config.update(dropout_options(config, dropout, "of the task"))
    return getattr(transformers, kind.head).from_config(config), tokenizer
