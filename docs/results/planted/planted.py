"""Plant a shortcut in a task: a word that agrees with the label in most training rows, and in dev rows only by chance.

python docs/results/planted/planted.py --share 0.9 --output-dir FOLDER                       # the built-in task
python docs/results/planted/planted.py --share 0.8 --data-dir DATA/sst2 --task sst2 --output-dir FOLDER
"""

import json
import random
from pathlib import Path

import click

from attnreg.experiments.tasks import choose_task, load_data


@click.command()
@click.option("--task", default="agreement", show_default=True, help="Task with one sentence per row and two classes.")
@click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Folder of the task's data (default: the task's own)."
)
@click.option("--word", default="indeed", show_default=True, help="Word to insert.")
@click.option(
    "--share",
    type=click.FloatRange(0, 1),
    default=0.9,
    show_default=True,
    help="Share of training rows in which the word stands if and only if the label is 1.",
)
@click.option("--placebo", metavar="WORD", help="Another word, to insert by chance in half of the rows of both splits.")
@click.option("--seed", default=0, show_default=True, help="Seed of the choice of rows and of the word's places.")
@click.option("--output-dir", type=click.Path(path_type=Path), required=True, help="Folder for the two files.")
def planted(
    task: str, data_dir: Path | None, word: str, share: float, placebo: str | None, seed: int, output_dir: Path
) -> None:
    """Write train.jsonl with a planted word, and validation.jsonl in which it says nothing."""
    chosen, splits = load_data(choose_task(task), data_dir)
    column = chosen.columns[0]
    rng = random.Random(seed)
    output_dir.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        agreement = share if split == "train" else 0.5
        with (output_dir / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for row in splits[split]:
                words = row[column].split()
                if (rng.random() < agreement) == (row[chosen.label] == 1):
                    words.insert(rng.randrange(len(words) + 1), word)
                if placebo is not None and rng.random() < 0.5:
                    words.insert(rng.randrange(len(words) + 1), placebo)
                file.write(json.dumps({**row, column: " ".join(words)}) + "\n")
        click.echo(f"{split}: {len(splits[split])} rows")


if __name__ == "__main__":
    planted()
