"""Make shifted versions of a task's dev rows: with typing errors, and two rows of one class joined into a longer one.

python docs/results/shift.py --task sst2 --data-dir DATA/sst2 --output-dir SHIFTED
attnreg evaluate RUN --data-dir SHIFTED/typos
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from attnreg.experiments.tasks import choose_task, load_data


def with_typos(text: str, share: float, rng: random.Random) -> str:
    """Swap two neighbouring inner letters in a share of the words of at least four letters.

    Example:
        >>> with_typos("a charming journey", 1.0, random.Random(0))
        'a charimng joureny'
    """
    words = []
    for word in text.split():
        if len(word) >= 4 and word.isalpha() and rng.random() < share:
            place = rng.randrange(1, len(word) - 2) if len(word) > 4 else 1
            word = word[:place] + word[place + 1] + word[place] + word[place + 2 :]
        words.append(word)
    return " ".join(words)


def joined(rows: list[dict[str, Any]], column: str, label: str) -> Iterator[dict[str, Any]]:
    """Join each row with the next one of its class."""
    waiting: dict[Any, dict[str, Any]] = {}
    for row in rows:
        if (first := waiting.pop(row[label], None)) is None:
            waiting[row[label]] = row
        else:
            yield {**first, column: f"{first[column]} {row[column]}"}


@click.command()
@click.option("--task", default="agreement", show_default=True, help="Task with one sentence per row.")
@click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Folder of the task's data (default: the task's own)."
)
@click.option("--share", type=click.FloatRange(0, 1), default=0.3, show_default=True, help="Share of misspelled words.")
@click.option("--seed", default=0, show_default=True, help="Seed of the typing errors.")
@click.option("--output-dir", type=click.Path(path_type=Path), required=True, help="Folder for the two folders.")
def main(task: str, data_dir: Path | None, share: float, seed: int, output_dir: Path) -> None:
    """Write typos/validation.jsonl and joined/validation.jsonl."""
    chosen, splits = load_data(choose_task(task), data_dir)
    column, rng = chosen.columns[0], random.Random(seed)
    rows = splits["validation"].to_list()
    made = {
        "typos": [{**row, column: with_typos(row[column], share, rng)} for row in rows],
        "joined": list(joined(rows, column, chosen.label)),
    }
    for name, shifted in made.items():
        (output_dir / name).mkdir(parents=True, exist_ok=True)
        with (output_dir / name / "validation.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in shifted)
        click.echo(f"{name}: {len(shifted)} rows")


if __name__ == "__main__":
    main()
