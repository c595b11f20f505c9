"""Load the tokenizer or the image processor of a model; transformers makes an empty tokenizer where there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from attnreg.errors import InputError

_NEEDED = {
    "AutoTokenizer": ("tokenizer", "vocabulary, such as tokenizer.json or vocab.txt"),
    "AutoImageProcessor": ("image processor", "preprocessor_config.json"),
}
_FILES = {
    "AutoTokenizer": re.compile(r"^tokenizer\.json$|vocab|merges|spiece|spm|bpe|tiktoken|tekken|\.model$"),
    "AutoImageProcessor": re.compile(r"processor_config\.json$"),
}


def load_processor(auto: str, name: str) -> Any:
    """Load what prepares the inputs of a model, with ``AutoTokenizer`` or ``AutoImageProcessor``.

    Raises:
        InputError: if the model comes without it, or with a tokenizer that knows no word.
        ImportError: if a package is missing.
        OSError: if a file cannot be read.
        ValueError: if a file is broken.
    """
    import transformers

    try:
        processor = getattr(transformers, auto).from_pretrained(name)
    except ImportError:  # a package is missing
        raise
    except Exception as error:  # for a broken file, any: the tokenizers library raises plain exceptions
        if _lacks(auto, name):
            raise _missing(auto, name) from error
        if isinstance(error, (OSError, ValueError)):
            raise
        raise ValueError(f"its {_NEEDED[auto][0]} cannot be read: {error!r}") from error
    if auto == "AutoTokenizer" and not has_vocabulary(processor):
        raise _missing(auto, name)
    return processor


def has_vocabulary(tokenizer: Any) -> bool:
    """Whether a tokenizer has tokens besides the special ones, or needs none because it reads bytes or characters."""
    if not tokenizer.vocab_files_names:
        return True
    special = {*tokenizer.all_special_tokens, "▁"}  # sentencepiece's space, which an empty T5 tokenizer has
    return any(token not in special for token in tokenizer.get_vocab())


def _lacks(auto: str, name: str) -> bool:
    folder = Path(name)
    return (folder / "config.json").is_file() and not any(_FILES[auto].search(path.name) for path in folder.iterdir())


def _missing(auto: str, name: str) -> InputError:
    what, files = _NEEDED[auto]
    return InputError(
        f"--model {name} has no {what}: found no {files}. Save the model's own {what} in the same folder "
        "(`save_pretrained`)."
    )
