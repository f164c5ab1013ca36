"""The application that the verbs belong to."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import spalm


class Application(TyperGroup):
    """The group of all verbs."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # noqa: ARG002
        """Lists the verbs with the whole first sentence of their help, over several lines if need be."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(sys.maxsize)) for name, command in self.commands.items()]
            )


app = typer.Typer(cls=Application, add_completion=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spalm {spalm.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Language models with a short-term and a long-term memory."""
