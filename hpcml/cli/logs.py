"""``hpcml logs``: what a cell printed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcml.cli import completion
from hpcml.cli.options import root_option

if TYPE_CHECKING:
    from hpcml.runs.folder import RunFolder
    from hpcml.runs.logs import Log

_LINES_ON_A_TERMINAL = 200
_ERR_MARK = b"err | "


@click.command("logs")
@click.argument("run", shell_complete=completion.runs)
@click.argument("cell", shell_complete=completion.cells)
@click.option("-f", "--follow", "follows", is_flag=True, help="Go on until the cell ends.")
@click.option("--attempt", type=click.IntRange(min=1), help="Show this attempt. [default: newest]")
@click.option("--worker", type=click.IntRange(min=0), help="Of an inference: this worker's logs.")
@click.option("--err", "only_err", is_flag=True, help="Show standard error only.")
@root_option
def command(
    run: str,
    cell: str,
    follows: bool,
    attempt: int | None,
    worker: int | None,
    only_err: bool,
    root: Path | None,
) -> None:
    """Show what a cell printed. Lines of standard error are marked by "err |".

    RUN is a run folder, a run id or its beginning, or a recipe's name. CELL is an index, an id or
    its beginning, or "best". On a terminal the last lines are shown; redirected, all of them.
    """
    from hpcml.errors import UserError
    from hpcml.launch.watch import ASK_SECONDS, watch
    from hpcml.runs.find import find_cell, find_run
    from hpcml.runs.logs import cell_logs, follow
    from hpcml.runs.status import CellState

    if follows and attempt is not None:
        raise UserError("-f follows the newest attempt; leave out --attempt, or -f")
    folder = find_run(run, root)
    cell_id = find_cell(folder, cell)["id"]
    streams = ("err",) if only_err else ("out", "err")
    place = _place(folder, cell_id, worker)
    logs = [log for log in cell_logs(place) if log.rank == 0 and log.stream in streams]
    attempts = sorted({log.attempt for log in logs})
    if attempt is not None and attempt not in attempts:
        known = f"it has {', '.join(map(str, attempts))}" if attempts else "it has none"
        raise UserError(f"cell {cell} has no attempt {attempt}; {known}")
    chosen = attempt or (attempts[-1] if attempts else 0)
    printer = _Printer(mark_err=not only_err)
    offsets = {log.path: printer.show(log) for log in logs if log.attempt == chosen}
    if not follows and logs:
        return
    watcher = watch(folder)
    index = folder.ids[cell_id]

    def look() -> CellState:
        """The cell, also with what the scheduler says of it."""
        watcher.ask(ASK_SECONDS)
        found = watcher.refresh().cells.get(index) or CellState(cell_id, index, "pending")
        if watcher.trouble:
            printer.note(watcher.trouble)
        return found

    if not follows:
        state = look()
        because = f": {state.reason}" if state.reason else ""
        raise UserError(
            f"cell {cell} has no logs; it is {state.state}{because}. "
            f"What its batch script printed, if it began, is in {folder.tasks}"
        )

    def alive(started: Mapping[str, Any]) -> bool | None:
        watcher.ask(ASK_SECONDS)
        return watcher.alive(started)

    told: str | None = None
    for news in follow(folder, cell_id, streams, offsets=offsets, alive=alive, folder=place):
        if isinstance(news, CellState):
            if news.state in ("pending", "stopped", "lost"):
                news = look()
            waits = news.state in ("pending", "stopped", "lost") and not news.cancelled
            what = f"{news.state}: {news.reason}" if news.reason else news.state
            if what != told:
                printer.note(f"{what}; waiting for the next attempt" if waits else what)
            told = what
        else:
            printer.write(*news)


def _place(run: RunFolder, cell_id: str, worker: int | None) -> Path:
    """The folder with the logs of a cell, or of one of its workers: by default the first."""
    from hpcml.errors import UserError
    from hpcml.runs.folder import workers

    known = {int(path.name): path for path in workers(run.cell_dir(cell_id))}
    if worker is None:
        return known[min(known)] if known else run.cell_dir(cell_id)
    if worker not in known:
        names = f"it has {', '.join(map(str, known))}" if known else "it has none"
        raise UserError(f"cell {cell_id} has no worker {worker}; {names}")
    return known[worker]


class _Printer:
    """Writes logs to standard output, byte by byte as they are."""

    def __init__(self, *, mark_err: bool) -> None:
        self._mark_err = mark_err
        self._shown: Log | None = None
        self._within_line = False

    def show(self, log: Log) -> int:
        """Print a log, or its end on a terminal; returns the offset up to which it is shown."""
        from hpcml.files import plain_errors
        from hpcml.runs.logs import tail

        position = 0
        if sys.stdout.isatty():
            text, start = tail(log.path, _LINES_ON_A_TERMINAL)
            if start:
                self.note(f"the last {_LINES_ON_A_TERMINAL} lines of {log.path}")
            self.write(log, text)
            return start + len(text)
        with plain_errors(f"read {log.path}"), log.path.open("rb") as file:
            for line in file:
                self.write(log, line)
                position += len(line)
        return position

    def write(self, log: Log, text: bytes) -> None:
        """Print a piece of a log."""
        if self._shown is not None and self._shown.attempt != log.attempt:
            self.note(f"attempt {log.attempt}")
        output = sys.stdout.buffer
        if self._within_line and self._shown != log:
            output.write(b"\n")
            self._within_line = False
        self._shown = log
        if log.stream == "err" and self._mark_err:
            for line in text.splitlines(keepends=True):
                output.write((b"" if self._within_line else _ERR_MARK) + line)
                self._within_line = not line.endswith((b"\n", b"\r"))
        else:
            output.write(text)
            self._within_line = bool(text) and not text.endswith((b"\n", b"\r"))
        output.flush()

    def note(self, what: str) -> None:
        """Say something that is not part of the logs."""
        from hpcml.cli.text import message

        sys.stdout.flush()
        click.echo(click.style(f"[{message(what)}]", dim=True), err=True)
