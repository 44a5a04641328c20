"""``hpcml clean``: room on the disk."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcml.cli.options import root_option, run_argument

if TYPE_CHECKING:
    from hpcml.runs.folder import RunFolder
    from hpcml.runs.status import Status
    from hpcml.runs.waste import Waste


@click.command("clean")
@run_argument
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many of the best cells of a run keep their checkpoints.",
)
@click.option("--yes", is_flag=True, help="Remove it. Without this, only say what would go.")
@root_option
def command(run: str | None, keep: int, yes: bool, root: Path | None) -> None:
    """Remove checkpoints of cells that lost, and what crashes and old code left.

    RUN is a run folder, a run id or its beginning, or a recipe's name; without it, all runs. A run
    of which something is running or queued stays as it is, and so do results, metrics and logs.
    """
    from hpcml.cli import text
    from hpcml.errors import UserError
    from hpcml.launch.drive import only_driver
    from hpcml.runs.find import find_run, known_roots, list_runs
    from hpcml.runs.waste import cache_of, remove, used_checkpoints, waste_of

    roots = [root.absolute()] if root else known_roots()
    if run is not None:
        runs = [find_run(run, root, certain=True)]
        roots = list({*roots, runs[0].path.parent.parent})
    else:
        runs = list_runs(*roots)
    used = used_checkpoints(list_runs(*roots))
    freed = 0
    unfinished: set[Path] = set()
    for folder in runs:
        status = _idle(folder)
        if status is None or not status.complete:
            unfinished.add(folder.path.parent.parent)
        if status is None:
            continue
        found = waste_of(folder, status, keep, used)
        if not found:
            continue
        if yes:
            try:
                with only_driver(folder):
                    # Once more: what began meanwhile is seen only under the lock.
                    status = _idle(folder, driven=True)
                    found = waste_of(folder, status, keep, used) if status else []
                    for one in found:
                        remove(one)
            except UserError as error:
                click.echo(f"hpcml: {error}", err=True)
                continue
        _say(folder.path, found)
        freed += sum(one.bytes for one in found)
    for place in roots if run is None else ():
        # Of a run that was made meanwhile nothing is known.
        new = {other.path for other in list_runs(place)} - {other.path for other in runs}
        if new or place in unfinished or not (cache := cache_of(place)):
            continue
        for one in cache if yes else ():
            remove(one)
        _say(place, cache)
        freed += sum(one.bytes for one in cache)
    if not freed:
        click.echo("nothing to remove")
    elif yes:
        click.echo(f"freed {text.size(freed)}")
    else:
        click.echo(f"{text.size(freed)} in all. Nothing was removed; --yes removes it")


def _idle(run: RunFolder, *, driven: bool = False) -> Status | None:
    """The states of a run of which nothing runs or is queued; else None, and it is said.

    Args:
        run: the run.
        driven: this process is the run's driver.
    """
    from hpcml.launch.watch import LocalWatcher, watch, watchers

    watcher = watch(run)
    watcher.ask()
    status = watcher.refresh()
    why = watcher.trouble
    for cluster in watchers(run):
        cluster.ask()
        why = why or cluster.trouble
        if cluster.in_queue():
            why = why or "something of it is running or queued"
    # A cluster's jobs may all be over while a command is about to submit more.
    local = LocalWatcher(run)
    if status.in_state("running") or (not driven and local.going(status)):
        why = why or "something of it is running"
    if why:
        click.echo(f"{run.path} stays as it is: {why}", err=True)
        return None
    return status


def _say(place: Path, found: list[Waste]) -> None:
    from hpcml.cli import text

    click.echo(place)
    kinds: dict[str, list[Waste]] = defaultdict(list)
    for one in found:
        kinds[one.kind].append(one)
    for kind, members in kinds.items():
        size = text.size(sum(one.bytes for one in members))
        count = "1 folder" if len(members) == 1 else f"{len(members):,} folders"
        click.echo(f"  {size:>9}  {kind} ({count})")
