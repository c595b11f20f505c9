"""A bench of ``attnreg fit`` with a tiny model."""

import torch
from accelerate import Accelerator

import attnreg
from attnreg.experiments.fit.rows import Rows
from attnreg.experiments.fit.tries import Bench
from attnreg.experiments.tasks import get_task, load_data


def tiny_bench(model):
    """Return a bench of 120 sentences, and whether they begin with "the"."""
    texts = list(dict.fromkeys(load_data(get_task("agreement"))[1]["train"]["sentence"][:]))[:120]
    classifier = attnreg.TextClassifier(model)
    given = Rows.checked(texts, [text.split()[0] == "the" for text in texts])
    classifier.answers_, classifier.columns_ = given.answers, given.columns
    torch.manual_seed(0)  # of what is new in the network
    classifier._load(str(model))
    encoded = classifier._kind.encode(classifier._dataset(given.texts, given.labels))
    return Bench(classifier.network_, classifier._kind, encoded, 16, Accelerator(cpu=True), 0)
