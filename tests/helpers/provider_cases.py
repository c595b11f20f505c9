"""The one table of providers that tests take their rows from.

A provider without a row of its own has the row ``Name()``, so that a new one is tried everywhere at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import attnreg
from attnreg.regularizer.saving import built_in

MATRIX, VARIANT, EXTREME, COMPILED = "matrix", "variant", "extreme", "compiled"


def mean_square(output: Any, batch: Any) -> torch.Tensor:
    """A loss for models without labels."""
    result = output if isinstance(output, torch.Tensor) else output[0]
    return result.square().mean()


def odd_keys(inputs: Any) -> torch.Tensor:
    ids = inputs["input_ids"]
    return (ids % 2 == 1)[:, None].expand(-1, ids.shape[1], -1)


def no_edges(inputs: Any) -> torch.Tensor:
    return torch.zeros(inputs["input_ids"].shape[-1:] * 2).bool()


@dataclass(frozen=True)
class ProviderCase:
    """A provider to try.

    ``text`` is an expression, in which providers with a ``for_model`` are made for the model at hand; ``role`` says
    where it is tried: ``matrix`` (every check on every model), ``variant`` (of a provider with another row: on every
    model in slow tests only), ``extreme`` (everything stays finite), ``compiled``.
    """

    name: str
    text: str
    role: str = MATRIX
    needs_token_ids: bool = False
    needs_queries: bool = False
    drops: bool = True  # whether drop rates are above 0
    changes_output: bool = True  # or only the loss, by a penalty

    def __str__(self) -> str:
        return self.name

    @property
    def variant(self) -> bool:
        return self.role == VARIANT

    @property
    def made_for_model(self) -> bool:
        """With parameters for each layer that learn by the loss, as a Generator's do not."""
        return not self.needs_token_ids and any(
            f"{name}(" in self.text for name, cls in BUILT_IN.items() if hasattr(cls, "for_model")
        )

    @property
    def portable(self) -> bool:
        """Whether its arguments can be saved, as a function cannot."""
        return not any(name in self.text for name in FUNCTIONS)

    @property
    def outermost(self) -> str:
        return "Compose" if " & " in self.text else self.text.partition("(")[0]

    def make(self, model: nn.Module, **options: Any) -> attnreg.Regularizer:
        """The provider; options go to all classes that take them."""

        def factory(cls: type) -> Callable[..., attnreg.Regularizer]:
            made = getattr(cls, "for_model", cls)
            first = (model,) if made is not cls else ()

            def call(*args: Any, **given: Any) -> attnreg.Regularizer:
                takes = inspect.signature(made).parameters
                more = {"total_steps": 10, **options}
                free = {k: v for k, v in more.items() if k in takes and k not in given}
                return made(*first, *args, **given, **free)

            return call

        return eval(self.text, {**FUNCTIONS, **{name: factory(cls) for name, cls in BUILT_IN.items()}})


BUILT_IN = built_in()
FUNCTIONS = {"mean_square": mean_square, "odd_keys": odd_keys, "no_edges": no_edges}
CASES = [
    ProviderCase("weights-dropout", "AttentionDropout(0.4)"),
    ProviderCase("scores-dropout", "AttentionDropout(0.4, placement='scores')"),
    ProviderCase("weights p=1", "AttentionDropout(1.0)", EXTREME),
    ProviderCase("scores p=1", "AttentionDropout(1.0, 'scores')", EXTREME),
    ProviderCase("scores p=0", "AttentionDropout(0.0, 'scores')", EXTREME),
    ProviderCase("drop-attention", "DropAttention(0.4, window=2)"),
    ProviderCase("drop-attention, columns", "DropAttention(0.4, 'column')", VARIANT),
    ProviderCase("drop-attention p=1", "DropAttention(1.0)", EXTREME),
    ProviderCase("drop-attention p=0.9", "DropAttention(0.9, 'column', window=3)", EXTREME),
    ProviderCase("layerdrop", "AttentionLayerDrop(1.0)"),
    ProviderCase("layerdrop 0.5", "AttentionLayerDrop(0.5)", COMPILED),
    ProviderCase("layerdrop p=1", "AttentionLayerDrop(1.0)", EXTREME),
    ProviderCase("block-layerdrop", "LayerDrop(1.0)"),
    ProviderCase("blocks 0.5", "LayerDrop(0.5)", COMPILED),
    ProviderCase("blocks p=1", "LayerDrop(1.0)", EXTREME),
    ProviderCase("blocks and scores", "LayerDrop(0.5) & AttentionDropout(1.0, 'scores')", EXTREME),
    ProviderCase("token-dropout", "TokenDropout(0.6, keep_whole=0.2)"),
    ProviderCase("tokens p=1", "TokenDropout(1.0, keep_whole=0.0)", EXTREME),
    ProviderCase("unidrop", "UniDrop(0.2, 0.3, 0.6, keep_whole=0.2)"),
    ProviderCase("unidrop, output", "UniDrop(0.0, 0.0, 0.0, output=0.5)", VARIANT),
    ProviderCase("unidrop p=1", "UniDrop(1.0, 0.5, 1.0, keep_whole=0.0)", EXTREME),
    ProviderCase("bernoulli-schedule", "BernoulliScheduleProvider([(0, 0.6), (1, 0.2)])"),
    ProviderCase(
        "bernoulli per layer", "BernoulliScheduleProvider([[(0, 0.6), (1, 0)], [(0, 0)]], total_steps=4)", COMPILED
    ),
    ProviderCase("bernoulli p=1", "BernoulliScheduleProvider([(0, 1.0)])", EXTREME),
    ProviderCase("scheduled", "Scheduled(DropKey(), over='depth', p=[(0, 0.6), (1, 0.3)])"),
    ProviderCase("scheduled, training", "Scheduled(DropHead(), p=[(0, 0.5), (1, 0)])", COMPILED),
    ProviderCase("g-net", "GNetProvider(initial_keep=0.5)", needs_token_ids=True),
    ProviderCase("g-net-heads", "GNetProvider(initial_keep=0.5, num_heads=4)", VARIANT, needs_token_ids=True),
    ProviderCase("g-net drops all", "GNetProvider(initial_keep=1e-6)", EXTREME, needs_token_ids=True),
    ProviderCase("concrete", "ConcreteDropout(0.4)"),
    ProviderCase("concrete, heads", "ConcreteDropout(0.4, per='head')", VARIANT),
    ProviderCase("concrete p=1", "ConcreteDropout(0.999)", EXTREME),
    ProviderCase("learnable", "LearnableBernoulli(0.4, loss=mean_square)"),
    ProviderCase("learnable p=1", "LearnableBernoulli(0.999)", EXTREME),
    ProviderCase("contextual", "ContextualDropout(0.4)", needs_queries=True),
    ProviderCase("contextual p=1", "ContextualDropout(0.999)", EXTREME, needs_queries=True),
    ProviderCase("adversarial", "AdversarialAttention(initial_keep=0.6)", needs_queries=True),
    ProviderCase("adversarial drops all", "AdversarialAttention(initial_keep=1e-6)", EXTREME, needs_queries=True),
    ProviderCase("on-layers", "OnLayers(AttentionDropout(0.4, 'scores'), [-1])"),
    ProviderCase("ad-drop", "AttributionProvider(0.6, 0.6)"),
    ProviderCase("ad-drop, cross-tuned", "ADDrop(0.6, 0.6, every=1, offset=0)"),
    ProviderCase("ad-drop p=q=1", "AttributionProvider(1.0, 1.0)", EXTREME),
    ProviderCase(
        "ad-drop, integrated", "AttributionProvider(1.0, 1.0, method='integrated_gradients', steps=2)", EXTREME
    ),
    ProviderCase("drop-head", "DropHead(0.5)"),
    ProviderCase("drop-head p=1", "DropHead(1.0)", EXTREME),
    ProviderCase("head-mask", "HeadMask(1)"),
    ProviderCase("head-mask-importance", "HeadMask(1, 'importance', target='predicted')"),
    ProviderCase("head-mask, extreme", "HeadMask(1)", EXTREME),
    ProviderCase("head-mask, importance, extreme", "HeadMask(1, 'importance')", EXTREME),
    ProviderCase("drop-key", "DropKey(0.5)"),
    ProviderCase("drop-key-shared", "DropKey(0.5, share_heads=True, share_queries=True)", VARIANT),
    ProviderCase("drop-key p=1", "DropKey(1.0, share_queries=True)", EXTREME),
    ProviderCase("structural-mask", "StructuralMask(1, heads=[0, 1])"),
    ProviderCase("structural-mask-first", "StructuralMask(1, keep_first=True)", VARIANT),
    ProviderCase("structural-mask, graph", "StructuralMask(odd_keys)", COMPILED),
    ProviderCase("structural-mask, alone", "StructuralMask(0, keep_first=True)", EXTREME),
    ProviderCase("structural-mask, no edges", "StructuralMask(no_edges)", EXTREME),
    ProviderCase("hidden-dropout", "HiddenDropout(0.4, where=['embeddings', 'output'])"),
    ProviderCase("hidden-dropout, columns", "HiddenDropout(0.4, 'column', where='input')", VARIANT),
    ProviderCase("hidden-dropout, spans", "HiddenDropout(0.4, 'span', where='input')", VARIANT),
    ProviderCase("hidden-dropout p=0.5", "HiddenDropout(0.5)", EXTREME),
    ProviderCase("hidden-attribution", "HiddenAttributionDropout(0.6, 0.6, ['embeddings', 'output'])"),
    ProviderCase("hidden-attribution p=1", "HiddenAttributionDropout(1.0, 0.5)", EXTREME),
    ProviderCase("hidden-cut", "HiddenCut(0.4)"),
    ProviderCase("hidden-cut, anywhere", "HiddenCut(0.5, 1.0)", COMPILED),
    ProviderCase("blocks, keys and states", "LayerDrop(0.0) & DropKey(0.3) & HiddenDropout(0.3)", COMPILED),
    ProviderCase("embedding-noise", "EmbeddingNoise(5.0)", drops=False),
    ProviderCase("hidden-noise", "HiddenNoise(0.1)", drops=False),
    ProviderCase("hidden-noise, uniform", "HiddenNoise(0.1, 'uniform')", VARIANT, drops=False),
    ProviderCase("relaxed", "RelaxedAttention(0.4)", drops=False),
    ProviderCase("relaxed gamma=1", "RelaxedAttention(1.0)", EXTREME),
    ProviderCase("relaxed and scores", "RelaxedAttention(0.5) & AttentionDropout(1.0, 'scores')", EXTREME),
    ProviderCase("entropy", "AttentionEntropy(0.5)", drops=False, changes_output=False),
    ProviderCase("hidden-key", "HiddenKey(0.4)"),
    ProviderCase("composition", "AttentionDropout(0.2) & AttentionDropout(0.2, 'scores')"),
    ProviderCase("with layerdrop", "AttentionDropout(0.2, 'scores') & AttentionLayerDrop(0.5)", COMPILED),
    ProviderCase("both p=1", "AttentionDropout(1.0, 'scores') & AttentionDropout(0.5)", EXTREME),
]
TRIED = {case.outermost for case in CASES} | {"CrossTuning"}  # which needs a provider and epochs
CASES += [ProviderCase(name.lower(), f"{name}()") for name in BUILT_IN if name not in TRIED]
PROVIDERS = [case for case in CASES if case.role in (MATRIX, VARIANT)]
