"""The nine tasks of the GLUE benchmark."""

from __future__ import annotations

from attnreg.experiments.tasks.definition import Task

GLUE = "nyu-mll/glue"

TASKS = (
    Task(
        name="cola",
        summary="Linguistic Acceptability (GLUE): is the sentence acceptable?",
        columns=("sentence",),
        labels=("unacceptable", "acceptable"),
        metrics=("matthews_correlation", "accuracy"),
        hub=(GLUE, "cola"),
    ),
    Task(
        name="sst2",
        summary="Stanford Sentiment (GLUE): is the film review positive?",
        columns=("sentence",),
        labels=("negative", "positive"),
        metrics=("accuracy",),
        hub=(GLUE, "sst2"),
        ad_drop_layers=(0,),
    ),
    Task(
        name="mrpc",
        summary="Microsoft Paraphrases (GLUE): do two sentences say the same?",
        columns=("sentence1", "sentence2"),
        labels=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
        hub=(GLUE, "mrpc"),
    ),
    Task(
        name="qqp",
        summary="Quora Question Pairs (GLUE): do two questions ask the same?",
        columns=("question1", "question2"),
        labels=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
        hub=(GLUE, "qqp"),
        ad_drop_layers=(0,),
    ),
    Task(
        name="stsb",
        summary="Textual Similarity (GLUE): how similar are two sentences, 0-5?",
        kind="regression",
        columns=("sentence1", "sentence2"),
        metrics=("pearson", "spearman"),
        hub=(GLUE, "stsb"),
        ad_drop_layers=(0,),
    ),
    Task(
        name="mnli",
        summary="Multi-Genre NLI (GLUE): does the hypothesis follow?",
        columns=("premise", "hypothesis"),
        labels=("entailment", "neutral", "contradiction"),
        metrics=("accuracy",),
        validation=("validation_matched", "validation_mismatched"),
        hub=(GLUE, "mnli"),
        ad_drop_layers=(0,),
    ),
    Task(
        name="qnli",
        summary="Question NLI (GLUE): does the sentence answer the question?",
        columns=("question", "sentence"),
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        hub=(GLUE, "qnli"),
        ad_drop_layers=(0,),
    ),
    Task(
        name="rte",
        summary="Textual Entailment (GLUE): does the second sentence follow?",
        columns=("sentence1", "sentence2"),
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        hub=(GLUE, "rte"),
    ),
    Task(
        name="wnli",
        summary="Winograd NLI (GLUE): is the pronoun replaced correctly?",
        columns=("sentence1", "sentence2"),
        labels=("not_entailment", "entailment"),
        metrics=("accuracy",),
        hub=(GLUE, "wnli"),
    ),
)
