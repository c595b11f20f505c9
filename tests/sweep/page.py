"""``python -m tests.sweep.page`` tries every model type and writes docs/families.md, unless something is wrong."""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import re
import sys
import warnings
from collections import defaultdict
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

TEXT = """# Model families

Tried on a tiny model of every model type of transformers {version} that can be built without a hub: **{right} of {tried} types are
right, {refused} are refused, {wrong} are wrong.** Made by `python -m tests.sweep.page`; `pytest -m slow tests/sweep` asks for the same.
Right means, in training mode on two samples, one of them padded:

- a mask that keeps everything changes nothing;
- a token that is a key nowhere has no influence on other positions;
- where everything is dropped, no position looks at padding, nor at what comes later in a decoder;
- there are as many sites as layers of self-attention, and rates are those that follow from the model's own weights;
- what flows through a site is attention: its rows sum to 1, and it looks only where the model allows it;
- a [regularizer of hidden states](providers/hidden-dropout.md#where-hidden-states-are) is asked once at the input and output of each
  block, samples are the first dimension of what it gets, and it knows what is padding; or `attach` refuses it;
- attaching and detaching leave every attribute of every module as it was, and in eval mode the model is bitwise the plain one;
- under one seed, a second pass, the parts of the model, and each `get_…_features` repeat the masks;
- a copy of a block is plain; gradients under checkpointing of blocks, reentrant or not, are those without it, or it is refused;
- with one token more or less than when it was attached, the first two checks hold.

Which regularizer works in which kind of model is in [another table](providers/families.md).

## The most used

{popular}

## Right

{listed}

## Right, and `attach` says what is not covered

| model type | attention that is left as it is |
|---|---|
{said}

## Right, and dropped positions come through elsewhere

In these, positions see each other by other ways than attention, which no mask on attention closes.

| model type | by |
|---|---|
{others}

## Refused

`attach`, or the first masked pass, raises a sentence that names the cause.

| model type | cause |
|---|---|
{causes}

## Not tried

| model type | reason |
|---|---|
{absent}
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
    PAGE.write_text(page(found), encoding="utf-8")


def page(found):
    """The page for what was found."""
    right = [each for each in found if not each.is_refused]
    plain = [each for each in right if not each.note and each.name not in OTHER_WAYS]
    return TEXT.format(
        version=transformers.__version__,
        right=len(right),
        tried=len(found),
        refused=len(found) - len(right),
        wrong=sum(bool(each.wrong) for each in found),
        popular=_popular({each.name: each.is_refused for each in found}),
        listed=", ".join(f"`{each.name}`" for each in plain) + ".",
        said=_rows({each.name: each.note for each in right if each.note}),
        others=_rows({each.name: OTHER_WAYS[each.name] for each in right if each.name in OTHER_WAYS}),
        causes=_rows({each.name: _cause(each.note) for each in found if each.is_refused}),
        absent=_rows(not_built()),
    )


def _popular(refused):
    """Say which of the most used types are right, and which are refused."""
    known = {which: [f"`{name}`" for name in POPULAR.split() if refused.get(name) is which] for which in (False, True)}
    return f"Right: {', '.join(known[False])}.\n\nRefused: {', '.join(known[True])}."


def _rows(reasons):
    """One row for all that share a reason."""
    names = defaultdict(list)
    for name, reason in reasons.items():
        names[reason].append(f"`{name}`")
    return "\n".join(f"| {', '.join(each)} | {reason} |" for reason, each in names.items())


def _cause(sentence):
    """Without the model's names and what to do, so that the same cause reads the same."""
    if found := re.search(r"\([^():]+: ([^():]+)\)", sentence):  # of the first place
        return found[1]
    short = re.sub(r" Pass `example_inputs`.*| Call `model.set_attn.*", "", sentence, flags=re.DOTALL)
    return re.sub(r"^No attention that can be masked was found in \w+:", "no attention:", short).replace("|", "\\|")


if __name__ == "__main__":
    main()
