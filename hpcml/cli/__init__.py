"""The command line. Each command is a module of its own, imported when it is called."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

import hpcml
from hpcml.errors import UserError

# In the order of a first session. The texts stand here so that `--help` imports nothing.
_COMMANDS = {
    "init": "Write a first recipe for a script of your own.",
    "doctor": "Look what works here, or what a recipe lacks.",
    "plan": "Say what a training will need: memory, time, layouts, checkpoints.",
    "sweep": "Run a recipe: submit what is left of it, and follow it.",
    "infer": "Let a language model answer the rows of a table.",
    "status": "Show the state of every cell of a run.",
    "watch": "Show a run live, until its end.",
    "results": "Rank the cells of a run by their metric.",
    "report": "Write a run as one page for the browser.",
    "logs": "Show what a cell printed.",
    "why": "Tell the life of a cell, and how to run it by hand.",
    "cancel": "Ask running cells to save and leave.",
    "rerun": "Run chosen cells of a run again, without its recipe.",
    "clean": "Make room: remove checkpoints of cells that lost, and leftovers.",
    "export": "Write the model that a cell trained as a folder.",
    "site": "List, show, check and detect the places where jobs can run.",
    "container": "List, build, fetch and check the images that cells run in.",
    "schema": "Print the JSON Schema of recipes or sites.",
    "completion": "Print what a shell completes this command line with.",
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

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # Without importing every command for its help.
        names = [
            CompletionItem(name, help=text)
            for name, text in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hpcml.__version__, prog_name="hpcml")
def hpcml_command() -> None:
    """One recipe, any cluster, no lost work.

    A recipe (YAML) says what to run over which parameters, a site where. Begin with
    `hpcml sweep recipes/lr_sweep.yaml`, and look at it first with `--dry-run`, or with
    `hpcml init` for a script of your own.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"the folder that you are in: {error.strerror}; cd to one that is there"
        ) from None


def main() -> int:
    """Run a command. Exit codes: 0 done, 1 a cell failed, 2 wrong input, 130 interrupted.

    No error that a person can do something about leaves it as a traceback.
    """
    from hpcml.cli.output import discard

    if isinstance(sys.stdout, io.TextIOWrapper):
        # Not every terminal's encoding has every character: that ends no sweep.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = hpcml_command.main(standalone_mode=False, prog_name="hpcml")
        sys.stdout.flush()
    except UserError as error:
        return _refused(f"hpcml: {error}")
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        return _refused(shown.getvalue().rstrip())
    except (KeyboardInterrupt, click.Abort):
        return _refused("hpcml: interrupted", 130)
    except BrokenPipeError:
        # `hpcml logs RUN 0 | head`: nobody reads any more.
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        discard(sys.stdout)
        what = error.filename or "the output cannot be written"
        return _refused(f"hpcml: {what}: {error.strerror}")
    return code if isinstance(code, int) else 0


def _refused(message: str, code: int = 2) -> int:
    from hpcml.cli import text

    # Where nobody can be told, the exit code says it.
    with suppress(OSError):
        click.echo(text.message(message), err=True)
    return code
