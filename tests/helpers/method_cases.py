"""The one table of training methods that tests take their rows from.

Its rows are the methods in ``attnreg/training/__init__.pyi``. One without arguments here is tried with its defaults, so
that a new one is tried everywhere at once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import attnreg
from attnreg.training import FineTuning, ForwardPass, R3FLoss, RDropLoss, Reinforce, Rewards, Rounds, TrainingMethod

DRAW = torch.Generator().manual_seed(0)
IDS = torch.randint(1, 20, (8, 6), generator=DRAW)
PADDED = torch.arange(6) < torch.tensor([6, 4, 3, 6, 2, 6, 5, 6])[:, None]
BATCH = {"input_ids": IDS, "attention_mask": PADDED.long(), "labels": (IDS[:, 0] > 9).long()}


def bert(head=hf.BertForSequenceClassification, dropout=0.1, **options):
    """A tiny classifier in float64."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return head(hf.BertConfig(**sizes, intermediate_size=16, **rates, **options)).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3)


def batches(number, rows=4, seed=1):
    """Different batches of a task that can be learned."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(number):
        ids = torch.randint(1, 20, (rows, 6), generator=draw)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": (ids[:, 0] > 9).long()}


def step_of_r_drop(model, batch):
    """The loss of a step of R-Drop that changes nothing, and what its two passes return."""
    torch.manual_seed(1)
    loss = FineTuning(model, torch.optim.SGD(model.parameters(), lr=0.0), objective=RDropLoss(2.0)).step(batch).loss
    torch.manual_seed(1)
    with torch.no_grad():
        passes = model.train()(**batch), model(**batch)
    model.eval()
    return float(loss), passes


def weights(model):
    """All parameters in one row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_stepped(model, before, loss):
    """The model is the one before after a step of :func:`sgd` on a loss of it."""
    gradients = torch.autograd.grad(loss, list(before.parameters()), allow_unused=True)
    for new, old, gradient in zip(model.parameters(), before.parameters(), gradients, strict=True):
        expected = old.data if gradient is None else old.data - 0.1 * gradient
        torch.testing.assert_close(new.data, expected, rtol=0, atol=1e-12)


def assert_parts_are_the_whole(make, build, batch, count):
    """An update in so many micro-batches is that of the whole batch, of a model and a method of it that are made."""
    losses, ends = [], []
    for parts in (1, count):
        model = make()
        method = build(model, micro_batches=parts)
        assert method.micro_batches == parts
        torch.manual_seed(3)
        losses.append(method.step(batch).loss.item())
        ends.append(weights(model))
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
    assert (ends[0] - weights(make())).abs().sum() > 1e-3


def moved(model):
    """The model after some training: away from what was pretrained."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def with_optimizer(method, model, optimizer, provider, sure, options):
    """Make a method of one model."""
    return method(model, optimizer(model), provider, **options)


class Sure(attnreg.GNetProvider):
    """A Generator that leaves nothing to chance: it drops what it would rather drop than the average."""

    def _decisions(self, inputs):
        found = super()._decisions(inputs)
        found.draw = lambda: found.logits > found.logits.mean((-1, -2), keepdim=True) - 1e-4
        return found


def game(method, model, optimizer, provider, sure, options):
    """Make AttendOut's game; a provider acts beside its Generator."""
    generator = (Sure if sure else attnreg.GNetProvider).for_model(model, initial_keep=0.6).double()
    if sure:
        generator.calibrate(next(batches(1, 8)))  # on whole batches: the game would only see this process's rows
    return method(model, generator if provider is None else generator & provider, optimizer, **options)


def averaged(method, model, optimizer, provider, sure, options):
    """Average the weights of plain fine-tuning, or of another method."""
    own = {name: options.pop(name) for name in ("ema", "wise") if name in options}
    return method(FineTuning(model, optimizer(model), provider, **options), **own)


def soup(method, model, optimizer, provider, sure, options):
    """Average the weights of two networks that are trained with different learning rates."""
    own = {"wise": options.pop("wise")}
    pairs = [(model, provider), copy.deepcopy((model, provider))]
    return method([FineTuning(each, optimizer(each), one, **options) for each, one in pairs], **own)


def reward_rows(change):
    """The rows on which the players of a game are scored."""
    return {"rewards": Rewards([change(batch) for batch in batches(3, 8, seed=9)])}


@dataclass(frozen=True)
class MethodCase:
    """A training method to try.

    ``sure`` has further arguments with which nothing is left to chance; ``None`` if there are none. ``data`` makes those
    that hold batches, each of them changed by a function. ``make`` takes those that a check adds.
    """

    method: type[TrainingMethod]
    options: Mapping[str, Any] = field(default_factory=dict)
    sure: Mapping[str, Any] | None = field(default_factory=dict)
    data: Callable[[Callable[[Any], Any]], Mapping[str, Any]] = lambda change: {}
    build: Callable[..., TrainingMethod] = with_optimizer
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.method.__name__} {self.variant}".strip()

    @property
    def takes_micro_batches(self) -> bool:
        """Whether it can split batches."""
        parameters = inspect.signature(self.method).parameters
        return "micro_batches" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def make(
        self,
        model: nn.Module,
        provider: Any = None,
        *,
        optimizer: Any = sgd,
        sure: bool = False,
        change: Callable[[Any], Any] = lambda batch: batch,
        **options: Any,
    ) -> TrainingMethod:
        """Make the method for a model."""
        options = {**self.options, **((sure and self.sure) or {}), **self.data(change), **options}
        return self.build(self.method, model, optimizer, provider, sure, options)


SURE = {"credit": Reinforce(reward="gap", optimizer_factory=sgd), "rounds": Rounds(2, "greedy")}
ARGUMENTS = {
    "Averaged": [
        MethodCase(FineTuning, {"ema": 0.5, "wise": 0.8}, build=averaged),
        MethodCase(FineTuning, {"wise": 0.8}, build=soup, variant="of two"),
    ],
    "Mixout": [MethodCase(FineTuning, {"p": 0.3}, sure={"p": 0.0})],
    "ChildTuning": [
        MethodCase(FineTuning, {"p": 0.5}, variant="F"),
        MethodCase(FineTuning, {"mode": "D", "p": 0.5}, data=lambda change: {"data": [change(BATCH)]}, variant="D"),
    ],
    "FineTuning": [
        MethodCase(FineTuning),
        MethodCase(FineTuning, {"objective": RDropLoss()}, variant="R-Drop"),
        MethodCase(FineTuning, {"objective": R3FLoss(eps=0.1)}, variant="R3F"),
    ],
    "AttackerDefender": [
        MethodCase(FineTuning, {"rounds": Rounds(2), **options}, sure, reward_rows, game, variant)
        for options, sure, variant in (({}, SURE, ""), ({"credit": Reinforce(per="sample")}, None, "sample"))
    ],
}


def built_in() -> dict[str, type[TrainingMethod]]:
    """Return the training methods among the public names, by name."""
    found = {name: getattr(attnreg.training, name) for name in attnreg.training.__all__}
    methods = {
        name: each for name, each in found.items() if isinstance(each, type) and issubclass(each, TrainingMethod)
    }
    return {name: each for name, each in methods.items() if not inspect.isabstract(each)}


class Counting(FineTuning):
    """A method of a user: its updates shrink as it counts."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.updates = 0
        self.mean = torch.zeros(2)

    def loss(self, batch):
        return super().loss(batch) * 0.9**self.updates

    def before_update(self):
        self.updates += 1
        self.mean = 0.9 * self.mean + 1

    def state_dict(self):
        return {**super().state_dict(), "updates": self.updates, "mean": self.mean}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.updates, self.mean = state["updates"], state["mean"]


CASES = [
    replace(case, method=method)
    for name, method in {**built_in(), "Counting": Counting}.items()
    for case in ARGUMENTS.get(name, [MethodCase(method)])
]


def without_chance(monkeypatch):
    """Noise is all ones, and each further pass of an objective predicts something else."""
    own = ForwardPass.__call__

    def scaled(forward, batch):
        factor, head = 1.0 + forward._passes, getattr(forward.model, "classifier", None)
        head = forward.model.get_output_embeddings() if head is None else head
        with head.register_forward_hook(lambda module, args, logits: factor * logits):
            return own(forward, batch)

    monkeypatch.setattr(ForwardPass, "__call__", scaled)
    monkeypatch.setattr(torch, "rand_like", torch.ones_like)


def same(a, b):
    """Nested tensors and plain values are equal, bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(value, b[name]) for name, value in a.items())
    return a == b
