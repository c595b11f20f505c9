"""The report of a fit: the chosen try and its promised score, what to do next, and where the model errs."""

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
_SURE = 0.9  # probability above which a prediction counts as sure


class Report:
    """The blocks of the report of a fitted classifier or regressor, whose rows come from a file."""

    def __init__(self, model: TextModel, table: FittedRows, folder: Path, tested: str) -> None:
        self.model, self.table, self.folder, self.outcome = model, table, folder, model.outcome_
        self.tested = tested  #: a sentence on test rows, or an empty text
        self.answers = model.answers_
        self.shown, self.metric = self.answers.shown, self.answers.metric.replace("_", " ")
        self.names = [] if self.answers.classes is None else [str(name) for name in self.answers.classes]
        self.all_labels = table.rows.labels
        self.labels = self.all_labels[self.outcome.rows]
        self.predicted = self.answers.predicted(self.outcome.logits)
        self.probabilities = special.softmax(self.outcome.logits / self.outcome.temperature, axis=1)
        self.sure = self.probabilities.max(1)

    @property
    def promise(self) -> str:
        """The chosen try and the score that it will have, beside simpler predictors."""
        outcome = self.outcome
        score, low, high = outcome.estimate
        scores = {**dict(zip(outcome.tries, outcome.scores, strict=True)), **outcome.dropped}
        plain = max((candidate for candidate in scores if candidate.is_plain), default=None, key=scores.__getitem__)
        beside = "there was no time for plain fine-tuning"
        if plain is not None:
            early = ", when it was dropped" * (plain in outcome.dropped)
            beside = f"plain fine-tuning, on {outcome.trained_on:.0%} of the rows, {self.shown(scores[plain])}{early}"
        simplest, predictions = self.answers.trivial(self.all_labels)
        trivial = self.answers(self.all_labels, predictions)
        no_more = ", no less: nothing was learned that this metric shows" * bool(trivial >= score - 1e-9)
        if no_more and self.answers.metric == "accuracy":
            no_more += " (for rare classes, use --metric macro_f1)"
        return (
            f"Chosen: **{outcome.best}**. On new rows like these it will score **{self.shown(score)}** "
            f"{self.answers.in_words} (95 % interval {self.shown(low)} to {self.shown(high)}). The {simplest} scores "
            f"{self.shown(trivial)}{no_more}; {beside}."
        )

    def blocks(self) -> list[Block]:
        """Return the whole report."""
        outcome, kind = self.outcome, "classifier" if self.names else "regressor"
        return [
            Heading(f"A {kind} of {len(self.all_labels)} rows: {self.folder.name}"),
            Paragraph(self.promise + self.tested),
            Contents(),
            Heading("What to do next"),
            *map(Paragraph, self._advice()),
            self._curve(),
            Heading("What was tried"),
            Paragraph(
                f"Every try was trained on {outcome.trained_on:.0%} of the rows and scored on rows that it had not "
                f"seen, {len(outcome.rows)} in all. Among the tries within half a standard error of the best score, "
                "the one that usually scores most is chosen. The last column is the share of bootstrap samples that "
                "choose it."
            ),
            self._tries(),
            *(self._of_classes() if self.names else self._of_numbers()),
            Heading("How it was made"),
            *map(Paragraph, self._method()),
        ]

    def _of_classes(self) -> list[Block]:
        scores = {name: score_of(name, self.labels, self.predicted, len(self.names)) for name in OF_CLASSES}
        shown = " and ".join(f"{score:.1%} {name.replace('_', ' ')}" for name, score in scores.items())
        label_probabilities = self.probabilities[np.arange(len(self.labels)), self.labels]
        wrong = [n for n in np.argsort(label_probabilities) if self.predicted[n] != self.labels[n]]
        cells = [[self.names[self.labels[n]], self.names[self.predicted[n]], f"{self.sure[n]:.0%}"] for n in wrong]
        return [
            Heading("Classes"),
            Paragraph(f"On rows that it had not seen, the chosen try had {shown}."),
            self._classes(),
            Heading("What is taken for what"),
            self._confusions(),
            *self._worst(wrong, cells, "probability"),
            Heading("Probabilities"),
            *self._calibration(),
        ]

    def _of_numbers(self) -> list[Block]:
        labels, predicted = self.answers.real(self.labels), self.answers.real(self.predicted)
        scores = " and ".join(f"{score_of(name, labels, predicted, 1):.2f} ({name})" for name in OF_NUMBERS)
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
                f"On rows that it had not seen, predictions of the chosen try correlate with labels by {scores}. They "
                f"are off by {errors.mean():.3g} on average; the mean of all labels, by {usual:.3g}."
            ),
            Picture(path, "Predictions of held-out rows, by their labels."),
            *self._worst(wrong, cells, "off by"),
        ]

    def _advice(self) -> list[str]:
        outcome, half = self.outcome, self.outcome.seconds / 2
        twice = self.shown(1 - (1 - outcome.estimate.score) * 0.5**outcome.decay)
        advice = [f"**More rows:** twice as many would score about {twice}, by the learning curve of a linear probe."]
        early = [score for t, score in zip(outcome.tries, outcome.scores, strict=True) if outcome.since[t] < half]
        gain = max(outcome.scores) - max(early, default=0.0)
        points = f"{100 * gain:.1f} points" if self.names else f"{gain:.2f}"
        gained = f"ways that were first tried in the second half of {duration(outcome.seconds)} gained {points}. "
        advice.append(f"**More time:** {gained * bool(early)}{outcome.ended}")
        if self.names and (doubtful := int(((self.predicted != self.labels) & (self.sure > _SURE)).sum())):
            have = "have" if doubtful > 1 else "has"
            advice.append(
                f"**Labels:** of {len(self.labels)} rows, {doubtful} {have} another label than the class predicted "
                f"with more than {_SURE:.0%} probability: check the rows shown below."
            )
        return advice

    def _tries(self) -> Table:
        outcome = self.outcome
        ranked = sorted(zip(outcome.tries, outcome.scores, outcome.chosen, strict=True), key=lambda row: -row[1])
        rows = [{"try": str(t), self.metric: self.shown(s), "chosen": f"{c:.0%}"} for t, s, c in ranked]
        rows += [{"try": f"{t}, dropped", self.metric: self.shown(s), "chosen": ""} for t, s in outcome.dropped.items()]
        return Table.of(rows)

    def _classes(self) -> Table:
        numbers = range(len(self.names))
        scores = sk.precision_recall_fscore_support(self.labels, self.predicted, labels=numbers, zero_division=0.0)
        counts = np.bincount(self.labels, minlength=len(self.names))  # as for the scores
        return Table(
            ["class", "rows", "precision", "recall", "F1"],
            [[self.names[n], str(counts[n]), *(f"{score[n]:.1%}" for score in scores[:3])] for n in numbers],
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
            text = " / ".join(self.table.rows.texts[self.outcome.rows[n]])
            cut = text if len(text) <= _LETTERS else f"{text[:_LETTERS]} …"
            rows.append([str(self.table.labelled.row_numbers[self.outcome.rows[n]]), " ".join(cut.split()), *shown])
        return [
            Heading("Rows that it is most wrong about"),
            Paragraph("They were predicted by networks that had not seen them. Look for wrong labels here."),
            Table(["row", "text", "label", "predicted", last], rows, texts=(1, 2, 3) if self.names else (1,)),
        ]

    def _calibration(self) -> list[Block]:
        gaps = [
            calibration_error(torch.tensor(self.outcome.logits / t).softmax(-1), torch.tensor(self.labels))
            for t in (1.0, self.outcome.temperature)
        ]
        path = self.folder / "plots" / "calibration.png"
        with picture(path, width=5.0, height=3.6, grid="both") as (axes,):
            right, probability = calibration_curve(self.predicted == self.labels, self.sure, n_bins=BINS)
            axes.plot([0, 1], [0, 1], "--", color="#888888", lw=1)
            axes.plot(probability, right, "o-", color=COLORS[1])
            axes.set(xlabel="probability of the predicted class", ylabel="share that is right")
        return [
            Paragraph(
                f"The head is divided by the temperature {self.outcome.temperature:.2f}, fitted to held-out rows. The "
                f"mean gap between probability and the share that is right is {gaps[1]:.1%}; without it, {gaps[0]:.1%}."
            ),
            Picture(path, "Where the line is below the diagonal, predictions are less often right than they say."),
        ]

    def _curve(self) -> Picture:
        outcome, path, n = self.outcome, self.folder / "plots" / "rows.png", len(self.all_labels)
        score, low, high = outcome.estimate
        with picture(path, width=5.4, height=3.4, grid="both") as (axes,):
            sizes = np.geomspace(min(outcome.curve), 4 * n, 50)
            axes.plot(sizes, 1 - (1 - score) * (n / sizes) ** outcome.decay, "--", color=COLORS[1])
            axes.errorbar([n], [score], [[score - low], [high - score]], fmt="o", color=COLORS[1], label="chosen")
            axes.plot(*zip(*sorted(outcome.curve.items()), strict=True), "s-", color=COLORS[2], label="linear probe")
            shown = [*outcome.curve, n, 2 * n, 4 * n][1:]
            axes.set(xscale="log", xlabel="rows to train on", ylabel=self.metric)
            axes.set_xticks(shown, [*map(str, shown)])
            axes.minorticks_off()
            if self.names:
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.legend()
        return Picture(
            path, "Scores by the number of rows: measured for a linear probe, extrapolated for the chosen try."
        )

    def _method(self) -> list[str]:
        outcome, model = self.outcome, self.model
        score, low, high = map(self.shown, outcome.in_folds)
        spent = duration(outcome.seconds) + f", {outcome.at_a_time} at a time" * (outcome.at_a_time > 1)
        spent += ", in bfloat16, which is faster on this machine" * outcome.in_bfloat16
        sentences = [
            f"Model {model.model}, seed {model.seed}, {outcome.trainings} trainings in {spent}.",
            f"Tries raced over folds of the rows; tries that were probably not the best were dropped. The score is "
            f"from BBC-CV (Tsamardinos et al., 2018), {score} ({low} to {high}) for training on "
            f"{outcome.trained_on:.0%} of the rows; training on all rows lowers errors by the power "
            f"{outcome.certain_decay:.2f} of the number of rows: the power of a linear probe's learning curve, "
            f"{outcome.decay:.2f}, less its standard error.",
        ]
        if len(outcome.averaged) > 1:
            ways = " and ".join(f"{count} of {way}" for way, count in Counter(outcome.averaged).items())
            sentences.append(
                f"The weights are the mean of trainings on all rows, {ways} (model soups, Wortsman et al., 2022), "
                "which usually scores more than what was promised for one."
            )
        left_out = self.table.labelled.left_out
        return sentences + [f"Rows left out, with {why}: {len(rows)}." for why, rows in left_out.items()]
