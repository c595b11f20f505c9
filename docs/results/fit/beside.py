"""`attnreg fit` beside what people use: one line per run, appended to a table that a later call goes on with.

Usage: python docs/results/fit/beside.py TABLE.csv --data DATA --models FOLDER ... [--sets cr mr ...] [--seeds 1]

A run draws its training rows by its seed (500, or all of a few-shot split), is trained in one thread, and is scored
once, on all test rows. Seconds are those of the processor. `setfit` needs the packages setfit and
sentence-transformers. The plan is in README.md beside this file.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import train_test_split

from attnreg import TextClassifier
from attnreg.experiments.fit import race
from attnreg.experiments.fit.clock import Clock

SHOTS = {"banking77", "clinc150"}  # published few-shot splits, whose rows are all taken
PAIRS = {"mrpc"}
COLUMNS = (
    "data",
    "rows",
    "model",
    "seed",
    "method",
    "score",
    "promised",
    "low",
    "high",
    "majority",
    "chosen",
    "seconds",
)
BUDGET = 600  # seconds of one core
Row = dict[str, Any]


def split(folder: Path, name: str) -> tuple[list[Any], list[str]]:
    """Return the texts, or pairs, and the labels of a split."""
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8", newline="\n") as file:
        rows = [json.loads(line) for line in file]
    pairs = folder.name in PAIRS
    texts = [(row["sentence1"], row["sentence2"]) if pairs else row["sentence"] for row in rows]
    return texts, [str(row["label"]) for row in rows]


def drawn(texts: list[Any], labels: list[str], seed: int, rows: int) -> tuple[list[Any], list[str]]:
    """Return as many rows, with the share of each class."""
    some, _ = train_test_split(np.arange(len(texts)), train_size=rows, random_state=seed, stratify=labels)
    return [texts[i] for i in some], [labels[i] for i in some]


def fit(model: str, seed: int, texts: list[Any], labels: list[str]) -> tuple[Callable[[list[Any]], Any], Row]:
    """The best that `attnreg fit` finds in its budget."""
    found = TextClassifier(model, budget=BUDGET, seed=seed, device="cpu").fit(texts, labels)
    promised, low, high = found.score_
    return found.predict, {"promised": promised, "low": low, "high": high, "chosen": found.best_}


def fit_plainly(model: str, seed: int, texts: list[Any], labels: list[str]) -> tuple[Callable[[list[Any]], Any], Row]:
    """The same without AD-DROP among its tries."""
    later, race.LATER = race.LATER, race.LATER[1:]
    try:
        return fit(model, seed, texts, labels)
    finally:
        race.LATER = later


def trainer(epochs: int) -> Any:
    """The Trainer of transformers with its defaults, but for the number of epochs."""

    def train(model: str, seed: int, texts: list[Any], labels: list[str]) -> tuple[Callable[[list[Any]], Any], Row]:
        import transformers as hf

        hf.set_seed(seed)
        classes = sorted(set(labels))
        tokenizer = hf.AutoTokenizer.from_pretrained(model)
        network = hf.AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(classes))

        def encoded(some: list[Any]) -> list[Any]:
            pairs = [text if isinstance(text, tuple) else (text,) for text in some]
            return [dict(tokenizer(*pair, truncation=True, max_length=256)) for pair in pairs]

        rows = [{**each, "labels": classes.index(label)} for each, label in zip(encoded(texts), labels, strict=True)]
        arguments = hf.TrainingArguments(
            "trainer",
            num_train_epochs=epochs,
            seed=seed,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        made = hf.Trainer(network, arguments, train_dataset=rows, processing_class=tokenizer)
        made.train()

        def predict(some: list[Any]) -> Any:
            logits = made.predict(encoded(some)).predictions  # type: ignore[arg-type]
            return np.array(classes)[logits.argmax(1)]

        return predict, {}

    return train


def logistic(model: str, seed: int, texts: list[Any], labels: list[str]) -> tuple[Callable[[list[Any]], Any], Row]:
    """Logistic regression, with scikit-learn's defaults, on the mean of the last layer's states."""
    import transformers as hf
    from sklearn.linear_model import LogisticRegression

    tokenizer, network = hf.AutoTokenizer.from_pretrained(model), hf.AutoModel.from_pretrained(model).eval()

    @torch.no_grad()
    def embedded(some: list[Any]) -> Any:
        found = []
        for begin in range(0, len(some), 64):
            part = some[begin : begin + 64]
            columns = [*map(list, zip(*part, strict=True))] if isinstance(part[0], tuple) else [part]
            batch = tokenizer(*columns, truncation=True, max_length=256, padding=True, return_tensors="pt")
            weights = batch["attention_mask"][..., None].float()
            states = (network(**batch).last_hidden_state * weights).sum(1) / weights.sum(1)
            found.append(torch.nn.functional.normalize(states).numpy())
        return np.concatenate(found)

    fitted = LogisticRegression(max_iter=1000).fit(embedded(texts), labels)
    return lambda some: fitted.predict(embedded(some)), {}


def words(model: str, seed: int, texts: list[Any], labels: list[str]) -> tuple[Callable[[list[Any]], Any], Row]:
    """Logistic regression on TF-IDF weights of words, with scikit-learn's defaults: no pretrained model."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    return make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=1000)).fit(texts, labels).predict, {}


def setfit(model: str, seed: int, texts: list[Any], labels: list[str]) -> tuple[Callable[[list[Any]], Any], Row]:
    """SetFit with its defaults, but for 20 pairs a row: with all pairs, 500 rows would take hours of a core."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    network = SetFitModel.from_pretrained(model, device="cpu")
    arguments = TrainingArguments("setfit", num_iterations=20, seed=seed, report_to="none", show_progress_bar=False)
    Trainer(network, arguments, train_dataset=Dataset.from_dict({"text": texts, "label": labels})).train()
    return lambda some: np.asarray(network.predict(some)), {}


METHODS = {
    "logistic regression": logistic, "Trainer, 3 epochs": trainer(3), "Trainer, 10 epochs": trainer(10),
    "fit": fit, "fit without AD-DROP": fit_plainly, "SetFit": setfit,
    "TF-IDF": words,
}  # fmt: skip


def main() -> None:
    """Make the runs that the table does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--sets", nargs="+", default=["cr", "mr", "banking77", "clinc150"])
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=800)
    parser.add_argument("--rows", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    Clock.now = staticmethod(time.process_time)  # the budget is of one core, on a machine that others use, too
    done = set()
    if options.table.is_file():
        with options.table.open(newline="", encoding="utf-8") as file:
            done = {tuple(row[name] for name in COLUMNS[:5]) for row in csv.DictReader(file)}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in options.sets:
            texts, labels = split(options.data / name, "train")
            if name not in SHOTS:
                texts, labels = drawn(texts, labels, seed, options.rows)
            test, gold = split(options.data / name, "test")
            for model in options.models:
                for method in options.methods:
                    key = (name, str(len(texts)), Path(model).name, str(seed), method)
                    if key in done or (method == "SetFit" and name in PAIRS):
                        continue
                    began = time.process_time()
                    predict, more = METHODS[method](model, seed, texts, labels)
                    seconds = time.process_time() - began
                    score = float((np.asarray(predict(test)) == np.array(gold)).mean())
                    majority = max(map(gold.count, set(labels))) / len(gold)
                    row = {
                        **dict(zip(COLUMNS, key, strict=False)),
                        "score": score,
                        "majority": majority,
                        **more,
                        "seconds": round(seconds),
                    }
                    print(row, flush=True)
                    new = not options.table.is_file()
                    with options.table.open("a", newline="", encoding="utf-8") as file:
                        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                        if new:
                            writer.writeheader()
                        writer.writerow(row)


if __name__ == "__main__":
    main()
