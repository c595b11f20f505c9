"""Batches, heads and a regularizer for objectives of several passes."""

import pytest
import torch
import transformers as hf

import attnreg

IDS = torch.arange(1, 13).view(3, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
BATCH = {"input_ids": IDS, "labels": torch.tensor([0, 1, 1])}
PADDED = {"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([0, 2, 1])}

heads = pytest.mark.parametrize(
    ("head", "options", "labels"),
    [
        (hf.BertForSequenceClassification, {"num_labels": 3}, torch.tensor([0, 2, 1])),
        (hf.BertForSequenceClassification, {"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)),
        (hf.BertForTokenClassification, {"num_labels": 3}, torch.where(MASK == 1, IDS % 3, -100)),
    ],
)


class Recorder(attnreg.AttentionDropout):
    def __init__(self):
        super().__init__(0.5)
        self.masks = []
        self.prepared = 0

    def prepare(self, inputs):
        self.prepared += 1

    def forward(self, site):
        self.masks.append(super().forward(site))
        return self.masks[-1]

    def penalty(self):
        return torch.tensor(float(len(self.masks)))
