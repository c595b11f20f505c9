"""Language modelling: complete a prompt with a decoder, fill in hidden tokens, or write one text from another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from attnreg.errors import InputError, one_line
from attnreg.experiments.tasks.columns import column_of
from attnreg.experiments.tasks.kinds.kind import IGNORED, REFERENCE, Kind, Record, Splits, keep_rows, labelled

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn

ANSWERS = "assistant"
TRIES = 100  # of hiding tokens, until one is hidden


class CausalLM(Kind):
    """Text that a decoder predicts token by token. Only the tokens of the completion have a label.

    Rows are a prompt and its completion, a list of messages, or plain text in one column, whose tokens are all
    predicted. Prompt and completion are tokenized separately and joined without a space. The tokenizer's
    end-of-text token is added. Messages, and prompts and completions if the tokenizer has a chat template, are written
    by the template; the last message is the completion.

    Accuracy and perplexity are over the labelled tokens, predicted from the right tokens before them. For exact match,
    a completion is generated greedily from the prompt, with at most as many tokens as the right completion.
    """

    head = "AutoModelForCausalLM"
    head_is_new = False
    metrics = ("accuracy", "exact_match")
    most_columns = 1
    usual_columns = ("prompt",)
    usual_label = "completion"
    needs_labels = False
    scored_train_rows = 100  # generation is slow
    learns_from = "a token to predict within --max-length"
    tokenizer_needs = (
        "eos_token",
        "has no end-of-text token, which tells where a completion ends: set `tokenizer.eos_token` and save it again, "
        "or choose another model",
    )

    @property
    @override
    def generates(self) -> bool:
        return "exact_match" in self.task.metrics

    @property
    @override
    def remarks(self) -> list[str]:
        if self.task.label in self.task.columns or not self.tokenizer.chat_template:
            return []
        return ["Prompts and completions are written by the chat template of the model's tokenizer."]

    @override
    def plain(self, splits: Splits, places: Mapping[str, str]) -> Splits:
        labels = (value for rows in splits.values() for value in self.labels_in(rows))
        if self.task.label not in self.task.columns or all(isinstance(value, list) for value in labels):
            self.task = replace(self.task, metrics=tuple(dict.fromkeys((*self.task.metrics, "exact_match"))))
        elif "exact_match" in self.task.metrics:
            raise InputError(
                f"Metric exact_match needs prompts, but column {self.task.label} is plain text: use --metric accuracy."
            )
        return splits

    @override
    def check(self, rows: Dataset, place: str) -> None:
        columns = dict.fromkeys((*self.task.columns, self.task.label))
        check_conversations({name: column_of(rows, name) for name in columns}, place)

    @override
    def gold(self, rows: Dataset, place: str = "the data") -> list[Any]:
        return [None] * len(rows) if self.task.label in self.task.columns else self.labels_in(rows)

    @override
    def check_model(self, model: nn.Module, name: str) -> None:
        import torch

        # Two passes of the same shape: logits of tokens that do not see the last one differ by rounding at most.
        ids = [torch.tensor([[0, 1, last]]) for last in (2, 3)]
        with torch.no_grad():  # and in eval mode, as transformers loads models
            logits, changed = (model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits for tokens in ids)
        rounding = 8 * torch.finfo(logits.dtype).eps * logits.abs().max()
        if (logits - changed)[:, :2].abs().max() > rounding:
            raise InputError(
                f"--model {name} ({type(model).__name__}) sees the tokens that it is to predict: choose a causal "
                "language model, such as GPT-2."
            )

    @override
    def encode(self, rows: Dataset) -> Dataset:
        encoded = super().encode(rows)
        keep_rows(encoded, labelled(encoded), self.learns_from)
        return encoded

    @override
    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        (column,) = self.task.columns
        rows = [self._row(value, completion) for value, completion in zip(column_of(batch, column), gold, strict=True)]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _row(self, value: Any, completion: Any) -> dict[str, Any]:
        """Return the token ids of a row, their labels and, if there is a prompt, the text to generate."""
        eos = self.tokenizer.eos_token_id
        has_prompt = isinstance(value, list) or completion is not None
        if isinstance(value, str) and has_prompt and self.tokenizer.chat_template:
            value, completion = [{"role": "user", "content": value}], [{"role": ANSWERS, "content": completion}]
        if isinstance(value, list):  # the template writes the special tokens
            prompt, ids = (self._tokens(text) for text in in_template(self.tokenizer, [*value, *(completion or ())]))
            ids = ids[: len(ids) - ids[::-1].index(eos)] if eos in ids else [*ids, eos]
        else:
            prompt, ids = self._tokens(value) if has_prompt else [], self._tokens(completion if has_prompt else value)
            ids = ids if ids[-1:] == [eos] else [*ids, eos]
            framed, bare = list(self.tokenizer("a")["input_ids"]), self._tokens("a")
            beginning = next((framed[:at] for at in range(len(framed)) if framed[at : at + len(bare)] == bare), [])
            if [*prompt, *ids][: len(beginning)] != beginning:  # unless the text has it already
                prompt = [*beginning, *prompt]
        whole, first = [*prompt, *ids], max(1, len(prompt))  # no token before the first one predicts it
        labels = [IGNORED] * first + whole[first:]
        return {
            "input_ids": whole[: self.max_length],
            "labels": labels[: self.max_length],
            REFERENCE: self._text(whole[first:]) if has_prompt else None,
        }

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, ids: Sequence[int]) -> str:
        """Return the text up to the end-of-text token."""
        eos = self.tokenizer.eos_token_id
        until = list(ids).index(eos) if eos in ids else len(ids)
        return str(self.tokenizer.decode(ids[:until])).strip()

    @override
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        labels = pad_sequence([torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=IGNORED)
        # On the right, whatever side the tokenizer pads for generation: models count positions from the left.
        return {**self._padded([row["input_ids"] for row in rows], "right"), "labels": labels}

    def _padded(self, ids: list[Any], side: str) -> Any:
        return self.tokenizer.pad({"input_ids": ids}, padding_side=side, return_tensors="pt")

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        labels = batch["labels"][:, 1:]
        texts = self._generated(network, batch) if self.generates else [None] * len(labels)
        answers = []
        for logits, row, text in zip(output.logits[:, :-1], labels, texts, strict=True):
            counted = row != IGNORED
            gold, log_p = row[counted], logits[counted].float().log_softmax(-1)
            answers.append(
                {
                    "tokens": len(gold),
                    "right": int((log_p.argmax(-1) == gold).sum()),
                    "log_likelihood": float(log_p.gather(-1, gold[:, None]).double().sum()),
                    "prediction": text,
                }
            )
        return answers

    def _generated(self, network: nn.Module, batch: Mapping[str, Tensor]) -> list[str]:
        """Return the completions of prompts, generated greedily."""
        counted = batch["labels"] != IGNORED
        counts = counted.sum(1).tolist()
        prompts = [ids[: int(row.int().argmax())] for ids, row in zip(batch["input_ids"], counted, strict=True)]
        tokenizer, texts = self.tokenizer, [""] * len(counts)
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        generate: Any = network.generate
        for rows in _groups([len(prompt) for prompt in prompts], counts, self.max_length):
            # On the left: a prompt ends where its completion begins.
            inputs = self._padded([prompts[row] for row in rows], "left").to(counted.device)
            longest = max(counts[row] for row in rows)
            generated = generate(**inputs, **ends, max_new_tokens=longest, do_sample=False, num_beams=1)
            completions = generated[:, inputs["input_ids"].shape[1] :].tolist()
            for row, ids in zip(rows, completions, strict=True):
                texts[row] = self._text(ids[: counts[row]])
        return texts

    @override
    def record(self, answer: Any, reference: Any) -> Record:
        return {"label": reference, **answer}

    @override
    def score(self, records: Iterable[Record]) -> dict[str, float]:
        rows = list(records)
        mean = sum(record["log_likelihood"] for record in rows) / sum(record["tokens"] for record in rows)
        return {**super().score(rows), "perplexity": math.exp(min(-mean, 700.0))}

    @override
    def compared(self, metric: str, records: Sequence[Record]) -> tuple[list[Any], list[Any]]:
        if metric == "exact_match":
            return super().compared(metric, records)
        right = [int(number < record["right"]) for record in records for number in range(record["tokens"])]
        return right, [1] * len(right)


def _groups(prompts: Sequence[int], counts: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Group rows so that the longest prompt and the longest completion of a group fit the limit together."""
    group: list[int] = []
    for row in sorted((row for row, count in enumerate(counts) if count), key=lambda row: prompts[row]):
        if group and prompts[row] + max(counts[member] for member in [*group, row]) > limit:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def check_conversations(columns: Mapping[str, Sequence[Any]], place: str) -> None:
    """Raise unless one column, or the two of prompt and completion, hold only texts or only lists of messages."""
    first = next((values[0] for values in columns.values() if values), None)
    form, wanted = (list, 'a list of {"role": ..., "content": ...}') if isinstance(first, list) else (str, "text")
    for row, values in enumerate(zip(*columns.values(), strict=True), 1):
        for name, value in zip(columns, values, strict=True):
            if not isinstance(value, form) or (form is list and not all(map(_is_message, value))):
                raise InputError(f"Expected {wanted} in column {name}, got {value!r} in row {row} of {place}.")
        roles = [message["role"] for value in values for message in value] if form is list else ["user", ANSWERS]
        if len(roles) < 2 or roles[-1] != ANSWERS:
            raise InputError(
                f"Expected the last message of column {' and '.join(columns)} to be of the role {ANSWERS}, after "
                f"others, got the role {roles[-1] if roles else 'of none'} in row {row} of {place}."
            )


def in_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Write a conversation by the tokenizer's chat template, which adds all special tokens, or raise.

    Returns the prompt, which ends where the answer begins, and the completion, which is the last message.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise InputError(
            "The data holds messages, but the model's tokenizer has no chat template to write them: choose another "
            "model, or give a prompt and a completion in columns of text."
        )
    try:
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, KeyError) as error:
        reason = one_line(error).rstrip(".")
        shown = str(messages)[:200]
        raise InputError(f"The tokenizer's chat template does not take the messages {shown}: {reason}.") from error
    if not whole.startswith(prompt):
        raise InputError(
            "The tokenizer's chat template writes a prompt in another way when an answer follows, so the answer cannot "
            f"be separated: {prompt[-100:]!r} is not in {whole[-200:]!r}."
        )
    return prompt, whole[len(prompt) :]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


class MaskedLM(Kind):
    """Text without labels. 15 % of the tokens are predicted, most of them masked; accuracy is over these tokens.

    The tokens are drawn anew for every training batch, and for evaluation once, by the number of the row. Rows without
    a token to predict, such as empty lines, are skipped.

    Reference:
        BERT (arXiv 1810.04805), Section 3.1.
    """

    head = "AutoModelForMaskedLM"
    head_is_new = False
    metrics = ("accuracy",)
    most_columns = 1
    needs_labels = False
    tokenizer_needs = ("mask_token", "has no mask token: choose a masked language model, such as BERT")

    @override
    def encode(self, rows: Dataset) -> Dataset:
        encoded = super().encode(rows)
        words = [not all(special) for special in encoded["special_tokens_mask"]]
        return keep_rows(encoded, words, f"a token to predict in column {self.task.label}")

    @override
    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        encoded = self.tokenizer(gold, truncation=True, max_length=self.max_length, return_special_tokens_mask=True)
        return {**encoded, REFERENCE: [None] * len(gold)}

    @override
    def to_score(self, encoded: Dataset) -> Dataset:
        import torch
        from transformers import DataCollatorForLanguageModeling

        collate = DataCollatorForLanguageModeling(self.tokenizer)

        def hide(row: dict[str, Any], number: int, first: int) -> dict[str, Any]:
            torch.default_generator.manual_seed(first + number)
            batch = collate([{name: value for name, value in row.items() if name != REFERENCE}])
            return {name: tensor[0].tolist() for name, tensor in batch.items()}

        options = {"with_indices": True, "remove_columns": ["special_tokens_mask"], "keep_in_memory": True}
        with torch.random.fork_rng(devices=[]):
            for trial in range(TRIES):  # of a few short rows, all tokens may stay visible
                hidden = encoded.map(hide, fn_kwargs={"first": trial * len(encoded)}, **options)
                if any(labelled(hidden)):
                    break
        return hidden

    @override
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        from transformers import DataCollatorForLanguageModeling, DataCollatorForTokenClassification

        if "labels" in rows[0]:  # drawn by `to_score`
            return dict(DataCollatorForTokenClassification(self.tokenizer)(rows))
        collate = DataCollatorForLanguageModeling(self.tokenizer)
        for _ in range(TRIES):
            batch = dict(collate(rows))
            if bool((batch["labels"] != IGNORED).any()):  # otherwise the loss would be NaN
                return batch
        raise InputError("A batch has no token to predict: remove rows without words.")

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        guesses, labels = output.logits.argmax(-1).cpu(), batch["labels"].cpu()
        hidden = labels != IGNORED
        return [
            {"label": gold[mask].tolist(), "prediction": guess[mask].tolist()}
            for guess, gold, mask in zip(guesses, labels, hidden, strict=True)
        ]

    @override
    def record(self, answer: Any, reference: Any) -> Record:
        return {name: self.tokenizer.convert_ids_to_tokens(ids) for name, ids in answer.items()}


class Seq2Seq(Kind):
    """One text per row, trained with teacher forcing.

    At evaluation the text is generated by the model's settings (number of beams, ...), without sampling, with at
    most ``max_length`` tokens. It is compared with the full, untruncated reference.
    """

    head = "AutoModelForSeq2SeqLM"
    head_is_new = False
    collator = "DataCollatorForSeq2Seq"
    metrics = ("bleu",)
    most_columns = 1
    scored_train_rows = 100  # generation is slow
    generates = True

    @override
    def check_model(self, model: nn.Module, name: str) -> None:
        if not getattr(model.config, "is_encoder_decoder", False):  # transformers counts models of sound among these
            raise InputError(
                f"--model {name} ({type(model).__name__}) is no encoder with a decoder: choose one that is, such as T5."
            )

    @override
    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        (source,) = self._texts(batch)
        encoded = self.tokenizer(source, text_target=gold, truncation=True, max_length=self.max_length)
        encoded.pop("token_type_ids", None)  # encoder-decoder models do not accept them
        return {**encoded, REFERENCE: gold}

    @override
    def lengths(self, encoded: Dataset) -> list[int]:
        return list(map(max, super().lengths(encoded), map(len, encoded["labels"])))

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        generate: Any = network.generate
        inputs = {name: tensor for name, tensor in batch.items() if name in ("input_ids", "attention_mask")}
        ids = generate(**inputs, max_new_tokens=self.max_length, do_sample=False)
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)
