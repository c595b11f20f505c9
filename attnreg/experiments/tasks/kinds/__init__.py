"""Kinds of tasks, one file each: model head, checks of rows and labels, encoding, predictions and scoring."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.experiments.tasks.kinds.kind import Kind

KINDS = {
    "classification": "Classification",
    "regression": "Regression",
    "tokens": "Tokens",
    "multiple-choice": "MultipleChoice",
    "seq2seq": "Seq2Seq",
    "masked-lm": "MaskedLM",
    "causal-lm": "CausalLM",
    "image-classification": "ImageClassification",
    "question-answering": "QuestionAnswering",
}


def kind_class(name: str) -> type[Kind]:
    """Return the class of a kind. Importing it does not import torch."""
    module = importlib.import_module(f"attnreg.experiments.tasks.kinds.{name.replace('-', '_')}")
    found: type[Kind] = getattr(module, KINDS[name])
    return found
