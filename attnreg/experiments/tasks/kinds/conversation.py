"""Conversations, as lists of messages, and how a chat template writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnreg.errors import InputError, one_line

ANSWERS = "assistant"


def check_conversations(columns: Mapping[str, Sequence[Any]], place: str) -> None:
    """Raise unless one column, or a prompt and its completion, hold only texts, or only lists of messages."""
    names = list(columns)
    whole = " and ".join(names)
    first = next((values[0] for values in columns.values() if values), None)
    form = list if isinstance(first, list) else str
    for row, values in enumerate(zip(*columns.values(), strict=True), 1):
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, form) or (form is list and not all(map(_is_message, value))):
                wanted = "text" if form is str else 'a list of {"role": ..., "content": ...}'
                raise InputError(f"Expected {wanted} in column {name}, got {value!r} in row {row} of {place}.")
        if form is list:
            messages = [message for value in values for message in value]
            if len(messages) < 2 or messages[-1]["role"] != ANSWERS:
                role = messages[-1]["role"] if messages else "of none"
                raise InputError(
                    f"Expected the last message of column {whole} to be of the role {ANSWERS}, after others, got the "
                    f"role {role} in row {row} of {place}."
                )


def in_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Write a conversation by the tokenizer's chat template, which adds all special tokens, or raise.

    Returns the prompt, which ends where the answer begins, and the completion, which is the last message.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise InputError(
            "The data holds messages, but the model's tokenizer has no chat template to write them: choose another "
            "model, or give a prompt and a completion in columns of text."
        )
    try:
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, KeyError) as error:
        reason = one_line(error).rstrip(".")
        shown = str(messages)[:200]
        raise InputError(f"The tokenizer's chat template does not take the messages {shown}: {reason}.") from error
    if not whole.startswith(prompt):
        raise InputError(
            "The tokenizer's chat template writes a prompt in another way when an answer follows, so the answer cannot "
            f"be told from it: {prompt[-100:]!r} is not in {whole[-200:]!r}."
        )
    return prompt, whole[len(prompt) :]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))
