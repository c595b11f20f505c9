"""Fine-tuning while an oracle hides a word: by masks, or by deleting it from the training text.

attnreg recipe docs/results/ceiling/oracle.py --data-dir PLANTED --p 0.9
"""

from collections.abc import Mapping
from typing import Any

import click
import torch

import attnreg
from attnreg.experiments import option, recipe


class HiddenWord(attnreg.MaskProvider):
    """Drops a word's keys for all queries and heads, each with probability p in each sample and layer.

    With ``random``, it drops as many keys of other words instead, drawn anew in each layer.
    """

    def __init__(self, token: int, special: list[int], p: float, random: bool) -> None:
        super().__init__()
        self.token, self.special, self.p, self.random = token, special, p, random

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Find the word, and the other words."""
        ids = inputs["input_ids"]
        self.is_word = ids == self.token
        self.is_other = ~self.is_word & ~torch.isin(ids, torch.tensor(self.special, device=ids.device))

    def forward(self, site: attnreg.AttentionSite) -> attnreg.Mask:
        """Return the mask."""
        batch, length = self.is_word.shape
        hidden = self.is_word
        if self.random:
            places = site.uniform((batch, 1, 1, length))[:, 0, 0].masked_fill(~self.is_other, -1.0)
            ranks = places.argsort(1, descending=True).argsort(1)
            hidden = self.is_other & (ranks < self.is_word.sum(1, keepdim=True))
        return attnreg.Mask(scores=site.keep(self.p, (batch, 1, 1, length)) | ~hidden[:, None, None])


@recipe(
    "oracle",
    option("--word", default="[UNK]", help="Word to hide, one token."),
    option("--p", type=click.FloatRange(0, 1), default=0.9, help="Probability of hiding it, per sample and layer."),
    option("--random", is_flag=True, help="Hide as many keys of other words instead."),
    option("--delete", is_flag=True, help="Delete the word from the training rows; hide nothing."),
)
def oracle(run: "attnreg.experiments.Run", word: str, p: float, random: bool, delete: bool) -> None:
    """Fine-tuning while an oracle hides a word."""
    token = run.tokenizer.convert_tokens_to_ids(word)
    if delete:
        columns = [name for name, value in run.train_rows[0].items() if isinstance(value, list)]

        def without(row: dict[str, Any]) -> dict[str, Any]:
            kept = [place for place, each in enumerate(row["input_ids"]) if each != token]
            return {name: [row[name][place] for place in kept] for name in columns}

        run.train_rows = run.train_rows.map(without)
        run.report(run.train())
        return
    special = [each for each in run.tokenizer.all_special_ids if each != token]
    run.report(run.train(provider=HiddenWord(token, special, p, random)))
