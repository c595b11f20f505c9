"""Made-up data in the hub's columns, one maker for each kind of task, and a tiny random model for each."""

import bz2
import gzip
import json
import random

import datasets
import pandas as pd
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

NAMES = {"Anna": "PER", "Bert": "PER", "Rome": "LOC", "Oslo": "LOC", "Acme": "ORG"}
WORDS = ["red", "green", "blue", "one", "two", "three", "near", "far", "the", "a", "went", "saw"]
GERMAN = {"red": "rot", "green": "gruen", "blue": "blau", "one": "eins", "two": "zwei", "three": "drei"}


def words(rng, least=3, most=6):
    return [rng.choice(WORDS) for _ in range(rng.randint(least, most))]


def pair(rng, labels=("entailment", "neutral", "contradiction")):
    label = rng.randrange(len(labels))
    first = " ".join(words(rng))
    return {"premise": first, "hypothesis": f"{WORDS[label]} {' '.join(words(rng))}", "label": label, "idx": 0}


def similarity(rng):
    number = rng.randrange(6)
    return {"sentence1": " ".join(words(rng)), "sentence2": " ".join([WORDS[number]] * 3), "label": float(number)}


def entities(rng):
    tokens, tags = [], []
    for word in words(rng):
        if rng.random() < 0.4:
            name = rng.choice(list(NAMES))
            tokens += [name, "Smith"]
            tags += [f"B-{NAMES[name]}", f"I-{NAMES[name]}"]
        tokens.append(word)
        tags.append("O")
    return {"id": "0", "tokens": tokens, "ner_tags": tags}


def endings(rng):
    label, cue = rng.randrange(4), rng.choice(["red", "green", "blue"])
    others = ["one", "two", "three", "near"]
    choices = {f"ending{i}": f"{cue} {cue}" if i == label else f"{others[i]} far" for i in range(4)}
    return {"sent1": f"the {cue}", "sent2": "a", **choices, "label": label, "video-id": "x"}


def translation(rng):
    source = [rng.choice(list(GERMAN)) for _ in range(5)]
    return {"translation": {"en": " ".join(source), "ro": " ".join(GERMAN[word] for word in source)}}


#: a built-in task of each kind, with the maker of its rows and the name of the tiny model for it
KINDS = {
    "mnli": (pair, "bert"),
    "stsb": (similarity, "bert"),
    "conll2003": (entities, "bert"),
    "swag": (endings, "bert"),
    "wmt16-en-ro": (translation, "marian"),
}


def make(maker, count, seed):
    rng = random.Random(seed)
    return [maker(rng) for _ in range(count)]


def write(folder, train=96, validation=32, maker=pair, **others):
    """Made-up splits as JSON lines; ``others`` are further splits, by name."""
    return write_splits(folder, train=make(maker, train, 0), validation=make(maker, validation, 1), **others)


def write_splits(folder, suffix="jsonl", **splits):
    """A file of rows for each split; of a data set, a .parquet file."""
    for split, rows in splits.items():
        write_rows(folder / f"{split}.{'parquet' if isinstance(rows, datasets.Dataset) else suffix}", rows)
    return folder


PACKED = {".gz": gzip.compress, ".bz2": bz2.compress}


def write_rows(path, rows):
    """A file of rows in the format that its name says, also packed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    form = (path.with_suffix("") if path.suffix in PACKED else path).suffix.lower()
    if form == ".parquet":
        (rows if isinstance(rows, datasets.Dataset) else datasets.Dataset.from_list(rows)).to_parquet(path)
        return
    if form == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    elif form == ".json":
        text = json.dumps(rows, indent=1)
    else:
        text = pd.DataFrame(rows).to_csv(sep="\t" if form == ".tsv" else ",", index=False)
    path.write_bytes(PACKED.get(path.suffix, bytes)(text.encode()))


def save(folder, *parts):
    """Save a model and its tokenizer in one folder."""
    for part in parts:
        part.save_pretrained(folder)
    return folder


def word_pieces(texts, vocab_size=80):
    """A fast tokenizer of word pieces, as BERT's, trained on texts."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


TEXTS = [*WORDS, *NAMES, "Smith", *GERMAN.values()]


def tiny_bert(folder, **options):
    """Save a tiny random BERT, without a head, and its tokenizer."""
    tokenizer = word_pieces(TEXTS, 200)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "initializer_range": 0.1}
    return save(folder, hf.BertModel(hf.BertConfig(**sizes, **options)), tokenizer)


def tiny_marian(folder, texts=TEXTS):
    """Save a tiny random Marian, and a tokenizer of words: Marian's own wants files made by sentencepiece."""
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    sizes = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    sizes |= {"vocab_size": len(tokenizer), "d_model": 32, "max_position_embeddings": 64, "init_std": 0.1}
    special = {"pad": 0, "eos": 1, "bos": 1, "decoder_start": 0, "forced_eos": 1}
    special = {f"{name}_token_id": number for name, number in special.items()}
    return save(folder, hf.MarianMTModel(hf.MarianConfig(**sizes, **special)), tokenizer)
