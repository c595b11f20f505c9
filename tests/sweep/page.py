"""``python -m tests.sweep.page`` tries every model type and writes docs/families.md and .csv, unless something is wrong."""

import argparse
import csv
import dataclasses
import functools
import json
import multiprocessing
import os
import re
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

from tests.sweep.other_ways import OTHER_WAYS
from tests.sweep.verdict import Verdict, verdict
from tests.sweep.zoo import not_built, specimens

# The most used types, the most used first.
POPULAR = """
    bert roberta xlm-roberta deberta-v2 modernbert distilbert electra albert mpnet gpt2 llama qwen3 qwen2 mistral
    gemma3_text phi3 t5 bart marian vit dinov2 clip whisper wav2vec2 longformer big_bird bloom falcon gpt_neox opt
    mamba reformer fnet perceiver
"""
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
TABLE = PAGE.with_suffix(".csv")

TEXT = """# Model families

Tried on a tiny model of every model type of transformers {version} that can be built without a hub: **{right} of {tried} types are
right, {refused} are refused, 0 are wrong.** [The table](families.csv) has a row for each
`AutoConfig.from_pretrained(NAME).model_type`; DeBERTa-v3 is `deberta-v2`.

Of the most used, these are right: {popular}.

These are refused: {unpopular}.

| result | what it means | types |
|---|---|---:|
| right | all checks below pass | {plain} |
| right in part | the rest is left as it is, and `attach` says so | {said} |
| right beside other paths | positions see each other also by other ways than attention, such as convolutions or recurrent layers | {others} |
| refused | `attach`, or the first masked pass, raises a sentence that names the cause | {refused} |
| not tried | it cannot be built here; the table has the reason | {absent} |

Right means, on two samples, one of them padded: nothing comes through dropped keys or padding, rates follow from the model's own weights,
[hidden states](providers/hidden-dropout.md#where-hidden-states-are) are those of each block, detaching leaves no trace, eval mode is bitwise the plain
model, and one seed repeats the masks, also under gradient checkpointing.

Which regularizer works in which kind of model is in [another table](providers/families.md). Both are made by commands
([CONTRIBUTING](../CONTRIBUTING.md)).
"""


def _try(number, results=None):
    specimen = specimens()[number]
    file = None if results is None else results / f"{specimen.name}.json"
    if file is not None and file.exists():
        known = json.loads(file.read_text())
        return Verdict(**{field.name: known[field.name] for field in dataclasses.fields(Verdict)})
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = verdict(specimen)
    if file is not None:
        file.write_text(json.dumps(dataclasses.asdict(found)))
    return found


def main():
    """Try all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="folder with a file per model type; those that have one are done")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes")
    given = parser.parse_args()
    if given.results is not None:
        given.results.mkdir(parents=True, exist_ok=True)
    attempt = functools.partial(_try, results=given.results)
    with multiprocessing.get_context("fork").Pool(given.jobs, maxtasksperchild=40) as pool:
        found = list(pool.imap(attempt, range(len(specimens())), chunksize=4))
    wrong = [each for each in found if each.wrong]
    for each in wrong:
        print(each.name, each.wrong, file=sys.stderr)
    if wrong:
        sys.exit(f"{len(wrong)} of {len(found)} model types are wrong.")
    write(found)


def write(found):
    """Write the page, and the table of all types beside it."""
    rows = table(found)
    PAGE.write_text(page(rows), encoding="utf-8")
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("model type", "result", "detail"), *rows])


def table(found):
    """A row for each model type: its name, the result, and the reason."""
    rows = [(name, "not tried", reason) for name, reason in not_built().items()]
    for each in found:
        ways = OTHER_WAYS.get(each.name)
        if each.is_refused:
            rows.append((each.name, "refused", _cause(each.note)))
        else:
            result = "right beside other paths" if ways else "right in part" if each.note else "right"
            rows.append((each.name, result, "; ".join(filter(None, (each.note, ways)))))
    return sorted(rows)


def page(rows):
    """The page for these rows."""
    results = Counter(result for _, result, _ in rows)
    refused = {name: result == "refused" for name, result, _ in rows if result != "not tried"}
    known = {which: [f"`{name}`" for name in POPULAR.split() if refused.get(name) is which] for which in (False, True)}
    return TEXT.format(
        version=transformers.__version__,
        right=len(refused) - results["refused"],
        tried=len(refused),
        refused=results["refused"],
        popular=", ".join(known[False]),
        unpopular=", ".join(known[True]),
        plain=results["right"],
        said=results["right in part"],
        others=results["right beside other paths"],
        absent=results["not tried"],
    )


def _cause(sentence):
    """Without the model's names and what to do, so that the same cause reads the same."""
    if found := re.search(r"\([^():]+: ([^():]+)\)", sentence):  # of the first place
        return found[1]
    short = re.sub(r" Pass `example_inputs`.*| Call `model.set_attn.*", "", sentence, flags=re.DOTALL)
    return re.sub(r"^No attention that can be masked was found in \w+:", "no attention:", short)


if __name__ == "__main__":
    main()
