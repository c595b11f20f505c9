"""Draw how often a planted word's keys are dropped, and all others, round by round, from the runs of a comparison.

python docs/results/planted/contrast.py runs/compare-agreement docs/results/planted.png
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import click

from attnreg.experiments.compare.statistics import paired_difference
from attnreg.experiments.folder.run_folder import RunReader
from attnreg.experiments.results.plots.style import COLORS, moving_mean, picture


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", "names", multiple=True, help="Title of a method's row, in the order of the folder names.")
def main(folder: Path, path: Path, names: tuple[str, ...]) -> None:
    """Draw one row of plots per method that was run with --watch, and print the differences early and late."""
    methods = {}
    for method in sorted(each for each in folder.iterdir() if each.is_dir()):
        runs = [RunReader(run).rounds for run in sorted(method.glob("seed*")) if run.is_dir()]
        watched = [rounds for rounds in runs if rounds and "watched.0" in rounds[0]]
        if watched:
            methods[method.name] = watched
    layers = max(sum(name.startswith("watched.") for name in runs[0][0]) for runs in methods.values())
    with picture(path, width=3.0 * layers, height=2.4 * len(methods), columns=layers, rows=len(methods)) as axes:
        for row, (method, runs) in enumerate(methods.items()):
            title = names[row] if row < len(names) else method
            for layer in range(layers):
                one = axes[row * layers + layer]
                length = min(map(len, runs))
                for which, color in (("watched", COLORS[2]), ("others", COLORS[1])):
                    values = [[line[f"{which}.{layer}"] for line in rounds[:length]] for rounds in runs]
                    for each in values:
                        one.plot(range(1, length + 1), moving_mean(each, 5), color=color, lw=0.6, alpha=0.5)
                    mean = [sum(column) / len(column) for column in zip(*values, strict=True)]
                    label = "planted key" if which == "watched" else "other keys"
                    one.plot(range(1, length + 1), moving_mean(mean, 5), color=color, lw=2.0, label=label)
                one.set(ylim=(0, 1), xscale="log", title=f"layer {layer}" if not row else "")  # learning is early
                one.xaxis.set_major_formatter("{x:g}")
                one.set_ylabel(f"{title}\ndrop rate" if not layer else "")
                one.set_xlabel("round" if row + 1 == len(methods) else "")
                for begin, end in ((16, 64), *([(64, 256)] if length > 256 else []), (3 * length // 4, length)):
                    contrast = [
                        sum(line[f"watched.{layer}"] - line[f"others.{layer}"] for line in rounds[begin:end])
                        / (end - begin)
                        for rounds in runs
                    ]
                    values = "  ".join(f"{each:+.3f}" for each in contrast)
                    click.echo(f"{method}, layer {layer}, rounds {begin + 1} to {end}: {values}")
        axes[0].legend(frameon=False, loc="upper left")
    for method, runs in methods.items():
        if "placebo.0" in runs[0][0] and len(runs) > 1:
            print_against_placebo(method, runs)


def print_against_placebo(method: str, runs: list[list[dict[str, float]]], begin: int = 192, end: int = 256) -> None:
    """Print the mean difference of both words' rates over layers and rounds, and its 95 % interval over seeds."""
    layers = sum(name.startswith("placebo.") for name in runs[0][0])
    rates = [
        [fmean(line[f"{which}.{layer}"] for line in rounds[begin:end] for layer in range(layers)) for rounds in runs]
        for which in ("watched", "placebo")
    ]
    found = paired_difference(*rates)
    click.echo(
        f"{method}, planted word minus placebo, rounds {begin + 1} to {end}: {found.mean:+.3f} [{found.low:+.3f}, "
        f"{found.high:+.3f}], p = {found.p:.4f}; " + "  ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(*rates, strict=True))
    )


if __name__ == "__main__":
    main()
