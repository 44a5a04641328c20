"""The rounds of a search: what their cells try, proposed from what is on disk.

A round is one submission. Its parameters are proposed when it begins, by whoever is first, on the
login node or by the batch script of a task, and are written down once.

``python -m hpcml.worker.rounds RUN_DIR ROUND COMMAND…`` proposes a round and becomes the command.
"""

import math
import os
import sys
from typing import Any, Optional

from hpcml.worker import chain
from hpcml.worker.chain import NotOver
from hpcml.worker.codes import CANNOT_WRITE
from hpcml.worker.sampler import NoOptuna, Tried, ask


def round_of(search: "dict[str, Any]", index: int) -> int:
    """The round that a cell belongs to, from 1."""
    number: int = index // search["cells"][0] + 1
    return number


def proposed(run_dir: str, number: int) -> "Optional[list[dict[str, Any]]]":
    """The searched parameters of each cell of a round; None: not proposed yet."""
    proposal = chain.read(_path(run_dir, number))
    return None if proposal is None else proposal["cells"]


def of_cell(run_dir: str, search: "dict[str, Any]", index: int) -> "dict[str, Any]":
    """The searched parameters of a cell.

    Raises:
        NotOver: its round is not proposed yet.
    """
    number = round_of(search, index)
    cells = proposed(run_dir, number)
    if cells is None:
        raise NotOver(f"round {number} is not proposed yet; give the command again to go on")
    params: dict[str, Any] = cells[index - (number - 1) * search["cells"][0]]
    return params


def propose(run_dir: str, number: int) -> None:
    """Decide the parameters of a round; whoever asks first decides it for all.

    Raises:
        NotOver: cells of the rounds before may still get an end, none of them has a value, or
            there is no optuna here.
    """
    if proposed(run_dir, number) is not None:
        return
    search: dict[str, Any] = chain.plan_of(run_dir)["search"]
    ids = chain.ids(run_dir)
    history = []
    unfinished: list[int] = []
    first = 0
    for before in range(1, number):
        cells = proposed(run_dir, before)
        if cells is None:
            raise NotOver(f"round {before} has not begun")
        tried = []
        for index, params in enumerate(cells, start=first):
            cell = os.path.join(run_dir, "cells", ids[index])
            result = chain.read(os.path.join(cell, "result.json"))
            if result is None and not chain.is_over(run_dir, ids[index]):
                unfinished.append(index)
            tried.append(_tried(params, result, search["metric"]))
        history.append(tried)
        first += len(cells)
    if unfinished:
        last = round_of(search, unfinished[-1])
        raise NotOver(
            f"round {last} is not over: {len(unfinished)} of {first} cells are unfinished, such as "
            f"cell {unfinished[0]}; give the command again to go on"
        )
    if history and all(cell.value is None for cells in history for cell in cells):
        failed = sum(cell.failed for cells in history for cell in cells)
        raise NotOver(
            f"no cell before round {number} has a value of {search['metric']}: {failed} failed, "
            f"{first - failed} reported none that is a finite number"
        )
    try:
        asked = ask(search, history)
    except NoOptuna as error:
        raise NotOver(f"{sys.executable} cannot propose round {number}: {error}") from None
    values = [[cell.value for cell in cells] for cells in history]
    chain.write_once(_path(run_dir, number), {"round": number, "cells": asked, "from": values})


def _tried(params: "dict[str, Any]", result: "Optional[dict[str, Any]]", metric: str) -> Tried:
    if result is None:
        return Tried(params, None, True)
    number = result["metrics"].get(metric)
    finite = isinstance(number, (int, float)) and math.isfinite(number)
    return Tried(params, float(number) if finite else None, False)


def _path(run_dir: str, number: int) -> str:
    return os.path.join(run_dir, "rounds", f"{number}.json")


def main() -> None:
    """Propose a round and become the command that follows; returns only if that can't be."""
    run_dir, number, *command = sys.argv[1:]
    try:
        propose(run_dir, int(number))
    except NotOver as error:
        print(f"hpcml: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"hpcml: {error.filename or run_dir}: {error.strerror}", file=sys.stderr)
        sys.exit(CANNOT_WRITE)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"hpcml: {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
