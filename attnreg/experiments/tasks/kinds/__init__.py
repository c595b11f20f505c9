"""Kinds of tasks: model head, checks of rows and labels, encoding, predictions and scoring."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnreg.experiments.tasks.kinds.kind import Kind

# Modules and classes of the kinds.
KINDS = {
    "classification": "classification.Classification",
    "regression": "classification.Regression",
    "tokens": "classification.Tokens",
    "multiple-choice": "multiple_choice.MultipleChoice",
    "seq2seq": "language.Seq2Seq",
    "masked-lm": "language.MaskedLM",
    "causal-lm": "language.CausalLM",
    "image-classification": "classification.ImageClassification",
    "question-answering": "question_answering.QuestionAnswering",
}


def kind_class(name: str) -> type[Kind]:
    """Return the class of a kind. Importing it does not import torch."""
    kind: type[Kind] = pkgutil.resolve_name(f"{__name__}.{KINDS[name]}")
    return kind
