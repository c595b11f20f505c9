"""AD-DROP: some of the attention positions that a prediction leans on are dropped, in every other epoch."""

from collections.abc import Mapping
from typing import Any

import click

import attnreg
from attnreg.training import recipe

RANGES = {"p": (0.0, 1.0), "q": (0.0, 1.0)}


def _layers(context: click.Context, parameter: click.Parameter, text: str | None) -> str | list[int] | None:
    try:
        return text if text in (None, "all") else [int(layer) for layer in str(text).split(",")]
    except ValueError:
        raise click.BadParameter(f"expected 'all' or layer indices such as 0,1,-1, got {text!r}.") from None


def _grid(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    if bool(texts) != context.params["search"]:
        got = " ".join(texts) or "nothing to search"
        raise click.UsageError(f"Expected --search with what to search, as in --search p=0.1:0.9:0.1, got {got}.")
    attnreg.training.parse_grid(texts, RANGES)
    return texts


@recipe(
    "ad-drop",
    click.option("--p", type=click.FloatRange(0, 1), default=0.3, show_default=True,
                 help="Share of the keys in a row's candidate region."),
    click.option("--q", type=click.FloatRange(0, 1), default=0.1, show_default=True,
                 help="Probability of dropping a candidate."),
    click.option("--method", type=click.Choice(["gradient", "integrated_gradients", "attention", "random"]),
                 default="gradient", show_default=True),
    click.option("--region", type=click.Choice(["high", "low"]), default="high", show_default=True),
    click.option("--layers", callback=_layers, help="'all' or indices such as 0,1,-1; by default the task's."),
    click.option("--target", type=click.Choice(["predicted", "label"]), default="predicted", show_default=True),
    click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True,
                 help="Steps of integrated gradients."),
    click.option("--first-pass", type=click.Choice(["eval", "train"]), default="eval", show_default=True,
                 help="Attribute without dropout, or with."),
    click.option("--first-pass-dtype", type=click.Choice(["bfloat16", "float16"]),
                 help="Attribute in lower precision, which is faster on most devices."),
    click.option("--every", type=click.IntRange(min=1), default=2, show_default=True,
                 help="AD-DROP once in so many epochs."),
    click.option("--offset", type=click.IntRange(min=0), default=1, show_default=True,
                 help="The first AD-DROP epoch, from 0."),
    click.option("--search", is_flag=True, is_eager=True,
                 help="Choose p, q on rows held out from train; then give them as p=0.1:0.9:0.1 q=0.3,0.5."),
    click.argument("grid", nargs=-1, callback=_grid, metavar="[p=VALUES] [q=VALUES]"),
    click.option("--search-rows", type=click.IntRange(min=1), default=1000, show_default=True,
                 help="Rows held out for --search, at most a tenth of train."),
)  # fmt: skip
def ad_drop(run: "attnreg.training.Run", search: bool, grid: tuple[str, ...], search_rows: int, **options: Any) -> None:
    """AD-DROP: some of the attention positions that a prediction leans on are dropped, in every other epoch.

    Example: attnreg recipe ad-drop --task cola --search p=0.1:0.9:0.2 q=0.1:0.9:0.2
    """
    attnreg.attach(run.model, _provider(run, options)).detach()  # what does not fit is told before anything is written
    notes = []
    if search:
        tries = attnreg.training.parse_grid(grid, RANGES)
        rows = min(search_rows, max(1, len(run.train_rows) // 10))
        chosen, note = attnreg.training.search(run, tries, lambda trial, p_q: _train(trial, {**options, **p_q}), rows)
        options.update(chosen)
        notes.append(note)
    history = _train(run, options)
    attnreg.training.report(run, history, notes=notes)


def _train(run: "attnreg.training.Run", options: Mapping[str, Any]) -> "attnreg.training.History":
    optimizer = run.optimizer(run.model)
    method = attnreg.training.TwoPass(
        run.model,
        optimizer,
        _provider(run, options),
        scheduler=run.schedule(optimizer),
        accelerator=run.accelerator,
    )
    return attnreg.training.fit(method, run)


def _provider(run: "attnreg.training.Run", options: Mapping[str, Any]) -> "attnreg.CrossTuning":
    options = dict(options)
    cycle = {name: options.pop(name) for name in ("every", "offset")}
    layers = run.task.ad_drop_layers if options["layers"] is None else options["layers"]
    options["layers"] = None if layers == "all" else layers
    return attnreg.CrossTuning(attnreg.AttributionProvider(**options), **cycle)
