"""Causal language modelling: complete a prompt, or model plain text, with a decoder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from attnreg.errors import InputError
from attnreg.experiments.tasks.columns import column_of
from attnreg.experiments.tasks.kinds.conversation import check_conversations, in_template
from attnreg.experiments.tasks.kinds.kind import IGNORED, REFERENCE, Kind, Record, kept, labelled
from attnreg.experiments.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn

LABELLED = "a token to predict within --max-length"


class CausalLM(Kind):
    """Text that a decoder predicts token by token. Only the tokens of the completion have a label.

    Rows are a prompt and its completion, a list of messages, or plain text in one column, whose tokens are all
    predicted. Prompt and completion are tokenized separately and joined as they are, without a space. The tokenizer's
    end-of-text token is added. Messages, and prompts and completions if the tokenizer has a chat template, are written
    by the template; the last message is the completion.

    Accuracy and perplexity are over the labelled tokens, each predicted from the right ones before it. For exact match,
    a completion is generated greedily from the prompt, with at most as many tokens as the right one, since a longer one
    cannot match.
    """

    head = "AutoModelForCausalLM"
    head_is_new = False
    metrics = ("accuracy", "exact_match")
    most_columns = 1
    usual_columns = ("prompt",)
    usual_label = "completion"
    needs_labels = False
    has_text_labels = True
    scored_train_rows = 100  # generation is slow

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

    @classmethod
    @override
    def plain(
        cls, task: Task, splits: Mapping[str, Dataset], places: Mapping[str, str]
    ) -> tuple[Task, Mapping[str, Dataset]]:
        has_prompts = task.label not in task.columns or all(
            isinstance(value, list) for rows in splits.values() for value in column_of(rows, task.label)
        )
        if has_prompts:
            return replace(task, metrics=tuple(dict.fromkeys((*task.metrics, "exact_match")))), splits
        if "exact_match" in task.metrics:
            raise InputError(
                f"Metric exact_match needs prompts, but column {task.label} is plain text: use --metric accuracy."
            )
        return task, splits

    @classmethod
    @override
    def check(cls, task: Task, rows: Dataset, place: str) -> None:
        columns = dict.fromkeys((*task.columns, task.label))
        check_conversations({name: column_of(rows, name) for name in columns}, place)

    @classmethod
    @override
    def gold(cls, task: Task, rows: Dataset, place: str = "the data") -> list[Any]:
        return [None] * len(rows) if task.label in task.columns else column_of(rows, task.label)

    @classmethod
    @override
    def fit_tokenizer(cls, tokenizer: Any, name: str) -> None:
        if tokenizer.eos_token is None:
            raise InputError(
                f"The tokenizer of --model {name} ({type(tokenizer).__name__}) has no end-of-text token, which tells "
                "where a completion ends: set `tokenizer.eos_token` and save it again, or choose another model."
            )

    @classmethod
    @override
    def check_model(cls, model: nn.Module, name: str) -> None:
        import torch

        device, training = next(model.parameters()).device, model.training
        # Two passes of the same shape: for tokens that do not see the last one, they differ by rounding at most.
        each = (torch.tensor([[0, 1, last]], device=device) for last in (2, 3))
        with torch.no_grad():
            ours, others = (model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for ids in each)
        model.train(training)
        rounding = 8 * torch.finfo(ours.dtype).eps * ours.abs().max()
        if (ours - others)[:, :2].abs().max() > rounding:
            raise InputError(
                f"--model {name} ({type(model).__name__}) sees the tokens that it is to predict: choose a causal "
                "language model, such as GPT-2."
            )

    @override
    def encode(self, rows: Dataset) -> Dataset:
        encoded = super().encode(rows)
        kept(encoded, labelled(encoded), LABELLED)
        return encoded

    @override
    def to_train_on(self, encoded: Dataset) -> Dataset:
        return kept(encoded, labelled(encoded), LABELLED)

    @override
    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        (column,) = self.task.columns
        rows = [self._row(value, completion) for value, completion in zip(column_of(batch, column), gold, strict=True)]
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

    def _row(self, value: Any, completion: Any) -> dict[str, Any]:
        """Return the token ids of a row, their labels and, if there is a prompt, the text to generate."""
        prompt, ids, has_prompt = self._ids(value, completion)
        whole = [*prompt, *ids]
        # The first token has no label, because no token before it predicts it.
        first = max(1, len(prompt))
        labels = [IGNORED if place < first else token for place, token in enumerate(whole)]
        return {
            "input_ids": whole[: self.max_length],
            "labels": labels[: self.max_length],
            REFERENCE: self._text(whole[first:]) if has_prompt else None,
        }

    def _ids(self, value: Any, completion: Any) -> tuple[list[int], list[int], bool]:
        """Return the token ids of the prompt and of the completion, and whether there is a prompt."""
        eos = self.tokenizer.eos_token_id
        messages = value if isinstance(value, list) else None
        if isinstance(completion, list):
            messages = [*value, *completion]
        elif completion is not None and self.tokenizer.chat_template:
            messages = [{"role": "user", "content": value}, {"role": "assistant", "content": completion}]
        if messages is not None:  # the template writes the special tokens
            prompt, ids = (self._tokens(text) for text in in_template(self.tokenizer, messages))
            if eos in ids:
                return prompt, ids[: len(ids) - ids[::-1].index(eos)], True
            return prompt, [*ids, eos], True
        prompt, text = ([], value) if completion is None else (self._tokens(value), completion)
        ids = self._tokens(text)
        ids = ids if ids[-1:] == [eos] else [*ids, eos]
        beginning = self._beginning()
        if [*prompt, *ids][: len(beginning)] != beginning:  # unless the text has it already
            prompt = [*beginning, *prompt]
        return prompt, ids, completion is not None

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _beginning(self) -> list[int]:
        """Return the tokens that the tokenizer adds before a text."""
        whole, bare = list(self.tokenizer("a")["input_ids"]), self._tokens("a")
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])

    def _text(self, ids: Sequence[int]) -> str:
        """Return the text up to the end-of-text token."""
        eos = self.tokenizer.eos_token_id
        until = list(ids).index(eos) if eos in ids else len(ids)
        return str(self.tokenizer.decode(ids[:until])).strip()

    @override
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        import torch

        # On the right, whatever side the tokenizer pads for generation: models count positions from the left.
        ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
        return {**self._padded(ids, "right"), "labels": _padded(labels, IGNORED, "right")}

    def _padded(self, ids: Sequence[Tensor], side: str) -> dict[str, Tensor]:
        mask = _padded([each.new_ones(len(each)) for each in ids], 0, side)
        return {"input_ids": _padded(ids, self.tokenizer.pad_token_id, side), "attention_mask": mask}

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        labels, found = batch["labels"][:, 1:], []
        for logits, row in zip(output.logits[:, :-1], labels, strict=True):
            counted = row != IGNORED
            gold, log_p = row[counted], logits[counted].float().log_softmax(-1)
            found.append(
                {
                    "tokens": len(gold),
                    "right": int((log_p.argmax(-1) == gold).sum()),
                    "log_likelihood": float(log_p.gather(-1, gold[:, None]).double().sum()),
                }
            )
        texts = self._generated(network, batch) if self.generates else [None] * len(found)
        return [{**answer, "prediction": text} for answer, text in zip(found, texts, strict=True)]

    def _generated(self, network: nn.Module, batch: Mapping[str, Tensor]) -> list[str]:
        """Return the completion of each prompt, generated greedily."""
        counted = batch["labels"] != IGNORED
        counts = counted.sum(1).tolist()
        prompts = [ids[: int(row.int().argmax())] for ids, row in zip(batch["input_ids"], counted, strict=True)]
        texts = [""] * len(counts)
        generate: Any = network.generate
        for rows in _groups([len(prompt) for prompt in prompts], counts, self.max_length):
            given = self._padded([prompts[row] for row in rows], "left")  # a prompt ends where its completion begins
            made = generate(
                **given,
                max_new_tokens=max(counts[row] for row in rows),
                do_sample=False,
                num_beams=1,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
            )[:, given["input_ids"].shape[1] :].tolist()
            for row, new in zip(rows, made, strict=True):
                texts[row] = self._text(new[: counts[row]])
        return texts

    @override
    def record(self, answer: Any, reference: Any) -> Record:
        return {"label": reference, **answer}

    @override
    def score(self, records: Iterable[Record]) -> dict[str, float]:
        found = list(records)
        mean = sum(record["log_likelihood"] for record in found) / sum(record["tokens"] for record in found)
        return {**super().score(found), "perplexity": math.exp(min(-mean, 700.0))}

    @override
    def compared(self, metric: str, records: Sequence[Record]) -> tuple[list[Any], list[Any]]:
        if metric == "exact_match":
            return super().compared(metric, records)
        right = [place < record["right"] for record in records for place in range(record["tokens"])]
        return [int(one) for one in right], [1] * len(right)


def _padded(rows: Sequence[Tensor], value: int, side: str) -> Tensor:
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)


def _groups(prompts: Sequence[int], counts: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Group rows so that the longest prompt and the longest completion of a group fit the limit together."""
    group: list[int] = []
    for row in sorted((row for row, count in enumerate(counts) if count), key=lambda row: prompts[row]):
        if group and prompts[row] + max(counts[each] for each in [*group, row]) > limit:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
