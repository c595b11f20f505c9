"""The report of a fit: what was chosen and what it will score, what to do next, and where it errs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import torch
from matplotlib.ticker import PercentFormatter
from scipy import special
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from attnreg.experiments.fit.choice import score_of
from attnreg.experiments.fit.classifier import METRICS, TextClassifier
from attnreg.experiments.fit.table import Table as Rows
from attnreg.experiments.results.document import Block, Contents, Heading, Paragraph, Picture, Table, duration
from attnreg.experiments.results.plots.style import COLORS, picture
from attnreg.experiments.tasks.metrics import BINS, calibration_error

_SHOWN = 15  # rows, or pairs of classes
_LETTERS = 160  # of a text
_SURE = 0.9  # a probability


class Report:
    """The blocks of the report of a fitted classifier, whose rows come from a file."""

    def __init__(self, classifier: TextClassifier, table: Rows, folder: Path, tested: str) -> None:
        self.classifier, self.table, self.folder, self.found = classifier, table, folder, classifier.outcome_
        self.tested = tested  #: a sentence on test rows, or nothing
        self.names = [str(name) for name in classifier.classes_]
        self.metric = classifier.metric.replace("_", " ")
        self.all_labels = table.rows.labels
        self.labels = self.all_labels[self.found.rows]
        self.probabilities = special.softmax(self.found.logits / self.found.temperature, axis=1)
        self.predicted, self.sure = self.probabilities.argmax(1), self.probabilities.max(1)

    @property
    def promise(self) -> str:
        """What was chosen and what it will score, beside what is simpler."""
        found = self.found
        score, low, high = found.estimate
        scores = {**dict(zip(found.tries, found.scores, strict=True)), **found.dropped}
        plain = max((which for which in scores if which.is_plain), default=None, key=scores.__getitem__)
        beside = "there was no time for plain fine-tuning"
        if plain is not None:
            early = ", when it was dropped" * (plain in found.dropped)
            beside = f"plain fine-tuning, on {found.trained_on:.0%} of the rows, {scores[plain]:.1%}{early}"
        majority = np.full(len(self.all_labels), np.bincount(self.all_labels).argmax())
        trivial = score_of(self.classifier.metric, self.all_labels, majority, len(self.names))
        no_more = ", no less: nothing was learned that this metric shows" * (trivial >= score)
        return (
            f"Chosen: **{found.best}**. On new rows like these it will score **{score:.1%}** {self.metric} (95 % "
            f"interval {low:.1%} to {high:.1%}). The majority class scores {trivial:.1%}{no_more}; {beside}."
        )

    def blocks(self) -> list[Block]:
        """Return the whole report."""
        found = self.found
        both = {name: score_of(name, self.labels, self.predicted, len(self.names)) for name in METRICS}
        scored = " and ".join(f"{score:.1%} {name.replace('_', ' ')}" for name, score in both.items())
        return [
            Heading(f"A classifier of {len(self.all_labels)} rows: {self.folder.name}"),
            Paragraph(self.promise + self.tested),
            Contents(),
            Heading("What to do next"),
            *map(Paragraph, self._advice()),
            self._curve(),
            Heading("What was tried"),
            Paragraph(
                f"Each try was trained on {found.trained_on:.0%} of the rows and scored on rows that it had not seen, "
                f"{len(found.rows)} in all. The last column says how often it would have been chosen from other rows."
            ),
            self._tries(),
            Heading("Classes"),
            Paragraph(f"On rows that it had not seen, the chosen try had {scored}."),
            self._classes(),
            Heading("What is taken for what"),
            self._confusions(),
            Heading("Rows that it is most wrong about"),
            Paragraph("Each was predicted by a network that had not seen it. Look for wrong labels here."),
            self._worst(),
            Heading("Probabilities"),
            *self._calibration(),
            Heading("How it was made"),
            *map(Paragraph, self._made()),
        ]

    def _advice(self) -> list[str]:
        found, score = self.found, self.found.estimate.score
        twice = 1 - (1 - score) * 0.5**found.decay
        said = [f"**More rows:** twice as many would score about {twice:.1%}, by the learning curve of a linear probe."]
        early = [s for t, s in zip(found.tries, found.scores, strict=True) if found.since[t] < found.seconds / 2]
        gain = 100 * (max(found.scores) - max(early, default=0.0))
        gained = (
            f"ways that were first tried in the second half of {duration(found.seconds)} gained {gain:.1f} points. "
        )
        said.append(f"**More time:** {gained * bool(early)}{found.ended}")
        if doubtful := int(((self.predicted != self.labels) & (self.sure > _SURE)).sum()):
            said.append(
                f"**Labels:** {doubtful} of {len(self.labels)} rows have another label than what is predicted with "
                f"more than {_SURE:.0%} probability: check those that are shown below."
            )
        return said

    def _tries(self) -> Table:
        found = self.found
        ranked = sorted(zip(found.tries, found.scores, found.chosen, strict=True), key=lambda row: -row[1])
        rows = [{"try": str(t), self.metric: f"{s:.1%}", "chosen": f"{c:.0%}"} for t, s, c in ranked]
        rows += [{"try": f"{t}, dropped", self.metric: f"{s:.1%}", "chosen": ""} for t, s in found.dropped.items()]
        return Table.of(rows)

    def _classes(self) -> Table:
        every = range(len(self.names))
        scores = sk.precision_recall_fscore_support(self.labels, self.predicted, labels=every, zero_division=0.0)
        counts = np.bincount(self.all_labels, minlength=len(self.names))
        return Table(
            ["class", "rows", "precision", "recall", "F1"],
            [[self.names[n], str(counts[n]), *(f"{score[n]:.1%}" for score in scores[:3])] for n in every],
        )

    def _confusions(self) -> Table:
        pairs = Counter((a, b) for a, b in zip(self.labels, self.predicted, strict=True) if a != b)
        counts = Counter(self.labels.tolist())
        return Table(
            ["label", "predicted", "rows", "share of label"],
            [
                [self.names[a], self.names[b], str(count), f"{count / counts[a]:.0%}"]
                for (a, b), count in pairs.most_common(_SHOWN)
            ],
            texts=(0, 1),
        )

    def _worst(self) -> Table:
        of_label = self.probabilities[np.arange(len(self.labels)), self.labels]
        wrong = [n for n in np.argsort(of_label) if self.predicted[n] != self.labels[n]][:_SHOWN]
        rows = []
        for n in wrong:
            text = " / ".join(self.table.rows.texts[self.found.rows[n]])
            cut = text if len(text) <= _LETTERS else f"{text[:_LETTERS]} …"
            shown = self.names[self.labels[n]], self.names[self.predicted[n]], f"{self.sure[n]:.0%}"
            rows.append([str(self.table.places[self.found.rows[n]]), " ".join(cut.split()), *shown])
        return Table(["row", "text", "label", "predicted", "probability"], rows, texts=(1,))

    def _calibration(self) -> list[Block]:
        gaps = [
            calibration_error(torch.tensor(self.found.logits / t).softmax(-1), torch.tensor(self.labels))
            for t in (1.0, self.found.temperature)
        ]
        path = self.folder / "plots" / "calibration.png"
        with picture(path, width=5.0, height=3.6, grid="both") as (axes,):
            right, probability = calibration_curve(self.predicted == self.labels, self.sure, n_bins=BINS)
            axes.plot([0, 1], [0, 1], "--", color="#888888", lw=1)
            axes.plot(probability, right, "o-", color=COLORS[1])
            axes.set(xlabel="probability of the predicted class", ylabel="share that is right")
        return [
            Paragraph(
                f"Logits are divided by the temperature {self.found.temperature:.2f}, fitted to rows held out. The "
                f"mean gap between probability and the share that is right is {gaps[1]:.1%}; without it, {gaps[0]:.1%}."
            ),
            Picture(path, "Where the line is below the diagonal, predictions are less often right than they say."),
        ]

    def _curve(self) -> Picture:
        found, path, n = self.found, self.folder / "plots" / "rows.png", len(self.all_labels)
        score, low, high = found.estimate
        with picture(path, width=5.4, height=3.4, grid="both") as (axes,):
            sizes = np.geomspace(min(found.curve), 4 * n, 50)
            axes.plot(sizes, 1 - (1 - score) * (n / sizes) ** found.decay, "--", color=COLORS[1])
            axes.errorbar([n], [score], [[score - low], [high - score]], fmt="o", color=COLORS[1], label="chosen")
            axes.plot(*zip(*sorted(found.curve.items()), strict=True), "s-", color=COLORS[2], label="linear probe")
            shown = [*found.curve, n, 2 * n, 4 * n][1:]
            axes.set(xscale="log", xlabel="rows to train on", ylabel=self.metric)
            axes.set_xticks(shown, [*map(str, shown)])
            axes.minorticks_off()
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.legend()
        return Picture(
            path, "Scores by the number of rows: measured for a linear probe, extrapolated for the chosen try."
        )

    def _made(self) -> list[str]:
        found, given, inner = self.found, self.classifier, self.found.in_folds
        said = [
            f"Model {given.model}, seed {given.seed}, {found.trainings} trainings in {duration(found.seconds)}.",
            f"Tries raced over folds of the rows; those that were hardly the best were dropped. The score is that of "
            f"BBC-CV (Tsamardinos et al., 2018), {inner.score:.1%} ({inner.low:.1%} to {inner.high:.1%}) for training "
            f"on {found.trained_on:.0%} of the rows; training on all of them lowers errors by the power "
            f"{found.certain_decay:.2f} of the number of rows: that of a linear probe's learning curve, "
            f"{found.decay:.2f}, less its standard error.",
        ]
        return said + [f"Rows left out, with {why}: {len(rows)}." for why, rows in self.table.left_out.items()]
