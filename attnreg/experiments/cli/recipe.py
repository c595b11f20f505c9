"""``attnreg recipe NAME``."""

from __future__ import annotations

import click

from attnreg.experiments.options.catalogue import recipe_files, summary
from attnreg.experiments.runs.command import load_command


class _Recipes(click.Group):
    """A group whose commands are the recipe files. A recipe is imported only when it runs, not to list it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(recipe_files())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        return load_command(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Recipes"):
            formatter.write_dl([(name, summary(path)) for name, path in recipe_files().items()])


@click.command(
    "recipe",
    cls=_Recipes,
    options_metavar="",
    subcommand_metavar="NAME|FILE.py [OPTIONS]",
    epilog="Example: attnreg recipe attendout --task cola",
)
def recipe() -> None:
    """Run a built-in recipe or your own recipe file."""
