"""What of a run nobody needs any more: finding it, and removing it so that a kill does no harm."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcml.files import plain_errors
from hpcml.runs.folder import RunFolder
from hpcml.runs.life import size_of
from hpcml.runs.results import checkpoint_of, results
from hpcml.runs.status import Status

LOSERS = "checkpoints of cells that are not the best"
BEFORE = "checkpoints of cells that are done, before the final one"
ASIDE = "checkpoints that were set aside, half-written or damaged"
CODE = "copies of code that no submission uses"
LEFT = "what an earlier hpcml clean left"
CACHE = "tokenized data, which is made again when it is needed"

_REMOVING = ".removing-"
# As a recipe, a cell or a later stage names a checkpoint of another run.
_USED = re.compile(rb"([\w.-]+/[\w.-]+)/cells/([\w.-]+)/checkpoints")
# A later stage takes the folder of a run, and so perhaps anything in it.
_USED_RUN = re.compile(rb"\\u0000([\w.-]+/[\w.-]+)\\u0000run\\u0000")
_ANY = "*"


@dataclass(frozen=True, slots=True)
class Waste:
    """A folder that can go: one of the kinds above, and its size in bytes."""

    path: Path
    kind: str
    bytes: int


def used_checkpoints(runs: Iterable[RunFolder]) -> set[tuple[str, str]]:
    """The cells whose checkpoints some runs name, as ``(name/run id, cell id)``.

    A ``*`` stands for all cells.
    """
    found: set[tuple[str, str]] = set()
    for run in runs:
        files = [run.recipe_file, run.cells_file]
        if run.plan.get("needs"):  # its cells have taken what their stage found
            files += run.cells_dir.glob("*/cell.json")
        for path in files:
            with plain_errors(f"read {path}"):
                data = path.read_bytes()
            found |= {(name.decode(), cell.decode()) for name, cell in _USED.findall(data)}
            found |= {(name.decode(), _ANY) for name in _USED_RUN.findall(data)}
    return found


def waste_of(run: RunFolder, status: Status, keep: int, used: set[tuple[str, str]]) -> list[Waste]:
    """What can go of a run of which nothing is running or queued.

    Args:
        run: the run.
        status: its states.
        keep: how many of the best cells keep their checkpoints, 1 or more.
        used: cells whose checkpoints stay, from :func:`used_checkpoints`.
    """
    with plain_errors(f"read {run.path}"):
        paths = [*_of_cells(run, status, keep, used), *_of_code(run)]
        return [Waste(path, kind, size_of(path)) for path, kind in paths]


def cache_of(root: Path) -> list[Waste]:
    """The tokenized data of a runs root all of whose runs are complete."""
    with plain_errors(f"read {root}"):
        found = [Waste(path, LEFT, size_of(path)) for path in root.glob(f"{_REMOVING}*")]
        path = root / ".data"
        return [*found, Waste(path, CACHE, size_of(path))] if _is_folder(path) else found


def remove(waste: Waste) -> None:
    """Remove a folder: first its name, at once, then what is in it.

    Raises:
        UserError: it cannot be removed.
    """
    aside = waste.path.with_name(f"{_REMOVING}{uuid.uuid4().hex}")
    with plain_errors(f"remove {waste.path}"):
        waste.path.rename(aside)
        shutil.rmtree(aside)


def _of_cells(
    run: RunFolder, status: Status, keep: int, used: set[tuple[str, str]]
) -> Iterator[tuple[Path, str]]:
    losers = _losers(run, status, keep)
    done = run.done()
    mine = f"{run.name}/{run.run_id}"
    for cell in status.cells.values():
        folder = run.cell_dir(cell.id)
        checkpoints = folder / "checkpoints"
        is_used = bool({(mine, cell.id), (mine, _ANY)} & used)
        for place in (folder, checkpoints, *folder.glob("set-aside-*")):
            yield from ((path, LEFT) for path in place.glob(f"{_REMOVING}*"))
        for path in folder.glob("set-aside-*/checkpoints"):
            if not is_used:
                yield path, ASIDE
        if is_used or not _is_folder(checkpoints):
            continue
        if cell.id in losers:
            yield checkpoints, LOSERS
            continue
        for pattern in (".writing-*", "damaged-step-*"):
            yield from ((path, ASIDE) for path in checkpoints.glob(pattern))
        if cell.id in done and checkpoint_of(folder) is not None:
            named = {_named(checkpoints / pointer) for pointer in ("latest", "best", "final")}
            for path in sorted(checkpoints.glob("step-*")):
                if path.name not in named and _is_folder(path):
                    yield path, BEFORE


def _losers(run: RunFolder, status: Status, keep: int) -> set[str]:
    """The cells that lost against others, once all have ended: those that failed may go on."""
    if run.objective is None or set(status.counts()) - {"done", "dropped", "failed"}:
        return set()
    rows = results(run, status).rows
    if not any(row.rank == 1 for row in rows):
        return set()
    done = run.done()
    return {
        row.cell.id
        for row in rows
        if (row.cell.state == "dropped" or row.cell.id in done)
        and (row.rank is None or row.rank > keep)
    }


def _of_code(run: RunFolder) -> Iterator[tuple[Path, str]]:
    if not _is_folder(run.code):
        return
    used = {Path(code).name for code in run.codes()}
    for path in sorted(run.code.iterdir()):
        if path.name.startswith(_REMOVING):
            yield path, LEFT
        elif path.name not in used and _is_folder(path):
            yield path, CODE


def _named(pointer: Path) -> str:
    try:
        return pointer.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""


def _is_folder(path: Path) -> bool:
    """Whether it is a folder that lies here; a link's may be needed elsewhere."""
    return path.is_dir() and not os.path.islink(path)
