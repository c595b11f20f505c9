"""Plot the attention of one sample: weights, attribution, candidate region, dropped positions (AD-DROP, Figure 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import Normalize, PowerNorm
from torch import Tensor, nn

import attnreg
from attnreg import functional
from attnreg.attribution import explain
from attnreg.errors import InputError, UsageError
from attnreg.experiments.folder.run_folder import RunReader
from attnreg.experiments.options.files import code_of
from attnreg.experiments.options.provider import own_classes
from attnreg.experiments.options.settings import task_of
from attnreg.experiments.results.plots.style import picture
from attnreg.experiments.tasks import load_data, load_model
from attnreg.experiments.tasks.kinds import kind_class
from attnreg.experiments.tasks.kinds.kind import REFERENCE
from attnreg.injection import draws_repeated
from attnreg.injection.report import DroppedTokens, watching
from attnreg.masks import Mask
from attnreg.regularizer.base import Regularizer

LONGEST_SAMPLE = 18


def saved_provider(run: RunReader) -> Regularizer:
    """Load the provider of a run, without the epochs in which :class:`attnreg.CrossTuning` lets it act."""
    values = run.config.get("own", {}).values()
    if code_of(values) != run.config.get("content", {}).get("provider"):
        raise InputError("the file with the provider's class has changed since the run.")
    provider = Regularizer.from_pretrained(run.folder / "provider", own_classes(values))
    while isinstance(provider, attnreg.CrossTuning):
        provider = provider.provider
    return provider


def plot_sample(run: RunReader, path: Path, layer: int) -> None:
    """Plot the attention of the first dev row that is short enough to read; a training row if there is no dev split."""
    provider = saved_provider(run)
    task, splits = load_data(task_of(run.config), run.config["data_dir"], needs_validation=False)
    model, tokenizer = load_model(task, str(run.folder / "model"))
    layers = int(model.config.num_hidden_layers)
    if not 0 <= layer < layers:
        raise UsageError(f"Expected --layer from 0 to {layers - 1}, the layers of {run.folder}/model, got {layer}.")
    kind = kind_class(task.kind)(task, tokenizer, run.config["max_length"])
    rows = kind.encode(splits.get("validation", splits.get("train"))).remove_columns(REFERENCE)
    number = next((row for row, length in enumerate(kind.lengths(rows)) if 8 <= length <= LONGEST_SAMPLE), 0)
    batch = kind.collate([rows[number]])
    with torch.no_grad():
        choice = int(model.eval()(**batch).logits.argmax()) if task.choices else 0
    ids = batch["input_ids"].reshape(-1, batch["input_ids"].shape[-1])[choice]
    length = int(batch["attention_mask"].reshape(-1, len(ids))[choice].nonzero().max()) + 1
    tokens = tokenizer.convert_ids_to_tokens(ids[:length])
    plot_attention(model, batch, tokens, provider, path, layer=layer, choice=choice)


def show_tokens(run: RunReader, text: str) -> DroppedTokens:
    """Return what the provider of a run drops of the tokens of a text."""
    if not run.finished or not all((run.folder / name).is_dir() for name in ("provider", "model")):
        raise InputError(f"--tokens needs a finished run with a regularizer and its model, and {run.folder} lacks one.")
    task = replace(task_of(run.config), labels=tuple(run.result["classes"]))
    if kind_class(task.kind).reads_images or task.choices or task.kind == "seq2seq":
        raise InputError(f"--tokens shows a single text, but {task.name} is a {task.kind} task.")
    model, tokenizer = load_model(task, str(run.folder / "model"))
    batch = dict(tokenizer(text, return_tensors="pt", truncation=True, max_length=run.config["max_length"]))
    if not batch["input_ids"].numel():  # of a tokenizer that adds no special tokens
        raise InputError(f"Expected --tokens to be a text, got {text!r}, which has no tokens.")
    with attnreg.attach(model.eval(), saved_provider(run)) as handle:
        return handle.show(batch, tokenizer)


def plot_attention(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    tokens: Sequence[str],
    provider: Regularizer,
    path: Path,
    *,
    layer: int = 0,
    choice: int = 0,
) -> None:
    """Plot the attention of one row, ``batch`` with ``labels``, and the positions that a provider drops.

    The grey of attention weights grows with their square root, from 0 to 1, in every plot: the small weights of a long
    or untrained attention stay apart, and plots can be compared. An :class:`attnreg.AttributionProvider` also shows
    attributions and candidate region. Positions after the ``tokens`` are left out. The head is the one with the most
    attribution. Of multiple choice, only the predicted ``choice`` has attributions.
    """
    seen: dict[str, tuple[Any, Mask | None]] = {}

    def see(site: Any, states: Any, mask: Any) -> None:
        seen[site.label] = site, mask

    with attnreg.attach(model, provider.train()) as handle, draws_repeated(model):
        torch.manual_seed(0)  # so that the plot is reproducible
        label = next(site.label for site in handle.sites if site.layer == layer)
        weights = explain(model, batch, handle, [label], method="attention")[label]
        provider.attribute(model, batch)
        was_training = model.training
        with torch.no_grad(), handle.replay(0), watching(provider, see):
            model.train()(**batch)
        model.train(was_training)
    site, mask = seen.get(label, (None, None))
    attributions = getattr(provider, "attributions", {}).get(label)
    head = 0 if attributions is None else int(attributions[choice].abs().sum((1, 2)).argmax())
    panels: list[tuple[str, Tensor, str]] = [("attention (square-root scale)", weights[choice, head], "Greys")]
    if isinstance(provider, attnreg.AttributionProvider) and attributions is not None and site is not None:
        region = functional.candidate_region(attributions, site.valid, provider.p, provider.region)
        attribution = attributions[choice, head, : len(tokens), : len(tokens)]
        by_row = attribution / attribution.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        panels.append((f"attribution by {provider.method.replace('_', ' ')}, scaled by row", by_row, "PuOr"))
        panels.append((f"candidate region, p = {provider.p:g}", region[choice, head], "Greys"))
    kept = None if mask is None else mask.units_kept
    kept = torch.ones((), dtype=torch.bool) if kept is None else kept
    panels.append(("dropped", ~kept.expand(weights.shape)[choice, head], "Greys"))
    with picture(path, width=1.2 + 3.6 * len(panels), height=4.4, columns=len(panels)) as grid:
        for number, (axes, (title, values, colors)) in enumerate(zip(grid, panels, strict=True)):
            _matrix(axes, values, colors, tokens, title, with_rows=number == 0)
        grid[0].set_ylabel(f"query (layer {layer}, head {head})")


def _matrix(axes: Any, values: Tensor, colors: str, tokens: Sequence[str], title: str, *, with_rows: bool) -> None:
    cells = values[: len(tokens), : len(tokens)].float().cpu().numpy()
    norm, ticks = (Normalize(-1, 1), [-1, 0, 1]) if colors == "PuOr" else (PowerNorm(0.5, 0, 1), [0, 0.1, 0.3, 0.6, 1])
    image = axes.imshow(cells, cmap=colors, norm=Normalize(0, 1.2) if values.dtype == torch.bool else norm)
    if values.dtype != torch.bool:
        axes.figure.colorbar(image, ax=axes, shrink=0.6, ticks=ticks)
    axes.set_title(title)
    axes.set_xticks(range(len(tokens)), tokens, rotation=90)
    axes.set_yticks(range(len(tokens)), tokens if with_rows else [])
