"""The command group ``attnreg``."""

from __future__ import annotations

import functools
import io
import os
import shlex
import sys
import warnings
from typing import Any

import click

from attnreg import __version__
from attnreg.errors import AttnRegWarning, InputError, StoppedError, UsageError, one_line
from attnreg.experiments.cli.built_in import copy, list_, recipe
from attnreg.experiments.cli.fit import fit, predict
from attnreg.experiments.cli.look import doctor, evaluate, plot
from attnreg.experiments.cli.many import compare, search
from attnreg.experiments.options.files import place_of, recipe_files


class _Commands(click.Group):
    """A group that prints a user's errors as one sentence, with exit code 2 for wrong usage and 1 otherwise."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack letters of the data
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr's is
        ctx.obj = list(args)  # as typed
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (command := super().get_command(ctx, cmd_name)) is None and cmd_name in recipe_files():
            ctx.fail(f"No such command {cmd_name!r}. To run the recipe: attnreg recipe {cmd_name}")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        if "JPY_PARENT_PID" in os.environ:  # `!attnreg` in a notebook, which shows every state of a progress bar
            os.environ.setdefault("TTY_COMPATIBLE", "0")
        with warnings.catch_warnings():
            warnings.simplefilter("always", AttnRegWarning)
            warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise click.UsageError(str(error)) from error
        except InputError as error:
            raise click.ClickException(str(error)) from error
        except StoppedError as error:
            if os.environ.get("RANK", "0") == "0":  # the other processes stop for the same reason
                click.echo(f"Error: {error}", err=True)
                if error.can_go_on:
                    words = ctx.obj if "--resume" in ctx.obj else [*ctx.obj, "--resume"]
                    launcher = "with the same launcher, " if "RANK" in os.environ else ""
                    click.echo(f"To continue: {launcher}{shlex.join([str(ctx.info_name), *words])}", err=True)
            ctx.exit(error.exit_code)
        except ConnectionError:  # a closed pipe, which click handles
            raise
        except OSError as error:
            raise click.ClickException(f"Cannot read or write a file: {error}") from error
        except Exception as error:
            if (place := place_of(error)) is None:
                raise
            message = f"{place}: {type(error).__name__}: {one_line(error)}".removesuffix(": ")
            raise click.ClickException(message) from error


def _show_warning(show_other: Any, message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
    if issubclass(category, AttnRegWarning):
        click.echo(f"Warning: {message}", err=True)
    else:
        show_other(message, category, *args, **kwargs)


@click.group(cls=_Commands, epilog="Example: attnreg recipe attendout")
@click.version_option(__version__, prog_name="attnreg")
def main() -> None:
    """Attention regularizers for fine-tuning Transformers."""


for command in (fit, predict, recipe, compare, search, evaluate, plot, list_, copy, doctor):
    main.add_command(command)
