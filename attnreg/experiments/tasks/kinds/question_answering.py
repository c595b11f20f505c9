"""Extractive question answering: find the answer to a question in a text, or say that there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from attnreg.errors import InputError, UsageError
from attnreg.experiments.tasks.columns import NO_LISTS, column_of, converted
from attnreg.experiments.tasks.kinds.kind import FAST, REFERENCE, Kind, Record, Splits, keep_rows

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray
    from torch import Tensor, nn

LONGEST_ANSWER = 30  # tokens, as in BERT's and transformers' scripts


class QuestionAnswering(Kind):
    """A question and a context that holds the answer, in SQuAD's columns.

    A context that does not fit ``max_length`` is divided into windows, which overlap by a third of it. A window is an
    encoded row. A window that does not hold the whole first answer points at the first token (CLS). The prediction of a
    row is the span with the highest sum of start and end logits in any of its windows, with at most 30 tokens. If some
    scored rows have no answer, the prediction is empty where CLS scores higher than every span of every window.

    Reference:
        BERT (arXiv 1810.04805), Sections 4.2 and 4.3.
    """

    head = "AutoModelForQuestionAnswering"
    metrics = ("answer_f1", "exact_match")
    usual_columns = ("question", "context")
    usual_label = "answers"
    has_windows = True
    learns_from = "its first answer within a window of --max-length"
    config: ClassVar[Mapping[str, Any]] = {"num_labels": 2}  # start and end, whatever the model's task has
    tokenizer_needs = FAST
    remarks = ("Rows, batch sizes and losses are of windows, into which contexts are divided; scores of questions.",)

    @override
    def plain(self, splits: Splits, places: Mapping[str, str]) -> Splits:
        columns, metrics = self.task.columns, dict.fromkeys((*self.task.metrics, *self.metrics))
        if len(columns) != 2:
            raise UsageError(
                "Kind question-answering needs two --text-columns, for the question and for the context, got "
                f"{', '.join(columns)}."
            )
        self.task = replace(self.task, metrics=tuple(metrics))
        return splits

    @override
    def gold(self, rows: Dataset, place: str = "the data") -> list[Any]:
        """Return the answers of rows, and where in the context the first one begins and ends."""
        (_, column), gold = self.task.columns, []
        expected = f'answers as {{"text": [...], "answer_start": [...]}} in column {self.task.label}'
        answers = converted(self.labels_in(rows), _answers, expected, place, NO_LISTS)
        for row, (context, value) in enumerate(zip(column_of(rows, column), answers, strict=True), 1):
            for text, at in zip(value["text"], value["answer_start"], strict=True):
                if not text.strip():
                    got = f"{value!r} in row {row} of {place}"
                    raise InputError(f"An answer is empty: use empty lists for a question without one, got {got}.")
                if at < 0 or context[at : at + len(text)] != text:
                    piece = context[max(0, at) : max(0, at) + len(text)]
                    raise InputError(
                        f"The answer {text!r} does not begin at character {at} of column {column}, where {piece!r} is, "
                        f"in row {row} of {place}: count answer_start in characters from 0."
                    )
            pairs = zip(value["text"], value["answer_start"], strict=True)
            spans = ((at + len(text) - len(text.lstrip()), at + len(text.rstrip())) for text, at in pairs)
            gold.append({"row": row, "answers": value["text"], "span": next(spans, None)})
        return gold

    @override
    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        questions, contexts = self._texts(batch)
        questions = [question.strip() for question in questions]
        overlap = self.max_length // 3
        self._check_room(questions, overlap)
        encoded = self.tokenizer(
            questions,
            contexts,
            truncation="only_second",
            max_length=self.max_length,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        rows, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
        spans, references = [], []
        for window, row in enumerate(rows):
            places = [index for index, part in enumerate(encoded.sequence_ids(window)) if part == 1]
            characters = [offsets[window][index] for index in places]
            tokens = _tokens_of(gold[row]["span"], characters)
            ids, no_answer = encoded["input_ids"][window], self.tokenizer.cls_token_id
            empty = ids.index(no_answer) if no_answer in ids else 0
            spans.append([empty, empty] if tokens is None else [places[token] for token in tokens])
            first, last = (characters[0][0], characters[-1][1]) if characters else (0, 0)
            references.append(
                {
                    "row": gold[row]["row"],
                    "answers": gold[row]["answers"],
                    "text": contexts[row][first:last],
                    "characters": [[begin - first, end - first] for begin, end in characters],
                    "places": places,
                    "empty": empty,
                    "has_answer": tokens is not None,
                }
            )
        positions = {name: [span[i] for span in spans] for i, name in enumerate(("start_positions", "end_positions"))}
        return {**encoded, **positions, REFERENCE: references}

    def _check_room(self, questions: Sequence[str], overlap: int) -> None:
        tokens = self.tokenizer(list(questions), add_special_tokens=False)["input_ids"]
        longest = max(map(len, tokens), default=0)
        taken = longest + self.tokenizer.num_special_tokens_to_add(pair=True)
        if taken + overlap >= self.max_length:
            raise InputError(
                f"--max-length {self.max_length} has no room for the context after a question of {longest} tokens: use "
                f"--max-length of at least {taken * 2}."
            )

    @override
    def to_train_on(self, encoded: Dataset) -> Dataset:
        references = encoded[REFERENCE][:]
        whole = {reference["row"] for reference in references if reference["has_answer"] or not reference["answers"]}
        wanted = [reference["row"] in whole for reference in references]  # others would teach no answer
        return keep_rows(encoded, wanted, self.learns_from)

    @override
    def divided(self, encoded: Dataset, at: int) -> int:
        rows = [reference["row"] for reference in encoded[REFERENCE][:]]
        while 0 < at < len(rows) and rows[at - 1] == rows[at]:
            at -= 1
        return at

    @override
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        # On the right, whatever side the tokenizer pads: positions count from the left.
        return dict(self.tokenizer.pad(rows, padding_side="right", return_tensors="pt"))

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        # Arrays: the logits of all windows are kept until their rows are put together.
        starts, ends = (logits.float().cpu().numpy() for logits in (output.start_logits, output.end_logits))
        return list(zip(starts, ends, strict=True))

    @override
    def records(self, answers: Sequence[Any], references: Sequence[Any]) -> list[Record]:
        may_be_empty = any(not reference["answers"] for reference in references)
        rows: dict[int, dict[str, Any]] = {}
        for (start, end), reference in zip(answers, references, strict=True):
            row = rows.setdefault(
                reference["row"], {"label": reference["answers"], "best": (float("-inf"), ""), "empty": float("inf")}
            )
            row["empty"] = min(row["empty"], float(start[reference["empty"]]) + float(end[reference["empty"]]))
            if places := reference["places"]:
                first, last, score = best_span(start[places], end[places], LONGEST_ANSWER)
                characters = reference["characters"]
                text = reference["text"][characters[first][0] : characters[last][1]].strip()
                row["best"] = max(row["best"], (score, text), key=lambda pair: pair[0])
        return [
            self.record("" if may_be_empty and row["empty"] > row["best"][0] else row["best"][1], row["label"])
            for row in rows.values()
        ]

    @override
    def compared(self, metric: str, records: Sequence[Record]) -> tuple[list[Any], list[Any]]:
        from attnreg.experiments.tasks.metrics import normalized, word_f1  # late: it imports torch

        predictions = [normalized(record["prediction"]) for record in records]
        labels = [[normalized(text) for text in record["label"] or [""]] for record in records]
        pairs = zip(predictions, labels, strict=True)
        return predictions, [max(texts, key=lambda text: (ours == text, word_f1(ours, text))) for ours, texts in pairs]


def _answers(value: Any) -> Any:
    match value:
        case {"text": list(texts), "answer_start": list(starts)} if len(texts) == len(starts):
            fits = all(isinstance(text, str) and isinstance(at, int) for text, at in zip(texts, starts, strict=True))
            return value if fits else None
    return None


def _tokens_of(span: tuple[int, int] | None, characters: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Return the first and the last token of a span of characters; ``None`` if a window does not hold all of it."""
    if span is None or not characters or span[0] < characters[0][0] or span[1] > characters[-1][1]:
        return None
    first = next(number for number, (_, end) in enumerate(characters) if end > span[0])
    last = next(number for number in reversed(range(len(characters))) if characters[number][0] < span[1])
    return (first, last) if first <= last else None


def best_span(start: NDArray[np.floating], end: NDArray[np.floating], longest: int) -> tuple[int, int, float]:
    """Return the first and the last token of the span with the highest sum of logits, ``(n,)``, and this sum."""
    import numpy as np

    sums = start[:, None] + end[None, :]
    allowed = np.tril(np.triu(np.ones_like(sums, bool)), longest - 1)
    sums = np.where(allowed, sums, -np.inf)
    first, last = np.unravel_index(sums.argmax(), sums.shape)
    return int(first), int(last), float(sums[first, last])
