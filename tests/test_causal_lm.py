"""Causal language models: labels, completions, chat templates and scores."""

import math

import datasets
import pytest
import torch
import transformers as hf

from attnreg.attendout.rewards import correctness, negative_loss
from attnreg.errors import InputError
from attnreg.experiments.results.evaluation import predict
from attnreg.experiments.setup import rows as data_checks
from attnreg.experiments.setup.batches import to_score
from attnreg.experiments.tasks import agreement, choose_task, get_task, load_data, load_model
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.kinds.language import check_conversations
from attnreg.training.objective import disagreement
from tests.helpers import task_data as made
from tests.helpers.cases import refused
from tests.helpers.commands import assert_sentence, ran, read_lines, result_of
from tests.helpers.method_cases import step_of_r_drop
from tests.helpers.recipe_cases import evaluated_again
from tests.helpers.repository import ROOT

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
OWN = ["--task", "custom", "--kind", "causal-lm", "--device", "cpu", "--max-length", 24, "--epochs", 1]


@pytest.fixture(scope="module")
def trained():
    """A tiny decoder after a few steps, so that some of its completions are right."""
    torch.manual_seed(0)
    task = get_task("agreement-completion")
    model, tokenizer = load_model(task)
    kind = kind_class("causal-lm")(task, tokenizer, 32)
    rows = kind.encode(load_data(task)[1]["train"].select(range(24)))
    batch = kind.collate(list(rows.remove_columns("reference")))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(14):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), kind, rows


def kind_of(tokenizer, max_length=32, **options):
    return kind_class("causal-lm")(choose_task("custom", kind="causal-lm", **options), tokenizer, max_length)


def rows_of(*rows):
    return datasets.Dataset.from_list(list(rows))


def words(kind, ids):
    return kind.tokenizer.convert_ids_to_tokens(ids)


def test_only_the_completion_has_labels(trained):
    _, kind, _ = trained
    row = kind.encode(rows_of({"prompt": "sleep : the boy", "completion": "sleeps"}))[0]
    assert words(kind, row["input_ids"]) == ["[BOS]", "sleep", ":", "the", "boy", "sleeps", "[EOS]"]
    assert row["labels"] == [-100] * 5 + row["input_ids"][5:]
    assert row["reference"] == "sleeps"


@pytest.mark.parametrize("text", ["the boy sleeps", "[BOS] the boy sleeps [EOS]"])  # nothing is doubled
def test_plain_text_has_labels_everywhere_but_at_its_first_token(trained, text):
    kind = kind_of(trained[1].tokenizer, text_columns="text")
    row = kind.encode(rows_of({"text": text}))[0]
    assert words(kind, row["input_ids"]) == ["[BOS]", "the", "boy", "sleeps", "[EOS]"]
    assert row["labels"] == [-100, *row["input_ids"][1:]]
    assert row["reference"] is None


def test_padding_has_no_label_and_is_on_the_right(trained):
    _, kind, rows = trained
    kind.tokenizer.padding_side = "left"
    batch = kind.collate(list(rows.remove_columns("reference")))
    kind.tokenizer.padding_side = "right"
    for ids, mask, labels, row in zip(*batch.values(), rows, strict=True):
        size = len(row["input_ids"])
        assert ids[:size].tolist() == row["input_ids"]
        assert mask.tolist() == [1] * size + [0] * (len(mask) - size)
        assert labels[:size].tolist() == row["labels"]
        assert (labels[size:] == -100).all()


def slow_answers(model, rows):
    """Each row alone, without padding: the completion token by token, and the log-likelihood of the right one."""
    for row in rows:
        ids, first = row["input_ids"], sum(label == -100 for label in row["labels"])
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            text = list(ids[:first])
            while len(text) < len(ids):
                text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
        gold = ids[first:]
        yield {
            "tokens": len(gold),
            "right": sum(int(log_p[first - 1 + i].argmax()) == token for i, token in enumerate(gold)),
            "log_likelihood": sum(float(log_p[first - 1 + i, token]) for i, token in enumerate(gold)),
            "is_exact": text == ids,
        }


@pytest.mark.parametrize("batch_size", [5, 24])
def test_scores_are_those_of_each_row_alone(trained, batch_size):
    model, kind, rows = trained
    found = predict(model, to_score(rows, batch_size, kind, torch.device("cpu")), kind)
    slow = list(slow_answers(model, rows))
    assert 0 < sum(row["is_exact"] for row in slow) < len(slow)
    for record, row in zip(found.records, slow, strict=True):
        assert (record["label"] == record["prediction"]) == row["is_exact"]
        assert (record["tokens"], record["right"]) == (row["tokens"], row["right"])
        assert record["log_likelihood"] == pytest.approx(row["log_likelihood"], abs=1e-4)
    tokens = sum(row["tokens"] for row in slow)
    mean = -sum(row["log_likelihood"] for row in slow) / tokens
    assert found.loss == pytest.approx(mean, abs=1e-5)
    scores = kind.score(found.records)
    assert scores["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    assert scores["accuracy"] == pytest.approx(sum(row["right"] for row in slow) / tokens)
    assert scores["exact_match"] == pytest.approx(sum(row["is_exact"] for row in slow) / len(slow))


def test_prompts_that_leave_no_room_are_scored_but_not_trained_on(trained, monkeypatch):
    model, whole, _ = trained
    kind = kind_class("causal-lm")(whole.task, whole.tokenizer, 6)
    rows = rows_of(
        {"prompt": "sleep : the boy", "completion": "sleeps"},
        {"prompt": "sleep : the boy near the dogs", "completion": "sleeps"},
    )
    encoded = kind.encode(rows)
    assert len(kind.to_train_on(encoded)) == 1
    found = predict(model, to_score(encoded, 2, kind, torch.device("cpu")), kind)
    assert [record["tokens"] for record in found.records] == [1, 0]
    assert found.records[1]["prediction"] == ""
    assert math.isfinite(found.loss)
    with pytest.raises(InputError, match="None of 1 rows has a token to predict within --max-length"):
        kind.encode(rows.select([1]))
    monkeypatch.setattr(data_checks, "CHECKED", 1)  # such a row is the only one that is looked at
    (cut,) = data_checks.input_warnings(kind, rows.select([1, 0]), "inputs")
    assert cut == "1 of the first 1 inputs (100%) are cut by --max-length 6; the longest has 10 tokens."


def test_generation_stays_within_the_positions_of_the_model(trained):
    model, whole, _ = trained
    kind = kind_class("causal-lm")(whole.task, whole.tokenizer, 64)
    long = rows_of(
        {"prompt": " ".join(["the boy"] * 30), "completion": "a"},
        {"prompt": "the boy", "completion": " ".join(["is old"] * 29)},
    )
    found = predict(model, to_score(kind.encode(long), 2, kind, torch.device("cpu")), kind)
    assert [record["tokens"] for record in found.records] == [2, 59]


def test_rewards_and_r_drop_look_at_the_positions_that_predict(trained):
    model, kind, rows = trained
    batch = kind.collate(list(rows.remove_columns("reference")))
    slow = list(slow_answers(model, rows))
    assert negative_loss(model, batch).tolist() == pytest.approx(
        [row["log_likelihood"] / row["tokens"] for row in slow], abs=1e-4
    )
    assert correctness(model, batch).tolist() == pytest.approx([row["right"] / row["tokens"] for row in slow])
    loss, (first, other) = step_of_r_drop(model, batch)
    shifted = disagreement(first.logits[:, :-1], other.logits[:, :-1], batch["labels"][:, 1:])
    assert loss == pytest.approx(float(first.loss + other.loss + 2 * shifted) / 2, abs=1e-5)


def with_template(tokenizer):
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template=TEMPLATE, **tokenizer.special_tokens_map
    )
    tokenizer.add_tokens(["user", "assistant"])
    return tokenizer


def test_messages_are_written_by_the_template_without_a_second_beginning(trained):
    kind = kind_of(with_template(trained[1].tokenizer), text_columns="messages")
    turns = [("user", "the boy"), ("assistant", "sleeps"), ("user", "the boys"), ("assistant", "sleep")]
    row = kind.encode(rows_of({"messages": [{"role": role, "content": text} for role, text in turns]}))[0]
    text = "[BOS] user : the boy [EOS] assistant : sleeps [EOS] user : the boys [EOS] assistant : sleep [EOS]"
    assert words(kind, row["input_ids"]) == text.split()
    assert words(kind, [label for label in row["labels"] if label != -100]) == ["sleep", "[EOS]"]
    assert row["reference"] == "sleep"


def test_prompt_and_completion_are_written_by_the_template(trained):
    kind = kind_of(with_template(trained[1].tokenizer))
    row = kind.encode(rows_of({"prompt": "the boy", "completion": "sleeps"}))[0]
    text = "[BOS] user : the boy [EOS] assistant : sleeps [EOS]"
    assert words(kind, row["input_ids"]) == text.split()
    assert kind.remarks == ["Prompts and completions are written by the chat template of the model's tokenizer."]
    assert not trained[1].remarks
    messages = [{"role": "user", "content": "the boy"}], [{"role": "assistant", "content": "sleeps"}]
    both = rows_of({"prompt": messages[0], "completion": messages[1]})
    assert kind.encode(both)[0] == row


def test_templates_that_do_not_fit_are_one_sentence(trained):
    messages = rows_of({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    tokenizer = with_template(trained[1].tokenizer)
    for template, says in (
        (None, "The data holds messages, but the model's tokenizer has no chat template"),
        ("{{ raise_exception('no such role') }}", "does not take the messages .*: no such role"),
        ("{{ messages | length }}", "writes a prompt in another way when an answer follows"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(InputError, match=says):
            kind_of(tokenizer, text_columns="messages").encode(messages)


test_rows_of_another_form_are_one_sentence = refused(
    (lambda: check_conversations({"prompt": ["a", 1], "completion": ["b", "b"]}, "here"), "Expected text in column prompt, got 1 in row 2 of here"),
    (lambda: check_conversations({"messages": [[{"role": "user"}]]}, "here"), r"Expected a list of .* in column messages, got .* in row 1 of here"),
    (lambda: check_conversations({"messages": [[{"role": "user", "content": "a"}]]}, "here"), "to be of the role assistant, after others, got the role user"),
    (lambda: check_conversations({"messages": [[]]}, "here"), "to be of the role assistant, after others, got the role of none in row 1 of here"),
    error=InputError,
)  # fmt: skip


def test_models_that_see_the_future_are_refused(tmp_path):
    tokenizer = made.word_pieces(made.TEXTS, 200)
    tokenizer.eos_token = "[SEP]"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    made.save(tmp_path, hf.BertForMaskedLM(hf.BertConfig(vocab_size=len(tokenizer), **sizes)), tokenizer)
    with pytest.raises(InputError, match="sees the tokens that it is to predict: choose a causal language model"):
        load_model(choose_task("custom", kind="causal-lm"), str(tmp_path))
    made.word_pieces(made.TEXTS, 200).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no end-of-text token, which tells where a completion ends"):
        load_model(choose_task("custom", kind="causal-lm"), str(tmp_path))


def test_the_built_in_task_agrees():
    splits = {name: agreement.completions(name) for name in agreement.SIZES}
    prompts = [row["prompt"] for rows in splits.values() for row in rows]
    assert len(set(prompts)) == len(prompts) == sum(agreement.SIZES.values())
    known = {*agreement.vocabulary(), agreement.SEPARATOR}
    assert all({*row["prompt"].split(), *row["completion"].split()} <= known for row in splits["train"])
    changed = sum(row["prompt"].partition(" : ")[0] != row["completion"] for row in splits["train"])
    assert 0.4 < changed / len(splits["train"]) < 0.6  # the subject is in the singular


def write(folder, row):
    rows = [row(number) for number in range(48)]
    return made.write_splits(folder, train=rows[:24], validation=rows[24:])


@pytest.fixture
def decoder(tmp_path, trained):
    model, kind, _ = trained
    return made.save(tmp_path / "decoder", model, kind.tokenizer)


def test_runs_on_ones_own_data(cli, tmp_path, decoder):
    rows = agreement.completions("train")
    long = {**rows[3], "prompt": " ".join([rows[3]["prompt"]] * 9)}
    pairs = write(tmp_path / "pairs", lambda i: long if i == 3 else rows[i])
    ran(cli("recipe", "finetune", *OWN, "--data-dir", pairs, "--model", decoder, "--output-dir", "a"))
    report = (tmp_path / "a" / "report.md").read_text()
    assert "Perplexity on dev rows after the last epoch: " in report
    assert "1 of 24 training inputs lack a token to predict within --max-length: they are left out." in report
    written, scores = evaluated_again(cli, tmp_path / "a", "--data-dir", pairs)
    assert {"accuracy", "exact_match", "perplexity"} <= set(scores)
    assert written["metrics"]["exact_match"] == scores["exact_match"]
    assert written["metrics"]["perplexity"] == pytest.approx(scores["perplexity"])
    texts = write(tmp_path / "texts", lambda i: {"text": f"{rows[i]['prompt']} {rows[i]['completion']}"})
    given = ["--data-dir", texts, "--model", decoder, "--text-columns", "text"]
    ran(cli("recipe", "ad-drop", *OWN, *given, "--epochs", 2, "--output-dir", "b"))
    assert {row["prediction"] for row in read_lines(tmp_path / "b" / "predictions.jsonl")} == {None}
    result = cli("recipe", "finetune", *OWN, *given, "--metric", "exact_match", "--output-dir", "c")
    assert_sentence(result, 1, "Metric exact_match needs prompts, but column text is plain text: use --metric accuracy")
    given = ["--data-dir", pairs, "--model", decoder]
    result = cli("recipe", ROOT / "docs/results/attribution/probe.py", *OWN, *given, "--output-dir", "c")
    assert_sentence(result, 2, "Probing needs a task without generated text, got custom")


def test_a_run_on_conversations(cli, tmp_path, decoder, trained):
    model, kind, _ = trained
    larger = hf.GPT2LMHeadModel(hf.GPT2Config(**{**model.config.to_dict(), "vocab_size": 60}))
    made.save(decoder, larger, with_template(kind.tokenizer))

    def conversation(number):
        row = agreement.completions("train")[number]
        turns = zip(("user", "assistant"), (row["prompt"], row["completion"]), strict=True)
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    folder = write(tmp_path / "chats", conversation)
    args = ["--data-dir", folder, "--model", decoder, "--text-columns", "messages", "--output-dir", "out"]
    ran(cli("recipe", "finetune", *OWN, *args))
    scores = result_of(tmp_path / "out")["dev"]
    assert {"accuracy", "exact_match", "perplexity"} <= set(scores)


@pytest.mark.slow
def test_attendout_plays_on_a_decoder(cli, tmp_path):
    args = ["--task", "agreement-completion", "--train-size", 64, "--epochs", 2, "--batch-size", 16, "--no-baseline"]
    args += ["--rewards", "Rewards(score='accuracy')", "--device", "cpu", "--output-dir", "out"]
    ran(cli("recipe", "attendout", *args))
    assert any("winner" in line for line in read_lines(tmp_path / "out" / "telemetry.jsonl"))
