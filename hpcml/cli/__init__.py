"""The command line. Each command is a module of its own, imported when it is called."""

from __future__ import annotations

import importlib
import os
import signal
import sys

import click

import hpcml
from hpcml.errors import UserError

# In the order of a first session. The texts stand here so that `--help` imports nothing.
_COMMANDS = {
    "sweep": "Run a recipe: submit what is left of it, and follow it.",
    "status": "Show the state of every cell of a run.",
    "results": "Rank the cells of a run by their metric.",
    "logs": "Show what a cell printed.",
    "cancel": "Ask running cells to save and leave.",
    "export": "Write the model that a cell trained as a folder.",
    "site": "List, show, check and detect the places where jobs can run.",
    "schema": "Print the JSON Schema of recipes or sites.",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"hpcml.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hpcml.__version__, prog_name="hpcml")
def hpcml_command() -> None:
    """One recipe, any cluster, no lost work.

    A recipe (YAML) says what to run over which parameters, a site where. Begin with
    `hpcml sweep recipes/lr_sweep.yaml`, and look at it first with `--dry-run`.
    """


def main() -> None:
    """The program. Exit codes: 0 done, 1 a cell failed, 2 wrong input, 130 interrupted."""
    try:
        code = hpcml_command.main(standalone_mode=False, prog_name="hpcml")
    except UserError as error:
        click.echo(f"hpcml: {error}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("hpcml: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # `hpcml logs RUN 0 | head`: nobody reads any more. The interpreter must not try again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    sys.exit(code if isinstance(code, int) else 0)
