"""Train the embeddings of the tokens that the rows have: those of all others get no gradient, but would take time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class UsedTokens:
    """The tokens that a model has read, and copies of the model with the embeddings of these tokens alone.

    A multilingual vocabulary may have more weights than all layers, and AdamW would update all of them in each step.

    Args:
        model: the pretrained model, which stays unchanged.
        padding: a token that batches may have, too.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=900, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertForSequenceClassification(config).eval()
        >>> tokens, ids = UsedTokens(model, padding=0), torch.tensor([[7, 800, 7]])
        >>> with tokens.watched():
        ...     expected = model(ids).logits
        >>> small = tokens.small()
        >>> small.get_input_embeddings().weight.shape[0], small(ids).logits.equal(expected)
        (3, True)
        >>> tokens.whole(small).get_input_embeddings().weight.shape[0]
        900
    """

    def __init__(self, model: Any, padding: int | None) -> None:
        self.model = model
        self._name = _embedding_of(model)
        if self._name is not None:
            embedding = model.get_submodule(self._name)
            self._is_used = torch.zeros(embedding.num_embeddings, dtype=torch.bool)
            self._is_used[[token for token in (padding, embedding.padding_idx) if token is not None]] = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the tokens that the model reads within the block."""

        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._is_used[args[0].cpu()] = True

        if self._name is None:
            yield
            return
        handle = self.model.get_submodule(self._name).register_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def small(self) -> Any:
        """Return a copy of the model with the embeddings of the tokens that it has read."""
        if self._name is None:
            return self.model
        embedding, used = self.model.get_submodule(self._name), self._is_used
        tokens = used.nonzero().flatten().to(embedding.weight.device)
        weight = nn.Parameter(embedding.weight.detach()[tokens])
        model = copy.deepcopy(self.model, {id(embedding.weight): weight})
        copied = model.get_submodule(self._name)
        positions = torch.where(used, used.cumsum(0) - 1, 0)  # other tokens are in made-up inputs only
        copied.register_buffer("positions", positions.to(weight.device), persistent=False)
        copied.register_buffer("tokens", tokens, persistent=False)
        copied.forward = functools.partial(_embed, copied)  # not a hook, which dry runs of `attach` leave out
        if embedding.padding_idx is not None:
            copied.padding_idx = int(positions[embedding.padding_idx])
        return model

    def whole(self, network: nn.Module) -> Any:
        """Return a copy of the model with the weights of a trained small copy, and the other embeddings as before."""
        if self._name is None:
            return network
        model, weights, name = copy.deepcopy(self.model), network.state_dict(), f"{self._name}.weight"
        embeddings = model.get_parameter(name).detach()
        embeddings[network.get_submodule(self._name).tokens] = weights[name]
        model.load_state_dict({**weights, name: embeddings})
        return model


def _embed(embedding: Any, tokens: Tensor) -> Tensor:
    return type(embedding).forward(embedding, embedding.positions[tokens])


def _embedding_of(model: Any) -> str | None:
    """Return the name of the embedding of tokens if it is a module of torch whose weights no other module has."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if not isinstance(embedding, nn.Embedding) or not embedding.weight.requires_grad:
        return None
    held = [name for name, weight in model.named_parameters(remove_duplicate=False) if weight is embedding.weight]
    names = [name for name, module in model.named_modules() if module is embedding]
    return names[0] if held == [f"{names[0]}.weight"] else None
