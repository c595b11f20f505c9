"""The report of a fit: what was chosen and what it will score, what to do next, and where it errs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.ticker import PercentFormatter
from scipy import special
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from attnreg.experiments.fit.answers import OF_CLASSES, OF_NUMBERS, score_of
from attnreg.experiments.fit.estimators import TextModel
from attnreg.experiments.fit.table import FittedRows
from attnreg.experiments.results.document import Block, Contents, Heading, Paragraph, Picture, Table, duration
from attnreg.experiments.results.plots.style import COLORS, picture
from attnreg.experiments.tasks.metrics import BINS, calibration_error

_SHOWN = 15  # rows, or pairs of classes
_LETTERS = 160  # of a text
_SURE = 0.9  # a probability


class Report:
    """The blocks of the report of a fitted classifier or regressor, whose rows come from a file."""

    def __init__(self, model: TextModel, table: FittedRows, folder: Path, tested: str) -> None:
        self.model, self.table, self.folder, self.found = model, table, folder, model.outcome_
        self.tested = tested  #: a sentence on test rows, or nothing
        self.answers = model.answers_
        self.shown, self.metric = self.answers.shown, self.answers.metric.replace("_", " ")
        self.names = [] if self.answers.classes is None else [str(name) for name in self.answers.classes]
        self.all_labels = table.rows.labels
        self.labels = self.all_labels[self.found.rows]
        self.predicted = self.answers.predicted(self.found.logits)
        self.probabilities = special.softmax(self.found.logits / self.found.temperature, axis=1)
        self.sure = self.probabilities.max(1)

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
            beside = f"plain fine-tuning, on {found.trained_on:.0%} of the rows, {self.shown(scores[plain])}{early}"
        simplest, same = self.answers.trivial(self.all_labels)
        trivial = self.answers(self.all_labels, same)
        no_more = ", no less: nothing was learned that this metric shows" * (trivial >= score)
        return (
            f"Chosen: **{found.best}**. On new rows like these it will score **{self.shown(score)}** "
            f"{self.answers.in_words} (95 % interval {self.shown(low)} to {self.shown(high)}). The {simplest} scores "
            f"{self.shown(trivial)}{no_more}; {beside}."
        )

    def blocks(self) -> list[Block]:
        """Return the whole report."""
        found, what = self.found, "classifier" if self.names else "regressor"
        return [
            Heading(f"A {what} of {len(self.all_labels)} rows: {self.folder.name}"),
            Paragraph(self.promise + self.tested),
            Contents(),
            Heading("What to do next"),
            *map(Paragraph, self._advice()),
            self._curve(),
            Heading("What was tried"),
            Paragraph(
                f"Each try was trained on {found.trained_on:.0%} of the rows and scored on rows that it had not seen, "
                f"{len(found.rows)} in all. Of those that the best does not beat by more than a standard error, the "
                "one that usually scores most is chosen. The last column says how often, from other rows."
            ),
            self._tries(),
            *(self._of_classes() if self.names else self._of_numbers()),
            Heading("How it was made"),
            *map(Paragraph, self._made()),
        ]

    def _of_classes(self) -> list[Block]:
        both = {name: score_of(name, self.labels, self.predicted, len(self.names)) for name in OF_CLASSES}
        scored = " and ".join(f"{score:.1%} {name.replace('_', ' ')}" for name, score in both.items())
        of_label = self.probabilities[np.arange(len(self.labels)), self.labels]
        wrong = [n for n in np.argsort(of_label) if self.predicted[n] != self.labels[n]]
        cells = [[self.names[self.labels[n]], self.names[self.predicted[n]], f"{self.sure[n]:.0%}"] for n in wrong]
        return [
            Heading("Classes"),
            Paragraph(f"On rows that it had not seen, the chosen try had {scored}."),
            self._classes(),
            Heading("What is taken for what"),
            self._confusions(),
            *self._worst(wrong, cells, "probability"),
            Heading("Probabilities"),
            *self._calibration(),
        ]

    def _of_numbers(self) -> list[Block]:
        labels, predicted = self.answers.real(self.labels), self.answers.real(self.predicted)
        both = " and ".join(f"{score_of(name, labels, predicted, 1):.2f} ({name})" for name in OF_NUMBERS)
        errors, usual = np.abs(predicted - labels), np.abs(labels - labels.mean()).mean()
        wrong = np.argsort(-errors).tolist()
        cells = [[f"{labels[n]:.3g}", f"{predicted[n]:.3g}", f"{errors[n]:.3g}"] for n in wrong]
        path = self.folder / "plots" / "predictions.png"
        with picture(path, width=5.0, height=3.8, grid="both") as (axes,):
            axes.plot([labels.min(), labels.max()], [labels.min(), labels.max()], "--", color="#888888", lw=1)
            axes.plot(labels, predicted, "o", color=COLORS[1], ms=3, alpha=0.5)
            axes.set(xlabel="label", ylabel="prediction")
        return [
            Heading("Predictions"),
            Paragraph(
                f"On rows that it had not seen, predictions of the chosen try correlate with labels by {both}. They "
                f"are off by {errors.mean():.3g} on average; the mean of all labels, by {usual:.3g}."
            ),
            Picture(path, "Predictions of rows that were held out, by their labels."),
            *self._worst(wrong, cells, "off by"),
        ]

    def _advice(self) -> list[str]:
        found, score = self.found, self.found.estimate.score
        twice = self.shown(1 - (1 - score) * 0.5**found.decay)
        said = [f"**More rows:** twice as many would score about {twice}, by the learning curve of a linear probe."]
        early = [s for t, s in zip(found.tries, found.scores, strict=True) if found.since[t] < found.seconds / 2]
        gain = max(found.scores) - max(early, default=0.0)
        points = f"{100 * gain:.1f} points" if self.names else f"{gain:.2f}"
        gained = f"ways that were first tried in the second half of {duration(found.seconds)} gained {points}. "
        said.append(f"**More time:** {gained * bool(early)}{found.ended}")
        if self.names and (doubtful := int(((self.predicted != self.labels) & (self.sure > _SURE)).sum())):
            said.append(
                f"**Labels:** {doubtful} of {len(self.labels)} rows have another label than what is predicted with "
                f"more than {_SURE:.0%} probability: check those that are shown below."
            )
        return said

    def _tries(self) -> Table:
        found = self.found
        ranked = sorted(zip(found.tries, found.scores, found.chosen, strict=True), key=lambda row: -row[1])
        rows = [{"try": str(t), self.metric: self.shown(s), "chosen": f"{c:.0%}"} for t, s, c in ranked]
        rows += [{"try": f"{t}, dropped", self.metric: self.shown(s), "chosen": ""} for t, s in found.dropped.items()]
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

    def _worst(self, wrong: Sequence[int], cells: Sequence[list[str]], last: str) -> list[Block]:
        rows = []
        for n, shown in zip(wrong[:_SHOWN], cells, strict=False):
            text = " / ".join(self.table.rows.texts[self.found.rows[n]])
            cut = text if len(text) <= _LETTERS else f"{text[:_LETTERS]} …"
            rows.append([str(self.table.given.places[self.found.rows[n]]), " ".join(cut.split()), *shown])
        return [
            Heading("Rows that it is most wrong about"),
            Paragraph("Each was predicted by a network that had not seen it. Look for wrong labels here."),
            Table(["row", "text", "label", "predicted", last], rows, texts=(1,)),
        ]

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
            if self.names:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.legend()
        return Picture(
            path, "Scores by the number of rows: measured for a linear probe, extrapolated for the chosen try."
        )

    def _made(self) -> list[str]:
        found, given = self.found, self.model
        score, low, high = map(self.shown, found.in_folds)
        spent = duration(found.seconds) + f", {found.at_a_time} at a time" * (found.at_a_time > 1)
        spent += ", in bfloat16, which is faster on this machine" * found.in_bfloat16
        said = [
            f"Model {given.model}, seed {given.seed}, {found.trainings} trainings in {spent}.",
            f"Tries raced over folds of the rows; those that were hardly the best were dropped. The score is that of "
            f"BBC-CV (Tsamardinos et al., 2018), {score} ({low} to {high}) for training on {found.trained_on:.0%} of "
            f"the rows; training on all of them lowers errors by the power {found.certain_decay:.2f} of the number of "
            f"rows: that of a linear probe's learning curve, "
            f"{found.decay:.2f}, less its standard error.",
        ]
        return said + [f"Rows left out, with {why}: {len(rows)}." for why, rows in self.table.given.left_out.items()]
