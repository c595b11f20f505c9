"""Classification of images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from attnreg.errors import InputError, one_line
from attnreg.experiments.tasks.kinds.classification import Classification
from attnreg.experiments.tasks.kinds.kind import REFERENCE

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor


class ImageClassification(Classification):
    """One class per image. The model's image processor resizes and normalizes; images are not augmented.

    Images stay in their files and are read for each batch.
    """

    head = "AutoModelForImageClassification"
    reads_images = True
    most_columns = 1
    usual_columns = ("image",)

    @override
    def check(self, rows: Dataset, place: str) -> None:
        from datasets import Image

        (column,) = self.task.columns
        if not isinstance(rows.features.get(column), Image):
            raise InputError(
                f"Expected images in column {column} of {place}, got {rows.features.get(column)}: use --data-dir to "
                "give a folder of images, with a subfolder for each class in train and validation."
            )
        images = rows.select_columns([column])
        for row in range(len(rows)):
            try:
                image = images[row][column]
            except (OSError, ValueError, SyntaxError) as error:  # Pillow raises the last for a broken PNG
                reason = one_line(error)
                raise InputError(f"Cannot read the image in row {row + 1} of {place}: {reason}") from error
            if image is None:
                raise InputError(f"Expected an image in column {column}, got None in row {row + 1} of {place}.")
        self.gold(rows, place)

    @override
    def encode(self, rows: Dataset) -> Dataset:
        images, gold = rows.select_columns([*self.task.columns]), self.gold(rows)
        return images.add_column("labels", gold).add_column(REFERENCE, gold)

    @override
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        import torch

        images = [row[self.task.columns[0]].convert("RGB") for row in rows]
        labels = torch.tensor([row["labels"] for row in rows])
        return {"pixel_values": self.tokenizer(images, return_tensors="pt")["pixel_values"], "labels": labels}
