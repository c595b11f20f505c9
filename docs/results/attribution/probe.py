"""A recipe: attnreg recipe probe.py. Fine-tune, then drop high, low or random attention at evaluation."""

import itertools
from statistics import fmean
from typing import Any

import click
import torch
from torch import nn

import attnreg
from attnreg.experiments import Numbers, evaluate, option, recipe
from attnreg.experiments.results.plots.style import COLORS, picture, styles


@recipe(
    "probe",
    option("--p", type=click.FloatRange(0, 1), default=0.3,
           help="Share of a query's valid keys that are candidates."),
    option("--q", default="0,0.25,0.5,0.75,1",
           type=Numbers(click.FloatRange(0, 1), "probabilities such as 0,0.5,1"),
           help="Probabilities of dropping each candidate, separated by commas."),
    option("--target", type=click.Choice(["predicted", "label"]), default="predicted",
           help="Score to explain: of the predicted class, or of the gold class."),
    option("--method", type=click.Choice(["gradient", "integrated_gradients", "attention"]),
           default="gradient", help="Attribution method: GA, IGA or AA (the weights)."),
    option("--layers", default="all",
           type=Numbers(click.INT, "layer indices such as 0,1,-1", word="all"),
           help="Layers to mask: 'all' or indices such as 0,1,-1."),
    option("--steps", type=click.IntRange(min=1), default=20,
           help="Steps of integrated gradients; only for that method."),
)  # fmt: skip
def probe(
    run: attnreg.experiments.Run,
    p: float,
    q: list[float],
    method: Any,
    layers: str | list[int],
    **options: Any,
) -> None:
    """Probing: fine-tune, then drop high, low or random attention at evaluation.

    Example: attnreg recipe probe.py --task cola --p 0.3 --q 0,0.5,1
    """
    if run.kind.generates:
        raise click.UsageError(f"Probing needs a task without generated text, got {run.task.name}.")
    options["layers"] = None if isinstance(layers, str) else layers
    # Refuses wrong layers before training.
    attnreg.attach(run.model, attnreg.AttributionProvider(**options)).detach()
    history = run.train()
    metric, model = run.task.metric, run.model
    plain = evaluate(model, run.dev, run.kind, run.accelerator)[metric]
    rows = [["none", "none", "0.000", f"{plain:.4f}"]]
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for name in ("high", "low", "random"):
        chosen: dict[str, Any] = {"method": method, "region": name}
        chosen = {"method": "random"} if name == "random" else chosen
        lines[name] = []
        for rate in q:
            provider = attnreg.AttributionProvider(p, rate, **chosen, **options)
            scores = probed_scores(run, model, provider)
            dropped, score = scores["dropped"], scores[metric]
            rows.append([name, f"{rate:g}", f"{dropped:.3f}", f"{score:.4f}"])
            lines[name].append((rate, dropped, score))
    table = [["candidates", "q", "share dropped", metric], *rows]
    heading = f"Score on {run.scored_on} rows while attention is dropped, p = {p:g}"
    run.report(history, tables={heading: table})
    if run.folder.writer:
        path = run.folder.path / "plots" / "probe.png"
        with picture(path, width=9.6, height=3.8, columns=2, grid="y") as both:
            for number, axes in enumerate(both):
                axes.axhline(plain, color=COLORS[0], lw=1.0, ls=":", label="nothing dropped")
                looks = itertools.islice(styles(), 1, None)
                for (name, points), style in zip(lines.items(), looks, strict=False):
                    places, scored = [point[number] for point in points], [point[2] for point in points]
                    axes.plot(places, scored, **style._asdict(), ms=5, label=name)
            label = f"{metric} on {run.scored_on}".replace("_", " ")
            both[0].set(xlabel="probability q of dropping a candidate", ylabel=label)
            both[1].set(xlabel="share of attention dropped, mean over layers")
            both[1].sharey(both[0])
            both[1].legend(title="candidates", loc="center left", bbox_to_anchor=(1.0, 0.5))


class Probed(nn.Module):
    """A network in which an attached provider looks at each batch right before the pass on it."""

    def __init__(self, network: nn.Module, handle: Any) -> None:
        super().__init__()
        # Not the provider: `eval()` of this module must not reach it.
        self.network, self._handle = network, handle

    def forward(self, **batch: Any) -> Any:
        """Look at the batch, then run the network."""
        self._handle.provider.attribute(self.network, batch)
        return self.network(**batch)


def probed_scores(run: attnreg.experiments.Run, network: nn.Module, provider: attnreg.Regularizer) -> dict[str, float]:
    """Score a network in eval mode on dev, under masks that depend only on the run's seed.

    ``"dropped"`` is the share of attention dropped, mean over layers and batches.
    """
    device = run.accelerator.device
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda), attnreg.attach(network, provider) as handle, handle.probing():
        torch.manual_seed(run.settings.seed)
        scores = evaluate(Probed(network, handle), run.dev, run.kind, run.accelerator)
        return {**scores, "dropped": fmean(handle.rates.mean().values())}
