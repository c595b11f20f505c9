from typing import Any

import click

import attnreg
from attnreg.experiments import Numbers, option, recipe


@recipe(
    "probe",
    option("--p", type=click.FloatRange(0, 1), default=0.3, help="Share of a query's valid keys that are candidates."),
    option("--q", default="0,0.25,0.5,0.75,1", type=Numbers(click.FloatRange(0, 1), "probabilities such as 0,0.5,1"),
           help="Probabilities of dropping each candidate, separated by commas."),
    option("--target", type=click.Choice(["predicted", "label"]), default="predicted",
           help="Score to explain: of the predicted class, or of the gold class."),
    option("--method", type=click.Choice(["gradient", "integrated_gradients", "attention"]), default="gradient",
           help="Attribution method: gradient (GA), integrated_gradients (IGA) or attention (AA, the weights)."),
    option("--layers", default="all", type=Numbers(click.INT, "layer indices such as 0,1,-1", word="all"),
           help="Layers to mask: 'all' or indices such as 0,1,-1."),
    option("--steps", type=click.IntRange(min=1), default=20,
           help="Steps of integrated gradients; only for that method."),
)  # fmt: skip
def probe(
    run: "attnreg.experiments.Run", p: float, q: list[float], method: Any, layers: str | list[int], **options: Any
) -> None:
    """Probing: fine-tune, then drop high, low or random attention at evaluation.

    Example: attnreg recipe probe --task cola --p 0.3 --q 0,0.5,1
    """
    from attnreg.experiments.results.evaluation import probed_scores
    from attnreg.experiments.results.plots.run import plot_probe

    if run.kind.generates:
        raise click.UsageError(f"Probing needs a task without generated text, got {run.task.name}.")
    options["layers"] = None if isinstance(layers, str) else layers
    attnreg.attach(run.model, attnreg.AttributionProvider(**options)).detach()  # refuses wrong layers before training
    history = run.train()
    metric, model = run.task.metric, run.model
    plain = attnreg.experiments.evaluate(model, run.dev, run.kind, run.accelerator)[metric]
    rows = [["none", "none", "0.000", f"{plain:.4f}"]]
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for name in ("high", "low", "random"):
        chosen = {"method": "random"} if name == "random" else {"method": method, "region": name}
        lines[name] = []
        for rate in q:
            scores = probed_scores(run, model, attnreg.AttributionProvider(p, rate, **chosen, **options))
            rows.append([name, f"{rate:g}", f"{scores['dropped']:.3f}", f"{scores[metric]:.4f}"])
            lines[name].append((rate, scores["dropped"], scores[metric]))
    table = [["candidates", "q", "share dropped", metric], *rows]
    run.report(history, tables={f"Score on {run.scored_on} rows while attention is dropped, p = {p:g}": table})
    if run.folder.writer:
        plotted: dict[str, Any] = {"lines": lines, "plain": plain, "score": f"{metric} on {run.scored_on}"}
        run.folder.write("probe", plotted)  # so that `attnreg plot` can draw the picture again
        plot_probe(**plotted, path=run.folder.path / "plots" / "probe.png")
