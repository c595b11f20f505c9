"""``attnreg evaluate RUN``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from attnreg.tasks.task import TASKS
from attnreg.training.command import TASK_OPTIONS


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(TASK_OPTIONS):
        function = option(function)
    return function


@click.command("evaluate", epilog="Example: attnreg evaluate runs/finetune-mnli-seed0 --task hans --data-dir DIR")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--task", help=f"By default the run's own; one of {', '.join(TASKS)}.")
@_options
@click.option("--data-dir", help="Folder with validation (and test), as for recipes; train is not needed.")
@click.option("--split", type=click.Choice(["validation", "test"]), default="validation", show_default=True)
@click.option("--batch-size", type=click.IntRange(1, 100_000), default=64, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda", "mps"]), help="By default the best there is.")
def evaluate(run: Path, data_dir: str | None, split: str, batch_size: int, device: str | None, **options: Any) -> None:
    """Score the model of RUN, a run folder, on other data or another task, into RUN/evaluations.

    Classes of another task are read by their names: of a model of mnli on hans, neutral and contradiction are
    non-entailment.
    """
    from attnreg.training.saved import score_saved

    path, result = score_saved(run, options, data_dir=data_dir, split=split, batch_size=batch_size, device=device)
    scores = "  ".join(f"{name} {value:.4f}" for name, value in result["metrics"].items())
    click.echo(f"{result['task']}, {split}, {result['rows']} rows: {scores}")
    click.echo(f"Written to {path}")
