"""The report of a fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy import special
from sklearn import metrics as sk

from attnreg.experiments.fit.choice import score_of
from attnreg.experiments.fit.classifier import TextClassifier
from attnreg.experiments.fit.table import Labelled
from attnreg.experiments.results.document import Block, Heading, Paragraph, Table
from attnreg.experiments.tasks.metrics import calibration_error

_WORST = 15  # rows that are shown
_LETTERS = 160  # of a text


def report_blocks(classifier: TextClassifier, rows: Labelled, folder: Path) -> list[Block]:
    """Return the report: title, the sentence that says what will be, and all else."""
    found, names = classifier.outcome_, [str(name) for name in classifier.classes_]
    metric, classes = classifier.metric, len(names)
    numbers = {name: number for number, name in enumerate(names)}
    everything = np.array([numbers[str(label)] for label in rows.labels])
    labels, predicted = everything[found.rows], found.logits.argmax(1)
    majority = np.full(len(everything), np.bincount(everything).argmax())
    trivial = score_of(metric, everything, majority, classes)
    plain = max(
        ((s, t) for t, s in zip(found.tries, found.scores, strict=True) if t.is_plain), default=None, key=lambda x: x[0]
    )
    beside = "plain fine-tuning was not tried" if plain is None else f"plain fine-tuning {plain[0]:.1%}"
    score, low, high = found.estimate
    what = metric.replace("_", " ")
    blocks: list[Block] = [
        Heading(f"The best classifier of {folder.name}"),
        Paragraph(
            f"**{found.best}** will score {score:.1%} {what} on new rows like these ({low:.1%} to {high:.1%}); "
            f"the majority class scores {trivial:.1%}, {beside}."
        ),
        Heading("What was tried"),
        Table.of([
            {"try": str(t), what: f"{s:.1%}", "chosen in": f"{c:.0%}"}
            for t, s, c in sorted(zip(found.tries, found.scores, found.chosen, strict=True), key=lambda x: -x[1])
        ] + [{"try": f"{t} (dropped early)", what: f"{s:.1%}", "chosen in": ""} for t, s in found.dropped.items()]),
        Heading("Classes"),
        _by_class(labels, predicted, names),
        Heading("Rows that it is most wrong about"),
        Paragraph("Each was predicted by a model that had not seen it. Wrong labels are found here."),
        _worst(found.logits / found.temperature, labels, found.rows, rows, names),
    ]  # fmt: skip
    before, after = (
        calibration_error(torch.softmax(torch.tensor(found.logits / t), -1), torch.tensor(labels))
        for t in (1.0, found.temperature)
    )
    blocks += [Heading("Calibration"), Paragraph(
        f"Logits are divided by the temperature {found.temperature:.2f}, fitted to rows held out: their mean gap "
        f"to the share that is right is {after:.1%} with it, {before:.1%} without."
    )]  # fmt: skip
    return blocks


def _by_class(labels: np.ndarray, predicted: np.ndarray, names: list[str]) -> Table:
    precision, recall, f1, support = sk.precision_recall_fscore_support(
        labels, predicted, labels=range(len(names)), zero_division=0.0
    )
    rows = [
        {"class": name, "rows": str(support[n]), "precision": f"{precision[n]:.1%}", "recall": f"{recall[n]:.1%}",
         "F1": f"{f1[n]:.1%}"}
        for n, name in enumerate(names)
    ]  # fmt: skip
    return Table.of(rows)


def _worst(logits: np.ndarray, labels: np.ndarray, places: np.ndarray, rows: Labelled, names: list[str]) -> Table:
    probabilities = special.softmax(logits, axis=1)
    of_label = probabilities[np.arange(len(labels)), labels]
    wrong = [n for n in np.argsort(of_label) if probabilities[n].argmax() != labels[n]][:_WORST]
    return Table(
        ["text", "label", "prediction", "probability"],
        [
            [" / ".join(rows.texts[places[n]])[:_LETTERS], names[labels[n]], names[int(probabilities[n].argmax())],
             f"{probabilities[n].max():.0%}"]
            for n in wrong
        ],
        texts=(0, 1, 2),
    )  # fmt: skip
