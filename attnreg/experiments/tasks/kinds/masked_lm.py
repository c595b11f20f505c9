"""Masked language modelling, BERT's pre-training: predict hidden tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from attnreg.errors import InputError
from attnreg.experiments.tasks.kinds.kind import IGNORED, REFERENCE, Kind, Record, kept, labelled

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn

TRIES = 100


class MaskedLM(Kind):
    """Text without labels. 15 % of the tokens are predicted, most of them masked; accuracy is over these tokens.

    The tokens are drawn anew for each training batch, and for evaluation once, by the number of the row. Rows without a
    token to predict, such as empty lines, are skipped.

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
        return kept(encoded, words, f"a token to predict in column {self.task.label}")

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
            for trial in range(TRIES):  # a few short rows may have nothing hidden
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
            {"label": gold[here].tolist(), "prediction": guess[here].tolist()}
            for guess, gold, here in zip(guesses, labels, hidden, strict=True)
        ]

    @override
    def record(self, answer: Any, reference: Any) -> Record:
        return {name: self.tokenizer.convert_ids_to_tokens(ids) for name, ids in answer.items()}
