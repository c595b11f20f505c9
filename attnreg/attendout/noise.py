"""Noise on the tokens of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnreg.errors import InputError
from attnreg.training.method import Batch


def noisy_tokens(batch: Batch, share: float, special_tokens: Sequence[int] = ()) -> Batch:
    """Replace a share of a batch's tokens by random other tokens of the batch.

    Args:
        batch: model inputs with ``input_ids`` and, optionally, ``attention_mask``.
        share: probability of replacing each token.
        special_tokens: ids of tokens that are neither replaced nor used; padding stays as it is, too.

    Raises:
        InputError: if the batch has no ``input_ids``.

    Example:
        >>> batch = {"input_ids": torch.tensor([[1, 5, 5, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
        >>> noisy_tokens(batch, 1.0, special_tokens=[1])["input_ids"]
        tensor([[1, 5, 5, 0]])
    """
    ids = batch.get("input_ids")
    if ids is None:
        raise InputError(f"The batch {sorted(batch)} holds no `input_ids` to add noise to.")
    replaceable = torch.ones_like(ids, dtype=torch.bool)
    if "attention_mask" in batch:
        replaceable = batch["attention_mask"].bool()
    if special_tokens:
        replaceable = replaceable & ~torch.isin(ids, torch.tensor(list(special_tokens), device=ids.device))
    pool = ids[replaceable]
    if not len(pool):
        return batch
    drawn = pool[torch.randint(len(pool), ids.shape, device=ids.device)]
    replaced = replaceable & (torch.rand(ids.shape, device=ids.device) < share)
    return {**batch, "input_ids": torch.where(replaced, drawn, ids)}
