"""Masked language models: what they hide, and pre-training on it."""

import json

import datasets
import pytest
import torch

from attnreg.errors import InputError
from attnreg.experiments.setup.batches import TrainBatches, in_order, to_score
from attnreg.experiments.tasks import agreement, get_task, load_data, load_model
from attnreg.experiments.tasks.kinds import kind_class
from tests.helpers import task_data as made
from tests.helpers.commands import assert_sentence, ran, read_lines
from tests.helpers.reference import close

SMALL = ["--epochs", 2, "--train-size", 128, "--output-dir", "out"]


@pytest.fixture(scope="module")
def masked():
    task = get_task("agreement-words")
    _, tokenizer = load_model(task)
    return kind_class("masked-lm")(task, tokenizer, 32)


@pytest.fixture(scope="module")
def encoded(masked):
    return masked.encode(load_data(masked.task)[1]["train"].select(range(400))).remove_columns("reference")


def test_the_corpus_is_what_is_acceptable():
    splits = load_data(get_task("agreement-words"))[1]
    assert {row["label"] for rows in splits.values() for row in rows} == {1}
    assert {len(rows) for rows in splits.values()} <= set(range(40, 1050))


def test_fifteen_percent_of_words_are_guessed_most_of_them_hidden(masked, encoded):
    torch.manual_seed(0)
    rows = list(encoded)
    batch = masked.collate(rows)
    tokenizer = masked.tokenizer
    special = torch.tensor([tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id])
    whole = tokenizer.pad([{"input_ids": row["input_ids"]} for row in rows], return_tensors="pt")["input_ids"]
    words = ~torch.isin(whole, special)
    guessed = batch["labels"] != -100
    assert not (guessed & ~words).any()
    assert torch.equal(batch["labels"][guessed], whole[guessed])
    assert torch.equal(batch["input_ids"][~guessed], whole[~guessed])
    hidden = batch["input_ids"] == tokenizer.mask_token_id
    for share, of, expected in ((guessed, words, 0.15), (hidden, guessed, 0.8)):
        assert close(share[of].float().mean(), expected, int(of.sum()))


def test_a_batch_always_has_something_to_guess(masked, encoded):
    for seed in range(30):
        torch.manual_seed(seed)
        assert (masked.collate([encoded[0]])["labels"] != -100).any()


@pytest.mark.parametrize("provider", [pytest.param([], marks=pytest.mark.slow), ["--provider", "AttentionDropout(0.1, 'scores') & HeadMask(1, 'importance')"]])  # fmt: skip
def test_pre_training_with_checkpoints_ends_as_without(cli, tmp_path, provider):
    whole = ran(cli("recipe", "pretrain", *SMALL[:-1], "whole", *provider))
    assert "Perplexity of the hidden words: " in whole.output
    ran(cli("recipe", "pretrain", *SMALL, *provider, "--save-steps", 1, "--keep-checkpoints"))
    assert list((tmp_path / "out" / "checkpoints").glob("step-*"))
    for name in ("metrics.jsonl", "predictions.jsonl"):
        assert read_lines(tmp_path / "out" / name) == read_lines(tmp_path / "whole" / name)
    record = next(row for row in read_lines(tmp_path / "out" / "predictions.jsonl") if row["label"])
    assert len(record["label"]) == len(record["prediction"])


def test_training_draws_anew_in_each_epoch_and_evaluation_never(masked, encoded):
    labelled = masked.encode(load_data(masked.task)[1]["train"].select(range(64)))
    state = torch.get_rng_state()
    first, again = (in_order(labelled, 16, masked, torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(first, again, strict=True))
    batches = TrainBatches(labelled, 16, masked, 0, torch.device("cpu"))
    whole, skipped = list(batches.epoch(0)), list(batches.epoch(0, skip=2))
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(whole[2:], skipped, strict=True))
    other = {tuple(row) for batch in batches.epoch(1) for row in batch["labels"].tolist()}
    assert other != {tuple(row) for batch in whole for row in batch["labels"].tolist()}
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_hides_the_same_words_in_batches_of_any_size(masked):
    rows = masked.encode(load_data(masked.task)[1]["train"].select(range(64)))

    def hidden(size):
        scored, found = to_score(rows, size, masked, torch.device("cpu")), []
        for batch in scored.batches:
            there = batch["attention_mask"].bool()
            pairs = zip(batch["input_ids"], batch["labels"], there, strict=True)
            found += [(ids[kept].tolist(), labels[kept].tolist()) for ids, labels, kept in pairs]
            assert (batch["labels"][~there] == -100).all()
        return [row for _, row in sorted(zip(scored.order, found, strict=True))]

    assert hidden(64) == hidden(7) == hidden(1)
    shown, labels = zip(*hidden(64), strict=True)
    share = sum(label != -100 for row in labels for label in row) / sum(len(row) - 2 for row in labels)
    assert 0.1 < share < 0.2
    single = masked.to_score(masked.encode(load_data(masked.task)[1]["train"].select([0])))
    assert set(single["labels"][0]) != {-100}
    masks = [[token == masked.tokenizer.mask_token_id for token in row] for row in shown]
    assert len({tuple(row) for row in masks}) > 10  # not the same places in each row
    state = torch.get_rng_state()
    hidden(8)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_tasks_and_models_are_one_sentence(cli, tmp_path):
    result = cli("recipe", "pretrain", "--task", "agreement", *SMALL)
    assert_sentence(result, 2, "Pre-training needs a task of plain text, got agreement")
    assert cli("recipe", "finetune", *SMALL).exit_code == 0
    result = cli("recipe", "pretrain", "--model", tmp_path / "out" / "model", *SMALL[:-1], "other")
    assert_sentence(result, 1, "has no mask token: choose a masked language model")
    assert not (tmp_path / "other").exists()


def test_empty_lines_are_left_out(masked):
    texts = datasets.Dataset.from_list([{"sentence": text} for text in ("", "the boys sleep", " ", "the girl sleeps")])
    encoded = masked.encode(texts)
    assert list(encoded["input_ids"]) == list(masked.encode(texts.select([1, 3]))["input_ids"])
    with pytest.raises(InputError, match="None of 2 rows has a token to predict in column sentence: check the text"):
        masked.encode(texts.select([0, 2]))


def test_a_corpus_of_ones_own_with_empty_lines(cli, tmp_path):
    ran(cli("recipe", "pretrain", *SMALL))
    pretrained = tmp_path / "out" / "model"
    own = ["--task", "custom", "--kind", "masked-lm", "--text-columns", "text", "--data-dir", tmp_path, "--epochs", 1]
    own += ["--model", pretrained, "--max-length", 32, "--batch-size", 2]
    for split in ("train", "validation"):
        texts = [text for row in agreement.corpus(split)[:8] for text in (row["sentence"], "", "", " ")]
        made.write_rows(tmp_path / f"{split}.jsonl", [{"text": text} for text in texts])
    ran(cli("recipe", "finetune", "--model", pretrained, *SMALL[:-1], "tuned"))
    ran(cli("recipe", "pretrain", *own, "--output-dir", "own"))
    assert json.loads((tmp_path / "own" / "result.json").read_text())["rows"] == 8
    assert len(read_lines(tmp_path / "own" / "predictions.jsonl")) == 8
    made.write_rows(tmp_path / "train.jsonl", [{"text": ""}] * 3)
    result = cli("recipe", "pretrain", *own, "--output-dir", "none")
    assert_sentence(result, 1, "None of 3 rows has a token to predict in column text: check the text")
    assert not (tmp_path / "none").exists()
