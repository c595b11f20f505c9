"""Tasks outside GLUE: sentiment, tagging, multiple choice, translation, and sets for evaluation only."""

from __future__ import annotations

from dataclasses import replace

from attnreg.experiments.tasks.definition import Task

_SWAG = Task(
    name="swag",
    summary="SWAG: which of four endings continues the text?",
    kind="multiple-choice",
    columns=("sent1", "sent2"),
    choices=("ending0", "ending1", "ending2", "ending3"),
    metrics=("accuracy",),
    hub=("allenai/swag", "regular"),
    batch_size=16,
    learning_rate=2e-5,
)
_PAWS = Task(
    name="paws",
    summary="PAWS: are two sentences with similar words paraphrases?",
    columns=("sentence1", "sentence2"),
    labels=("not_paraphrase", "paraphrase"),
    metrics=("accuracy", "f1"),
    merges={
        "not_duplicate": "not_paraphrase",
        "duplicate": "paraphrase",
        "not_equivalent": "not_paraphrase",
        "equivalent": "paraphrase",
    },
    hub=("google-research-datasets/paws", "labeled_final"),
)


def _translation(name: str, source: str, target: str, pair: str) -> Task:
    return Task(
        name=f"wmt16-{name}",
        summary=f"WMT 2016 news translation, {source} to {target}, scored by sacreBLEU",
        kind="seq2seq",
        columns=(f"translation.{source}",),
        label=f"translation.{target}",
        metrics=("bleu",),
        hub=("wmt/wmt16", pair),
        model=f"Helsinki-NLP/opus-mt-{name}",
        batch_size=16,
        learning_rate=2e-5,
    )


TASKS = (
    Task(
        name="imdb",
        summary="IMDb: is the movie review positive? Scored on the test split",
        columns=("text",),
        labels=("neg", "pos"),
        metrics=("accuracy",),
        validation=("test",),
        hub=("stanfordnlp/imdb", "plain_text"),
        batch_size=16,
        learning_rate=2e-5,
        max_length=512,
    ),
    Task(
        name="conll2003",
        summary="CoNLL 2003 English: named entities, scored by entity F1",
        kind="tokens",
        columns=("tokens",),
        label="ner_tags",
        labels=("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"),
        metrics=("entity_f1", "accuracy"),
        hub=("lhoestq/conll2003", None),
        model="google-bert/bert-base-cased",
    ),
    Task(
        name="ptb-pos",
        summary="Penn Treebank: parts of speech; needs --data-dir",
        kind="tokens",
        columns=("tokens",),
        label="pos_tags",
        metrics=("accuracy",),
        model="google-bert/bert-base-cased",
    ),
    _SWAG,
    replace(_SWAG, name="codah", summary="CODAH: choose the ending, as in SWAG; needs --data-dir", hub=None),
    _PAWS,
    _translation("en-ro", "en", "ro", "ro-en"),
    _translation("tr-en", "tr", "en", "tr-en"),
    Task(
        name="hans",
        summary="HANS: scores mnli and rte models, with `attnreg evaluate`",
        columns=("premise", "hypothesis"),
        labels=("entailment", "non-entailment"),
        merges={"neutral": "non-entailment", "contradiction": "non-entailment", "not_entailment": "non-entailment"},
        metrics=("accuracy",),
        evaluation_only=True,
        hub=("jhu-cogsci/hans", "plain_text"),
    ),
    replace(
        _PAWS,
        name="paws-x",
        summary="PAWS-X: scores paws, qqp, mrpc models, with `attnreg evaluate`",
        evaluation_only=True,
        hub=("google-research-datasets/paws-x", "en"),
    ),
)
