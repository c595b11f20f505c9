"""Sequence to sequence: translation, and whatever else is text from text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from attnreg.experiments.tasks.columns import column_of, texts_of
from attnreg.experiments.tasks.definition import Task
from attnreg.experiments.tasks.kinds.base import REFERENCE, Kind, Record

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn


class Seq2Seq(Kind):
    """A text for each row, generated at evaluation and held against the whole of the right one, however long.

    Trained with the right text's tokens before each token; generated as the model's own configuration says (number of
    beams and so on), without sampling, ``max_length`` tokens at most.
    """

    head: ClassVar[str] = "AutoModelForSeq2SeqLM"
    metrics: ClassVar[tuple[str, ...]] = ("bleu",)
    most_columns: ClassVar[int] = 1
    has_text_labels: ClassVar[bool] = True
    scored_train_rows: ClassVar[int] = 100  # generating takes its time

    @classmethod
    @override
    def gold(cls, task: Task, rows: Dataset, place: str = "the data") -> list[Any]:
        return texts_of(rows, task.label, place)

    @classmethod
    @override
    def head_options(cls, task: Task) -> dict[str, Any]:
        return {}

    @override
    def inputs(self, batch: dict[str, list[Any]], gold: list[Any]) -> dict[str, Any]:
        (source,) = self._texts(batch)
        encoded = self.tokenizer(source, text_target=gold, truncation=True, max_length=self.max_length)
        encoded.pop("token_type_ids", None)  # which encoders with decoders have no use for
        return {**encoded, REFERENCE: column_of(batch, self.task.label)}

    @override
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        from transformers import DataCollatorForSeq2Seq

        return dict(DataCollatorForSeq2Seq(self.tokenizer)(rows))

    @override
    def answers(self, network: nn.Module, batch: Mapping[str, Tensor], output: Any) -> list[Any]:
        generate: Any = network.generate
        given = {name: tensor for name, tensor in batch.items() if name in ("input_ids", "attention_mask")}
        ids = generate(**given, max_new_tokens=self.max_length, do_sample=False)
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    @override
    def record(self, answer: Any, reference: Any) -> Record:
        return {"label": reference, "prediction": answer}
