"""Draw the pictures of the providers' pages: ``python docs/pictures.py [PAGE ...]``, about a minute for all.

A page asks for its picture in the alt text of an image in ``_static/providers``, which begins with an expression:
"DropKey(0.1) in a training step". A tiny BERT learns for a few steps, under that provider, that sentences with "not"
are negative. The picture shows what the provider then does in a training pass on one sentence.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from PIL import Image
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import attnreg
from attnreg import functional
from attnreg.training import (
    AttackerDefender,
    FineTuning,
    Rewards,
    Rounds,
    TrainingMethod,
    adamw,
)

FOLDER = Path(__file__).parent / "providers"
IMAGE = re.compile(
    r"!\[(?P<text>[^\n]+?) in a training step[^\n]*?\]\((?P<path>\.\./_static/providers/[\w-]+\.png)\)"
)
WORDS = ["[CLS]", "the", "film", "was", "not", "good", "and", "long", "very", "new"]
SENTENCE = ["[CLS]", "the", "film", "was", "not", "very", "good"]
LAYERS, HEADS, STEPS = 3, 4, 60
# Middle tones on a transparent background, for light and dark pages.
GREY, BLUE, ORANGE = "#808080", "#2f80c8", "#e08214"


class Recorder(attnreg.MaskProvider):
    """Masks nothing, and keeps the attention of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: dict[int, Tensor] = {}

    def forward(self, site: attnreg.AttentionSite) -> None:
        """Keep the attention weights of a site, before masks."""
        self.attention[site.layer] = site.scores().detach().softmax(-1)


def batches() -> Iterator[dict[str, Tensor]]:
    """Yield batches of the toy task."""
    while True:
        ids = torch.randint(1, len(WORDS), (32, len(SENTENCE)))
        ids[:, 0] = 0
        yield {"input_ids": ids, "labels": (ids == WORDS.index("not")).any(1).long()}


def trained(
    text: str | None,
) -> tuple[TrainingMethod, attnreg.Regularizer | None, Recorder]:
    """Train a model for a few steps under a provider; AttendOut's Generator learns in its game."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    )
    model, recorder, rows = (
        BertForSequenceClassification(config),
        Recorder(),
        batches(),
    )
    provider = (
        attnreg.parse_provider(text, model, total_steps=STEPS) if text else None
    )
    both = recorder if provider is None else provider & recorder
    if isinstance(provider, attnreg.GNetProvider):
        game: dict[str, Any] = {
            "rewards": Rewards([next(rows)]),
            "rounds": Rounds(4),
        }
        method: TrainingMethod = AttackerDefender(
            model, both, lambda network: adamw(network, 3e-3), **game
        )
    else:
        optimizer = adamw(model, 3e-3)
        if provider is not None and (learned := provider.learned_parameters()):
            optimizer.add_param_group(
                {"params": learned, "lr": 1e-2, "weight_decay": 0.0}
            )
        method = FineTuning(model, optimizer, both)
    for _ in range(STEPS):
        method.step(next(rows))
    return method, provider, recorder


def seen(text: str | None) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return, by layer, attention and which of it is dropped; and hidden states before and after."""
    method, provider, recorder = trained(text)
    masks: dict[int, attnreg.Mask] = {}
    states: dict[int, Any] = {}

    def keep_mask(_: Any, asked: tuple[Any, ...], mask: attnreg.Mask | None) -> None:
        if isinstance(asked[0], attnreg.AttentionSite):
            masks[asked[0].layer] = mask or attnreg.Mask()

    def keep_states(_: Any, asked: tuple[Any, ...], after: Tensor) -> None:
        if isinstance(asked[0], attnreg.HiddenSite):
            states[asked[0].layer] = (asked[1][0].detach(), after[0].detach())

    if provider is not None:
        provider.register_forward_hook(keep_mask)
        for each in provider.modules():
            each.register_forward_hook(keep_states) if isinstance(
                each, attnreg.HiddenProvider
            ) else None
    recorder.attention.clear()
    batch = {
        "input_ids": torch.tensor([[WORDS.index(word) for word in SENTENCE]]),
        "labels": torch.tensor([1]),
    }
    method.step(batch)  # the last one: what it makes of the model is not looked at
    attention = {
        layer: effective(weights, masks.get(layer))
        for layer, weights in recorder.attention.items()
    }
    return attention, states


def effective(weights: Tensor, mask: attnreg.Mask | None) -> tuple[Tensor, Tensor]:
    """Return attention under a mask, ``(H, Q, K)``, and which positions are dropped."""
    dropped = torch.zeros_like(weights, dtype=torch.bool)
    if mask is None:
        return weights[0], dropped[0]
    mask = mask.written_out()
    if mask.units_kept is not None:
        dropped = ~mask.units_kept.expand_as(weights)
    if mask.scores is not None:
        weights = functional.masked_scores(weights.log(), mask.scores).softmax(-1)
    weights = mask.of_weights(weights, None)
    return weights[0].detach(), dropped[0]


def cells(axis: Axes, values: Tensor, dropped: Tensor, color: str = BLUE) -> None:
    """Draw a matrix: the larger a value, the more opaque; dropped cells in orange."""
    image = torch.tensor(mpl.colors.to_rgba(color)).expand(*values.shape, 4).clone()
    image[..., 3] = values.clamp(0, 1).sqrt()
    image[dropped] = torch.tensor(mpl.colors.to_rgba(ORANGE))
    axis.imshow(image.numpy(), interpolation="nearest", aspect="auto")
    axis.set(xticks=[], yticks=[])
    axis.hlines(
        [row - 0.5 for row in range(1, len(values))],
        -0.5,
        values.shape[1] - 0.5,
        GREY,
        linewidth=0.2,
    )
    if values.shape[1] == len(SENTENCE):
        axis.vlines(
            [column - 0.5 for column in range(1, len(SENTENCE))],
            -0.5,
            len(values) - 0.5,
            GREY,
            linewidth=0.2,
        )


def drawn(text: str) -> plt.Figure:
    """Draw what a provider does: attention of each layer and head, and hidden states."""
    attention, states = seen(text)
    panels = {
        layer: list(zip(*shown, strict=True)) for layer, shown in attention.items()
    }
    skipped = [(torch.zeros(7, 7), torch.ones(7, 7) > 0)] * HEADS
    panels = {layer: panels.get(layer, skipped) for layer in range(LAYERS)}
    titles = [f"head {head}" for head in range(HEADS)]
    masked = any(
        bool(dropped.any()) for row in panels.values() for _, dropped in row
    )
    if not masked and not states:  # shown beside plain training
        plain = {
            layer: list(zip(*shown, strict=True))
            for layer, shown in seen(None)[0].items()
        }
        panels = {layer: plain[layer][:2] + panels[layer][:2] for layer in panels}
        titles = [
            f"head {head}, {how}" for how in ("plain", "with it") for head in (0, 1)
        ]
    elif not masked:
        panels, titles = {layer: [] for layer in states}, []
    heads = len(titles)
    figure, axes = plt.subplots(
        len(panels),
        heads + bool(states),
        figsize=(7.2, 1.4 * len(panels) + 0.5 if heads else 1.0 * len(panels) + 0.5),
        width_ratios=[1.0] * heads + [1.6] * bool(states),
        squeeze=False,
        layout="constrained",
    )
    for row, (layer, shown) in zip(axes, panels.items(), strict=True):
        row[0].set_ylabel(f"layer {layer}")
        for axis, (weights, dropped) in zip(row, shown, strict=False):
            cells(axis, weights, dropped)
        if states:
            dropped = states_dropped(*states[layer])
            size = (
                states[layer][1].abs()
                if dropped.any()
                else (states[layer][1] - states[layer][0]).abs()
            )
            cells(row[-1], size / size.max(), dropped)
        row[0].set_yticks(range(len(SENTENCE)), SENTENCE)
    for axis, below, title in zip(
        axes[0], axes[-1], [*titles, "hidden states"], strict=False
    ):
        axis.set_title(title, fontsize=8)
        if title == "hidden states":
            below.set_xlabel("feature")
        else:
            below.set_xticks(range(len(SENTENCE)), SENTENCE, rotation=90)
    drops = masked or any(
        bool(states_dropped(*each).any()) for each in states.values()
    )
    what = "attention weight" if heads else "value" if drops else "noise"
    labels = [Patch(color=BLUE, label=f"{what} (the stronger the blue, the larger)")]
    labels += [Patch(color=ORANGE, label="dropped")] * drops
    figure.legend(handles=labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


OVERVIEW = {
    "plain model": None,
    "AttentionDropout": "AttentionDropout(0.2, 'scores')",
    "DropKey": "DropKey(0.3, share_queries=True)",
    "DropHead": "DropHead(0.4)",
    "AttentionLayerDrop": "AttentionLayerDrop(0.5)",
    "AD-DROP": "AttributionProvider(p=0.3, q=0.7)",
}
DROPPED = (
    "nothing",
    "single weights",
    "whole keys",
    "whole heads",
    "whole layers",
    "what the prediction leans on",
)


def overview() -> plt.Figure:
    """Draw what five regularizers drop, in all layers and heads."""
    figure, axes = plt.subplots(2, 3, figsize=(7.2, 4.6), layout="constrained")
    for axis, (name, text), what in zip(
        axes.flat, OVERVIEW.items(), DROPPED, strict=True
    ):
        rows = [list(seen(text)[0][layer]) for layer in range(LAYERS)]
        weights, dropped = (
            torch.cat([torch.cat([*row[part]], 1) for row in rows])
            for part in (0, 1)
        )
        cells(axis, weights, dropped)
        size = len(SENTENCE)
        axis.hlines(
            [size * row - 0.5 for row in range(1, LAYERS)],
            -0.5,
            HEADS * size - 0.5,
            GREY,
            linewidth=1.5,
        )
        axis.vlines(
            [size * column - 0.5 for column in range(1, HEADS)],
            -0.5,
            LAYERS * size - 0.5,
            GREY,
            linewidth=1.5,
        )
        axis.set_title(f"{name}: {what}", fontsize=8)
        axis.set_xticks(
            [size * (head + 0.5) - 0.5 for head in range(HEADS)],
            [f"head {head}" for head in range(HEADS)],
        )
        axis.set_yticks([size * (layer + 0.5) - 0.5 for layer in range(LAYERS)],
                        [f"layer {layer}" for layer in range(LAYERS)], rotation=90, va="center")  # fmt: skip
    labels = [
        Patch(
            color=BLUE, label="attention weight (the stronger the blue, the larger)"
        ),
        Patch(color=ORANGE, label="dropped"),
    ]
    figure.legend(handles=labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def states_dropped(before: Tensor, after: Tensor) -> Tensor:
    """Return which states are dropped."""
    return (after == 0) & (before != 0)


def small(figure: plt.Figure, path: Path) -> None:
    """Save a figure as a PNG of few colors."""
    whole = io.BytesIO()
    figure.savefig(whole, dpi=130)
    Image.open(whole).quantize(48, Image.Quantize.FASTOCTREE).save(
        path, optimize=True
    )
    plt.close(figure)


STYLE = {
    "font.size": 7,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(
        (
            "axes.edgecolor",
            "axes.labelcolor",
            "text.color",
            "xtick.color",
            "ytick.color",
        ),
        GREY,
    ),
    "axes.linewidth": 0.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def main(names: list[str]) -> None:
    """Draw the pictures of these pages, or of all; ``overview`` is that of the README."""
    if not names or "overview" in names:
        with mpl.rc_context(STYLE):
            small(overview(), FOLDER.parent / "_static" / "overview.png")
    for page in sorted(FOLDER.glob("*.md")):
        if names and page.stem not in names:
            continue
        for found in IMAGE.finditer(page.read_text(encoding="utf-8")):
            path = (FOLDER / found["path"]).resolve()
            path.parent.mkdir(parents=True, exist_ok=True)
            with mpl.rc_context(STYLE):
                small(drawn(found["text"]), path)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
