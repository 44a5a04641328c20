"""Successive halving: which cells go on to the next rung, decided from what is on disk.

A rung is one submission: its cells train, each from its own checkpoint, up to the rung's step. The
tasks of a later rung have places instead of cells; whichever of them comes first writes down who
has which place, once, and all go by that.

Source: K. Jamieson and A. Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter
Optimization, AISTATS 2016.
"""

import math
import os
from typing import Any, Optional

from hpcml.worker import chain
from hpcml.worker.chain import NotOver


def result_path(run_dir: str, cell_id: str, halving: "Optional[dict[str, Any]]", rung: int) -> str:
    """Where the result of a cell lies: of its last rung it is the cell's own."""
    cell = os.path.join(run_dir, "cells", cell_id)
    if halving is None or rung == len(halving["steps"]):
        return os.path.join(cell, "result.json")
    return os.path.join(cell, "rungs", f"{rung}.json")


def chosen(run_dir: str, rung: int) -> "Optional[list[int]]":
    """The indices of the cells of a rung after the first, the best first; None: not chosen yet."""
    choice = chain.read(_choice_path(run_dir, rung))
    return None if choice is None else choice["cells"]


def choose(run_dir: str, rung: int, since: Optional[str] = None) -> "list[int]":
    """The cells of a rung after the first; whoever asks first decides it for all.

    Equal values keep the order of the sweep. A cell that failed, was cancelled, or has no finite
    value is no candidate.

    Args:
        run_dir: the run folder.
        rung: the rung, from 2.
        since: when the rung was asked for; who was cancelled before is wanted again. None: now.

    Raises:
        NotOver: cells of the rung before may still get an end, or none has a value.
    """
    known = chosen(run_dir, rung)
    if known is not None:
        return known
    halving: dict[str, Any] = chain.plan_of(run_dir)["halving"]
    before = rung - 1
    members = range(halving["cells"][0]) if before == 1 else chosen(run_dir, before)
    if members is None:
        raise NotOver(f"rung {before} has not begun")
    sign = -1 if halving["mode"] == "max" else 1
    ranked: list[tuple[Any, int]] = []
    without: list[int] = []
    failed: list[int] = []
    unfinished: list[int] = []
    ids = chain.ids(run_dir)
    for index in members:
        result = chain.read(result_path(run_dir, ids[index], halving, before))
        if result is None:
            ended = chain.is_over(run_dir, ids[index])
            (failed if ended else unfinished).append(index)
            continue
        number = result["metrics"].get(halving["metric"])
        if isinstance(number, (int, float)) and math.isfinite(number):
            ranked.append((sign * number, index))
        else:
            without.append(index)
    if unfinished:
        raise NotOver(
            f"rung {before} is not over: {len(unfinished)} of {len(members)} cells are unfinished, "
            f"such as cell {unfinished[0]}; give the command again to go on"
        )
    if not ranked:
        raise NotOver(
            f"rung {before} has no cell with a value of {halving['metric']}: {len(failed)} failed, "
            f"{len(without)} reported none that is a finite number"
        )
    cells: list[int] = []
    for _, index in sorted(ranked):
        if len(cells) == halving["cells"][rung - 1]:
            break
        if since is not None and chain.is_cancelled(run_dir, ids[index], since):
            failed.append(index)
        else:
            cells.append(index)
    if not cells:
        raise NotOver(
            f"all cells that have a value of {halving['metric']} in rung {before} are cancelled"
        )
    choice = {"rung": rung, "cells": cells, "failed": failed, "no_value": without}
    chain.write_once(_choice_path(run_dir, rung), choice)
    return chosen(run_dir, rung) or cells


def _choice_path(run_dir: str, rung: int) -> str:
    return os.path.join(run_dir, "rungs", f"{rung}.json")
