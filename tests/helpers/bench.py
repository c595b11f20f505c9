"""Benches of ``attnreg fit``: with a tiny model, and one that trains nothing."""

import numpy as np
import torch
import transformers as hf

import attnreg
from attnreg.experiments.fit.rows import Rows
from attnreg.experiments.fit.tries import Bench
from attnreg.experiments.tasks import get_task, load_data


def sentences(count):
    """Return different sentences of the built-in task."""
    return list(dict.fromkeys(load_data(get_task("agreement"))[1]["train"]["sentence"][:]))[:count]


def tiny_bench(model):
    """Return a bench of 120 sentences, and whether they begin with "the"."""
    texts = sentences(120)
    classifier = attnreg.TextClassifier(model)
    given = Rows.checked(texts, [text.split()[0] == "the" for text in texts])
    classifier.answers_, classifier.columns_ = given.answers, given.columns
    torch.manual_seed(0)  # of what is new in the network
    network = classifier._load(str(model))
    texts = classifier._dataset(given.texts, given.labels)
    return Bench(network, classifier._kind, texts, 16, torch.device("cpu"), 0)


def bench_with(config, tokenizer, folder):
    """Return such a bench with a model of a configuration, saved in a folder, and the tokenizer of another folder."""
    words = hf.AutoTokenizer.from_pretrained(tokenizer)
    config.pad_token_id, config.architectures = words.pad_token_id, config.architectures or []
    if config.is_encoder_decoder:  # its head reads the state of the last token, which must end the text
        config.decoder_start_token_id, config.eos_token_id = words.pad_token_id, words.sep_token_id
    words.save_pretrained(folder)
    hf.AutoModel.from_config(config).save_pretrained(folder)
    return tiny_bench(folder)


class MadeUp:
    """A bench on which tries take time and are right as often as told; nothing is trained."""

    seconds, width, batch_size, in_bfloat16, threads, ad_drop_layer, next_length = 0.01, 384, 16, False, 1, 0, 0

    def __init__(self, rows, time, right):
        self.rows, self.time, self.right = rows, time, right

    def measure(self):
        pass

    def slowness(self, which):
        return 1.0

    def has_memory_for(self, which):
        return True

    def out_of_fold(self, which, train, held, seed, tick):
        self.time[0] += self.seconds * which.passes * len(train)
        draw = np.random.default_rng([seed, *map(ord, str(which))])
        is_right = draw.random(len(held)) < self.right(which)
        answers = np.where(is_right, self.rows.labels[held], 1 - self.rows.labels[held])
        return np.eye(2)[answers] * 4
