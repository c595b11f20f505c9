"""The tasks that come with attnreg: of built-in data, of GLUE and further data; choose one by name and options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attnreg.errors import UsageError, did_you_mean
from attnreg.experiments.tasks.kinds import KINDS, kind_class
from attnreg.experiments.tasks.task import Task

_AGREEMENT = Task(
    name="agreement", summary="Is the sentence grammatical? Built-in data, needs no network",
    columns=("sentence",), labels=("unacceptable", "acceptable"), metrics=("matthews_correlation", "accuracy"),
    embedded="rows", model=None, epochs=30, batch_size=64, learning_rate=2e-3, max_length=32,
)  # fmt: skip
_AGREEMENT_WORDS = replace(
    _AGREEMENT, name="agreement-words", summary="Guess hidden words of agreement (pre-training); built-in data",
    kind="masked-lm", label="sentence", labels=(), metrics=("accuracy",), embedded="corpus",
)  # fmt: skip
_AGREEMENT_COMPLETION = replace(
    _AGREEMENT, name="agreement-completion",
    summary="Complete a sentence so that it agrees, with a decoder; built-in data",
    kind="causal-lm", columns=("prompt",), label="completion", labels=(), metrics=("exact_match", "accuracy"),
    embedded="completions", epochs=10,
)  # fmt: skip


def _glue(name: str, summary: str, columns: tuple[str, ...], labels: tuple[str, ...], **more: Any) -> Task:
    fields: dict[str, Any] = {"metrics": ("accuracy",), **more}
    return Task(name=name, summary=summary, columns=columns, labels=labels, hub=("nyu-mll/glue", name), **fields)


_GLUE = (
    _glue("cola", "Linguistic Acceptability (GLUE): is the sentence acceptable?",
          ("sentence",), ("unacceptable", "acceptable"), metrics=("matthews_correlation", "accuracy")),
    _glue("sst2", "Stanford Sentiment (GLUE): is the film review positive?",
          ("sentence",), ("negative", "positive"), ad_drop_layers=(0,)),
    _glue("mrpc", "Microsoft Paraphrases (GLUE): do two sentences say the same?",
          ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), metrics=("accuracy", "f1")),
    _glue("qqp", "Quora Question Pairs (GLUE): do two questions ask the same?",
          ("question1", "question2"), ("not_duplicate", "duplicate"), metrics=("accuracy", "f1"), ad_drop_layers=(0,)),
    _glue("stsb", "Textual Similarity (GLUE): how similar are two sentences, 0-5?",
          ("sentence1", "sentence2"), (), kind="regression", metrics=("pearson", "spearman"), ad_drop_layers=(0,)),
    _glue("mnli", "Multi-Genre NLI (GLUE): does the hypothesis follow?",
          ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"),
          validation=("validation_matched", "validation_mismatched"), ad_drop_layers=(0,)),
    _glue("qnli", "Question NLI (GLUE): does the sentence answer the question?",
          ("question", "sentence"), ("entailment", "not_entailment"), ad_drop_layers=(0,)),
    _glue("rte", "Textual Entailment (GLUE): does the second sentence follow?",
          ("sentence1", "sentence2"), ("entailment", "not_entailment")),
    _glue("wnli", "Winograd NLI (GLUE): is the pronoun replaced correctly?",
          ("sentence1", "sentence2"), ("not_entailment", "entailment")),
)  # fmt: skip

_SMALL: dict[str, Any] = {"batch_size": 16, "learning_rate": 2e-5}
_SWAG = Task(
    name="swag", summary="SWAG: which of four endings continues the text?", kind="multiple-choice",
    columns=("sent1", "sent2"), choices=("ending0", "ending1", "ending2", "ending3"), metrics=("accuracy",),
    hub=("allenai/swag", "regular"), **_SMALL,
)  # fmt: skip
_PAWS = Task(
    name="paws", summary="PAWS: are two sentences with similar words paraphrases?",
    columns=("sentence1", "sentence2"), labels=("not_paraphrase", "paraphrase"), metrics=("accuracy", "f1"),
    merges={"not_duplicate": "not_paraphrase", "duplicate": "paraphrase",
            "not_equivalent": "not_paraphrase", "equivalent": "paraphrase"},
    hub=("google-research-datasets/paws", "labeled_final"),
)  # fmt: skip


def _translation(source: str, target: str, pair: str) -> Task:
    return Task(
        name=f"wmt16-{source}-{target}",
        summary=f"WMT 2016 news translation, {source} to {target}, scored by sacreBLEU",
        kind="seq2seq", columns=(f"translation.{source}",), label=f"translation.{target}", metrics=("bleu",),
        hub=("wmt/wmt16", pair), model=f"Helsinki-NLP/opus-mt-{source}-{target}", **_SMALL,
    )  # fmt: skip


_FURTHER = (
    Task(name="imdb", summary="IMDb: is the movie review positive? Scored on the test split",
         columns=("text",), labels=("neg", "pos"), metrics=("accuracy",), validation=("test",),
         hub=("stanfordnlp/imdb", "plain_text"), max_length=512, **_SMALL),
    Task(name="conll2003", summary="CoNLL 2003 English: named entities, scored by entity F1", kind="tokens",
         columns=("tokens",), label="ner_tags", metrics=("entity_f1", "accuracy"),
         labels=("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"),
         hub=("lhoestq/conll2003", None), model="google-bert/bert-base-cased"),
    Task(name="ptb-pos", summary="Penn Treebank: parts of speech; needs --data-dir", kind="tokens",
         columns=("tokens",), label="pos_tags", metrics=("accuracy",), model="google-bert/bert-base-cased"),
    _SWAG,
    replace(_SWAG, name="codah", summary="CODAH: choose the ending, as in SWAG; needs --data-dir", hub=None),
    _PAWS,
    _translation("en", "ro", "ro-en"),
    _translation("tr", "en", "tr-en"),
    Task(name="hans", summary="HANS: scores mnli and rte models, with `attnreg evaluate`",
         columns=("premise", "hypothesis"), labels=("entailment", "non-entailment"), metrics=("accuracy",),
         merges=dict.fromkeys(("neutral", "contradiction", "not_entailment"), "non-entailment"),
         evaluation_only=True, hub=("jhu-cogsci/hans", "plain_text")),
    replace(_PAWS, name="paws-x", summary="PAWS-X: scores paws, qqp, mrpc models, with `attnreg evaluate`",
            evaluation_only=True, hub=("google-research-datasets/paws-x", "en")),
)  # fmt: skip
_CUSTOM = Task(name="custom", summary="Your own data: --data-dir, --kind, --text-columns, ...", columns=(), metrics=())
TASKS = {task.name: task for task in (_AGREEMENT, _AGREEMENT_WORDS, _AGREEMENT_COMPLETION, *_GLUE, *_FURTHER, _CUSTOM)}


def get_task(name: str) -> Task:
    """Return the task of a name.

    Raises:
        UsageError: if there is no such task.
    """
    if name not in TASKS:
        got = f"got {name!r}. See `attnreg list tasks`.{did_you_mean(name, TASKS)}"
        raise UsageError(f"Expected a task among {', '.join(TASKS)}, {got}")
    return TASKS[name]


def choose_task(
    name: str,
    *,
    kind: str | None = None,
    text_columns: str | None = None,
    label_column: str | None = None,
    choice_columns: str | None = None,
    metric: str | None = None,
) -> Task:
    """Return the task that the command line's options of these names describe, or raise ``UsageError``.

    Example:
        >>> choose_task("custom", text_columns="question,answer", metric="f1").metrics
        ('f1', 'accuracy')
        >>> choose_task("mrpc", metric="f1").metrics
        ('f1', 'accuracy')
    """
    task = get_task(name)
    options = (kind, text_columns, label_column, choice_columns)
    if task is TASKS["custom"]:
        task = _custom(task, kind or "classification", *options[1:])
    elif set(options) != {None}:
        flags = "--kind, --text-columns, --label-column and --choice-columns"
        raise UsageError(f"{flags} are only for --task custom: remove them for --task {name}.")
    if metric is None:
        return task
    known = kind_class(task.kind).metrics
    if metric == "micro_f1" and metric not in known and "accuracy" in known:
        metric = "accuracy"  # with one class per row, every miss is a false positive and a false negative
    if metric not in known:
        expected = f"one of {', '.join(known)}, got {metric!r}.{did_you_mean(metric, known)}"
        raise UsageError(f"Expected --metric for a {task.kind} task to be {expected}")
    return replace(task, metrics=tuple(dict.fromkeys((metric, *task.metrics))))


def _custom(template: Task, kind: str, texts: str | None, label: str | None, choices: str | None) -> Task:
    if kind not in KINDS:
        raise UsageError(f"Expected --kind to be one of {', '.join(KINDS)}, got {kind!r}.{did_you_mean(kind, KINDS)}")
    cls = kind_class(kind)
    columns, choice_columns = _names("--text-columns", texts), _names("--choice-columns", choices)
    if not columns and cls.usual_columns:
        columns, label = cls.usual_columns, label or cls.usual_label
    if not columns:
        raise UsageError("--task custom needs --text-columns, for example --text-columns premise,hypothesis.")
    if len(columns) > cls.most_columns:
        got = f"got {len(columns)}: {texts}"
        raise UsageError(f"Expected at most {cls.most_columns} --text-columns for --kind {kind}, {got}.")
    if cls.needs_choices != bool(choice_columns):
        raise UsageError(
            "Expected --choice-columns for --kind multiple-choice (two or more, or one of lists), and none for other "
            f"kinds, got {choices or 'none'} for --kind {kind}."
        )
    target = label or (template.label if cls.needs_labels else columns[0])
    if cls.needs_labels and target in (*columns, *choice_columns):
        raise UsageError(f"Column {target} holds the labels, so it cannot be a text or choice column, too.")
    metrics = cls.metrics[:1]
    return replace(template, kind=kind, columns=columns, label=target, choices=choice_columns, metrics=metrics)


def _names(option: str, text: str | None) -> tuple[str, ...]:
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise UsageError(f"Expected {option} to be different column names, separated by commas, got {text!r}.")
    return names
