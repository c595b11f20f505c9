"""Watch how often a Generator drops a word."""

from __future__ import annotations

from typing import Any

import torch

from attnreg.attendout.gnet import GNetProvider
from attnreg.errors import InputError
from attnreg.experiments.setup.setup import Setup
from attnreg.training.method import Batch

ROWS = 64


class WatchedWord:
    """The drop rate of a word's keys, and that of all other keys, in some dev rows that contain the word.

    Args:
        run: gives the dev rows and the tokenizer.
        generator: the Generator to watch.
        word: the word, which must be one token.

    Raises:
        InputError: if the tokenizer does not know the word or splits it, or no dev row contains it.
    """

    def __init__(self, run: Setup, generator: GNetProvider, word: str) -> None:
        if run.kind.reads_images:
            raise InputError(f"--watch is for text, but {run.task.name} is of kind {run.task.kind}: remove it.")
        tokens = run.tokenizer(word, add_special_tokens=False)["input_ids"]
        if not tokens or (tokens[0] == run.tokenizer.unk_token_id and word != run.tokenizer.unk_token):
            raise InputError(f"The model's tokenizer does not know the word {word!r} of --watch: choose another.")
        inside = run.tokenizer(f"a {word}", add_special_tokens=False)["input_ids"]  # as within a sentence
        if len(tokens) > 1 and len(inside) > 2:
            pieces = ", ".join(run.tokenizer.convert_ids_to_tokens(tokens))
            raise InputError(
                f"The model's tokenizer splits the word {word!r} of --watch into {pieces}: choose another."
            )
        self.token = inside[-1]
        having = [n for n, ids in enumerate(run.dev_rows["input_ids"]) if self.token in torch.tensor(ids).flatten()]
        if not having:
            raise InputError(f"No dev row contains the word {word!r} of --watch: choose another.")
        self.generator = generator
        self.batches: list[Batch] = run.rows_in_order(run.dev_rows.select(having[:ROWS]))

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Return the rates by layer: ``watched.N`` and ``others.N``."""
        sums: Any = {True: 0.0, False: 0.0}
        counts = {True: 0, False: 0}
        for batch in self.batches:
            dropped = 1 - self.generator.keep_probability(batch).mean(2)  # (B, L, N, N), mean over heads
            units = self.generator.units(batch)
            is_word = (batch["input_ids"].flatten(0, -2) == self.token)[:, None]
            for watched in sums:
                chosen = units & (is_word == watched)
                sums[watched] = sums[watched] + (dropped * chosen[:, None]).sum((0, 2, 3)).double()
                counts[watched] += int(chosen.sum())
        names = {True: "watched", False: "others"}
        return {
            f"{names[watched]}.{layer}": float(total) / max(1, counts[watched])
            for watched in sums
            for layer, total in enumerate(sums[watched])
        }
