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

IMAGE = "image"  # the column of encoded rows


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
        (column,), gold = self.task.columns, self.gold(rows)
        images = rows.select_columns([column])
        images = images if column == IMAGE else images.rename_column(column, IMAGE)
        return images.add_column("labels", gold).add_column(REFERENCE, gold)

    @override
    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        import torch

        pixels = self.tokenizer([row[IMAGE].convert("RGB") for row in rows], return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": torch.tensor([row["labels"] for row in rows])}
