"""`hpcml completion`: what a shell completes hpcml's command line with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from hpcml.errors import UserError

#: More than these nobody reads.
_MOST = 200


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print what SHELL completes commands, runs, cells, sites and recipes with.

    For bash, put this line into ~/.bashrc: eval "$(hpcml completion bash)"; for zsh the same with
    zsh into ~/.zshrc; for fish: hpcml completion fish > ~/.config/fish/completions/hpcml.fish
    """
    from hpcml.cli import hpcml_command

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(hpcml_command, {}, "hpcml", "_HPCML_COMPLETE").source())


def runs(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Names of runs, the newest first; behind a name and ``/``, or for a beginning, ids too."""
    names: dict[str, None] = {}
    with suppress(UserError, OSError):
        from hpcml.runs.find import known_roots, list_runs

        root = context.params.get("root")
        for run in list_runs(*([root.absolute()] if root else known_roots())):
            names[run.name] = None
            if typed:
                names[run.run_id] = names[f"{run.name}/{run.run_id}"] = None
    return _beginning(typed, names) or _path(typed, "dir")


def cells(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """``best``, and indices or ids of the cells of the run that is typed before."""
    with suppress(UserError, OSError):
        from hpcml.runs.find import find_run

        run = find_run(context.params.get("run"), context.params.get("root"))
        if typed and not typed.isdecimal() and not "best".startswith(typed):
            return _beginning(typed, run.ids)
        return _beginning(typed, ["best", *map(str, range(len(run)))])
    return []


def sites(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Names of sites; files where a path is begun."""
    names: list[str] = []
    with suppress(UserError, OSError):
        from hpcml.site.search import site_files

        names = list(site_files())
    return _beginning(typed, names) or _path(typed, "file")


def recipes(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """YAML files; folders where none is called so."""
    before = typed[: typed.rfind("/") + 1]
    found: list[str] = []
    with suppress(OSError, RuntimeError):  # RuntimeError: ~ of somebody who is not there
        entries = os.listdir(Path(before or ".").expanduser())
        found = [f"{before}{name}" for name in sorted(entries) if name.endswith((".yaml", ".yml"))]
    return _beginning(typed, found) or _path(typed, "dir")


def _beginning(typed: str, names: Iterable[str]) -> list[CompletionItem]:
    matching = (name for name in names if name.startswith(typed))
    return [CompletionItem(name) for name in islice(matching, _MOST)]


def _path(typed: str, kind: str) -> list[CompletionItem]:
    """Let the shell complete a path."""
    return [CompletionItem(typed, type=kind)]
