"""The model's own dropout, whatever its configuration calls it."""

from __future__ import annotations

from typing import Any

from attnreg.errors import InputError


def dropout_fields(config: Any) -> list[str]:
    """Return the names of all dropout rates in a model's configuration.

    A rate that is ``None`` follows another one and is left out. Rates of whole layers (``layerdrop``) are no dropout.

    Example:
        >>> from transformers import GPT2Config
        >>> dropout_fields(GPT2Config())
        ['attn_pdrop', 'embd_pdrop', 'resid_pdrop', 'summary_first_dropout']
    """
    values = {name: value for name, value in config.to_dict().items() if "dropout" in name or name.endswith("pdrop")}
    return sorted(name for name, value in values.items() if type(value) in (int, float))


def dropout_options(config: Any, p: float | None, name: str) -> dict[str, Any]:
    """Return the options that set all dropout rates of a configuration; none if ``p`` is ``None``."""
    if p is None:
        return {}
    if not (fields := dropout_fields(config)):
        raise InputError(
            f"Model {name} ({config.model_type}) has no dropout rate in its configuration: remove --model-dropout."
        )
    return dict.fromkeys(fields, p)
