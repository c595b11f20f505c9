"""The nine tasks of the GLUE benchmark."""

from __future__ import annotations

from typing import Any

from attnreg.experiments.tasks.definition import Task

GLUE = "nyu-mll/glue"


def _task(name: str, summary: str, columns: tuple[str, ...], labels: tuple[str, ...], **more: Any) -> Task:
    given: dict[str, Any] = {"metrics": ("accuracy",), **more}
    return Task(name=name, summary=summary, columns=columns, labels=labels, hub=(GLUE, name), **given)


TASKS = (
    _task("cola", "Linguistic Acceptability (GLUE): is the sentence acceptable?",
          ("sentence",), ("unacceptable", "acceptable"), metrics=("matthews_correlation", "accuracy")),
    _task("sst2", "Stanford Sentiment (GLUE): is the film review positive?",
          ("sentence",), ("negative", "positive"), ad_drop_layers=(0,)),
    _task("mrpc", "Microsoft Paraphrases (GLUE): do two sentences say the same?",
          ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), metrics=("accuracy", "f1")),
    _task("qqp", "Quora Question Pairs (GLUE): do two questions ask the same?",
          ("question1", "question2"), ("not_duplicate", "duplicate"), metrics=("accuracy", "f1"), ad_drop_layers=(0,)),
    _task("stsb", "Textual Similarity (GLUE): how similar are two sentences, 0-5?",
          ("sentence1", "sentence2"), (), kind="regression", metrics=("pearson", "spearman"), ad_drop_layers=(0,)),
    _task("mnli", "Multi-Genre NLI (GLUE): does the hypothesis follow?",
          ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"),
          validation=("validation_matched", "validation_mismatched"), ad_drop_layers=(0,)),
    _task("qnli", "Question NLI (GLUE): does the sentence answer the question?",
          ("question", "sentence"), ("entailment", "not_entailment"), ad_drop_layers=(0,)),
    _task("rte", "Textual Entailment (GLUE): does the second sentence follow?",
          ("sentence1", "sentence2"), ("entailment", "not_entailment")),
    _task("wnli", "Winograd NLI (GLUE): is the pronoun replaced correctly?",
          ("sentence1", "sentence2"), ("not_entailment", "entailment")),
)  # fmt: skip
