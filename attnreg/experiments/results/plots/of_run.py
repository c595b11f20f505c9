"""Draw all plots of a run folder."""

from __future__ import annotations

from pathlib import Path

import torch

import attnreg
from attnreg.errors import InputError
from attnreg.experiments.folder.reader import RunReader
from attnreg.experiments.results.plots.attention import plot_attention
from attnreg.experiments.results.plots.convergence import plot_convergence
from attnreg.experiments.results.plots.drop_rates import plot_drop_rates
from attnreg.experiments.results.plots.game import plot_game
from attnreg.experiments.results.plots.probe import plot_probe
from attnreg.regularizer.base import MaskProvider

LONGEST_SAMPLE = 18


def plot_run(folder: Path, layer: int = 0) -> list[Path]:
    """Draw every plot that a run has data for, and save them in its ``plots`` folder.

    Args:
        folder: the run folder.
        layer: layer of the attention plot (default: 0).

    Returns:
        the files.

    Raises:
        InputError: if the folder holds no run that has trained, or the model has no such layer.
    """
    run, plots = RunReader(folder), folder / "plots"
    if run.config and not run.telemetry:
        raise InputError(f"The run in {folder} has not trained yet: there are no lines in telemetry.jsonl.")
    runs = {run.config["recipe"]: run}
    if (folder / "baseline" / "config.json").is_file():
        runs["plain fine-tuning"] = RunReader(folder / "baseline")
    made = []
    if plot_drop_rates(run, plots / "drop_rates.png"):
        made.append(plots / "drop_rates.png")
    if run.metrics:
        plot_convergence(runs, plots / "convergence.png")
        made.append(plots / "convergence.png")
    if plot_game(run, plots / "game.png"):
        made.append(plots / "game.png")
    if run.probe is not None:
        plot_probe(**run.probe, path=plots / "probe.png")
        made.append(plots / "probe.png")
    if has_attention(folder) and run.config.get("kind") != "image-classification":  # its tokens have no names
        _attention(run, plots / "attention.png", layer)
        made.append(plots / "attention.png")
    return made


def has_attention(folder: Path) -> bool:
    """Whether the run has a saved model and provider, which the attention plot needs."""
    return (folder / "provider").is_dir() and (folder / "model").is_dir()


def _attention(run: RunReader, path: Path, layer: int) -> None:
    """Plot the attention of the first dev row that is short enough to read; a training row if there is no dev split."""
    from attnreg.experiments.options.settings import TASK_OPTIONS
    from attnreg.experiments.tasks import choose_task, load_data, load_model
    from attnreg.experiments.tasks.kinds import kind_class
    from attnreg.experiments.tasks.kinds.kind import REFERENCE

    chosen = choose_task(run.config["task"], **{name: run.config.get(name) for name in TASK_OPTIONS})
    task, splits = load_data(chosen, run.config["data_dir"], needs_validation=False)
    model, tokenizer = load_model(task, str(run.folder / "model"))
    layers = int(model.config.num_hidden_layers)
    if not 0 <= layer < layers:
        raise InputError(f"Expected --layer from 0 to {layers - 1}, the layers of {run.folder}/model, got {layer}.")
    kind = kind_class(task.kind)(task, tokenizer, run.config["max_length"])
    rows = kind.encode(splits.get("validation", splits.get("train"))).remove_columns(REFERENCE)
    number = next((i for i, ids in enumerate(rows["input_ids"]) if 8 <= kind.length(ids) <= LONGEST_SAMPLE), 0)
    batch = kind.collate([rows[number]])
    choice = 0
    if task.choices:
        with torch.no_grad():
            choice = int(model.eval()(**batch).logits.argmax())
    ids = batch["input_ids"].reshape(-1, batch["input_ids"].shape[-1])[choice]
    length = int(batch["attention_mask"].reshape(-1, len(ids))[choice].nonzero().max()) + 1
    tokens = tokenizer.convert_ids_to_tokens(ids[:length])
    provider = _innermost(run.folder / "provider")
    plot_attention(model, batch, tokens, provider, path, layer=layer, choice=choice)


def _innermost(folder: Path) -> MaskProvider:
    """Load the saved provider and unwrap it from ``CrossTuning``."""
    provider = MaskProvider.from_pretrained(folder)
    while isinstance(provider, attnreg.CrossTuning):
        provider = provider.provider
    return provider
