"""``attnreg fit`` and ``attnreg predict`` with their files: folder, model, report, rows with predictions."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from attnreg._files import write_text
from attnreg.errors import InputError, StoppedError, UsageError, one_line
from attnreg.experiments.fit.clock import seconds_of
from attnreg.experiments.fit.estimators import SETUP, TextClassifier, TextModel, TextRegressor
from attnreg.experiments.fit.report import Report
from attnreg.experiments.fit.table import (
    FittedRows,
    LabelledTexts,
    named_columns,
    read_table,
    text_column,
    texts_of_rows,
)
from attnreg.experiments.folder.run_folder import OutputFolder, RunReader, free_folder
from attnreg.experiments.results.document import save, save_rows, with_predictions
from attnreg.experiments.results.saved_model import SavedModel
from attnreg.experiments.tasks.loading.files import named, stem_of

_MOST_COLUMNS = 20  # of probabilities


def fit_and_report(data: Path, table: FittedRows, output_dir: Path | None, threads: int | None, **options: Any) -> None:
    """Fit in a folder, where a fit with the same rows and options goes on, and write model and report."""
    if threads:
        torch.set_num_threads(threads)
    kind = TextRegressor if table.rows.answers.classes is None else TextClassifier
    model = kind(**options, verbose=True)
    usual = Path("runs") / f"fit-{stem_of(named(data))}"
    folder, note = free_folder(output_dir or usual, "a fit", lambda path: model.other_settings(path, table.rows))
    if note:
        print(note)
    result_file, reader = folder / "result.json", RunReader(folder)
    with OutputFolder(folder, "fit", SETUP).locked():
        earlier = reader.result if reader.finished else {}
        if earlier and seconds_of(options["budget"]) <= seconds_of(earlier["budget"]):
            print(f"{earlier['promise']}\nThis fit has ended. With a larger --budget, it goes on.")
            return
        result_file.unlink(missing_ok=True)
        again = f"The same command continues the fit in {folder}."
        try:
            model.set_params(folder=folder).fit(table.rows, None)
            model.save(folder / "model")
            report = Report(model, table, folder, _tested(model, table.test))
            save(report.blocks(), folder)
            text = report.promise.replace("**", "")
            content = {"promise": text, "budget": options["budget"], **model.outcome_.summary()}
            write_text(result_file, json.dumps(content, indent=2) + "\n")
        except KeyboardInterrupt:
            raise StoppedError(f"Stopped. {again}", exit_code=130) from None
        except ConnectionError:  # a closed pipe, which click handles
            raise
        except (OSError, SafetensorError) as error:
            raise StoppedError(f"Cannot write the fit's files: {one_line(error)}. {again}") from error
        command = f"attnreg predict {shlex.quote(str(folder))} FILE"
        print(f"\n{text}{report.tested}\nModel and report saved to {folder}/. New rows: {command}")


def predict_file(model: Path, data: Path | None, text_columns: str | None, output: Path, device: str | None) -> str:
    """Write rows with the predictions of a fit or a run; return a message about them."""
    if RunReader(model).is_run:
        if text_columns is not None:
            raise UsageError("--text-columns is for the model of a fit: a run knows its columns.")
        rows = SavedModel(model, {}, None if data is None else str(data), device=device).predict()
        lines = [f"Predictions of {len(rows)} rows"]
    elif data is None:
        raise UsageError("Give DATA, the rows to predict.")
    else:
        rows, lines = _predicted(TextModel.load(model, device), data, text_columns)
    save_rows(rows, output)
    return f"{lines[0]} saved to {output}" + "".join(f"\n{line}" for line in lines[1:])


def _predicted(model: TextModel, data: Path, text_columns: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows with the predictions and the doubts of a fitted model, and the lines of a message about them."""
    if not (columns := read_table(data, ("test",))):
        raise InputError(f"No test file in {data}: give one file of rows.")
    names = named_columns(columns, "--text-columns", text_columns) or model.columns_
    if missing := [name for name in names if name not in columns]:
        if len(names) > 1:
            raise UsageError(
                f"{data} has no column {missing[0]!r}, which the model reads: use --text-columns NAME,NAME."
            )
        names = [text_column(columns)]
    texts = texts_of_rows(columns, names)
    doubts = [model.doubt(row) for row in texts]
    predictions = _class_predictions(model, texts, doubts) if isinstance(model, TextClassifier) else [
        {"prediction": float(f"{number:.6g}"), "cannot_judge": doubt}
        for number, doubt in zip(model.outputs(texts)[:, 0], doubts, strict=True)
    ]  # fmt: skip
    data_rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    rows = [with_predictions(row, prediction) for row, prediction in zip(data_rows, predictions, strict=True)]
    counts = Counter(filter(None, doubts))
    lines = [f"{count} row{'s' * (count > 1)}: {doubt}." for doubt, count in counts.items()]
    return rows, [f"Predictions of {len(rows)} rows, texts in {' and '.join(names)},", *lines]


def _class_predictions(
    classifier: TextClassifier, texts: list[tuple[str, ...]], doubts: list[str]
) -> list[dict[str, object]]:
    """Return the class of every row, its probability and, if classes are few, the probability of all classes."""
    shown = [*map(str, classifier.classes_)] if len(classifier.classes_) <= _MOST_COLUMNS else []
    rows = []
    for probabilities, doubt in zip(classifier.predict_proba(texts), doubts, strict=True):
        best = int(probabilities.argmax())
        rows.append({
            "prediction": str(classifier.classes_[best]), "probability": round(float(probabilities[best]), 4),
            "cannot_judge": doubt,
            **{f"probability of {name}": round(float(p), 4) for name, p in zip(shown, probabilities, strict=False)},
        })  # fmt: skip
    return rows


def _tested(model: TextModel, rows: LabelledTexts | None) -> str:
    """Return a sentence on the score on the rows of a test split; empty without rows."""
    if rows is None:
        return ""
    score = model.answers_.score_of_data(model.outputs(rows.texts), rows.labels, rows.row_numbers)
    return f" On the {len(rows.labels)} rows of the test split, it scores {model.answers_.shown(score)}."
