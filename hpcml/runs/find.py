"""Which run the user means."""

from __future__ import annotations

import difflib
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcml.errors import UserError
from hpcml.files import expanded, is_file
from hpcml.recipe.yaml import load_yaml
from hpcml.runs.folder import RunFolder, default_root
from hpcml.runs.results import results
from hpcml.site.search import site_files

_LISTED = 10
# So many digits are an index, also one that no cell has, and never the beginning of an id: `cancel
# RUN 9` must not stop another cell.
_DIGITS_OF_INDEX = 7


def list_runs(*roots: Path) -> list[RunFolder]:
    """All runs below some roots, the one whose command was given last first."""
    plans: list[Path] = []
    for root in roots:
        try:
            found = root.glob("*/*/plan.json")
            plans += [path for path in found if not path.parent.name.startswith(".")]
        except OSError as error:
            raise UserError(f"cannot read the runs in {root}: {error.strerror}") from error
    return sorted((RunFolder(path.parent) for path in plans), key=_last_given, reverse=True)


def builders_on(run: RunFolder) -> list[RunFolder]:
    """The runs of later stages that take results of ``run``."""
    name = f"{run.name}/{run.run_id}"
    return [other for other in list_runs(_root(run)) if name in (other.plan.get("needs") or ())]


def known_roots() -> list[Path]:
    """Where runs lie when nobody says where: ``$HPCML_RUNS``, or ``runs`` here and the sites'."""
    roots = [default_root()]
    if not os.environ.get("HPCML_RUNS"):
        for site in site_files().values():
            # A site with a mistake is reported to those who use it.
            with suppress(UserError):
                runs = load_yaml(site).data.get("runs")
                if isinstance(runs, str):
                    roots.append(expanded(runs, str(site)).absolute())
    places: dict[str, Path] = {}
    for root in roots:  # two names of one place are one
        places.setdefault(os.path.realpath(root), root)
    return list(places.values())


def find_run(spec: str | None, root: Path | None = None, *, certain: bool = False) -> RunFolder:
    """The run that the user named.

    Args:
        spec: a path of a run folder, a run id or a unique beginning of one, a recipe's name (its
            newest run), ``name/id``, or ``None`` for the newest run of all.
        root: where to look; unless given, in all :func:`known_roots`. Where several of them have
            a run of the same name, the newest one counts.
        certain: refuse a name that runs in several roots have.

    Raises:
        UserError: nothing, or more than one run, has this name. The message lists the known ones.
    """
    if spec is not None and is_file(Path(spec) / "plan.json"):
        return RunFolder.open(Path(spec).resolve())
    roots = [root.absolute()] if root else known_roots()
    runs = list_runs(*roots)
    places = ", ".join(map(str, roots))
    if not runs:
        raise UserError(
            f"there are no runs in {places}; name another place by --root or $HPCML_RUNS"
        )
    if spec is None:
        return RunFolder.open(runs[0].path)
    matches = _matches(spec.rstrip("/"), runs)
    having = [place for place in roots if any(_root(run) == place for run in matches)]
    if certain and len(having) > 1:
        raise UserError(
            f"{spec!r} is in {' and in '.join(map(str, having))}; say which one by --root"
        )
    if matches and (matches[0].name == spec.rstrip("/") or len(set(map(_label, matches))) == 1):
        return RunFolder.open(matches[0].path)
    if matches:
        raise UserError(f"{spec!r} can mean several runs: {_listing(matches)}")
    names = {run.name for run in runs} | {run.run_id for run in runs} | set(map(_label, runs))
    nearest = difflib.get_close_matches(spec, sorted(names), n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise UserError(f"no run is named {spec!r}.{hint} Runs in {places}: {_listing(runs)}")


def reference(run: RunFolder) -> str:
    """What to type in this folder to name a run: its name where that finds it, or its path."""
    places = [root / run.name / run.run_id for root in known_roots()]
    found = [place for place in places if os.path.isfile(place / "plan.json")]
    if len(found) == 1 and os.path.samefile(found[0], run.path):
        return shlex.quote(_label(run))
    here = Path.cwd()
    path = run.path.relative_to(here) if run.path.is_relative_to(here) else run.path
    return shlex.quote(str(path))


def _root(run: RunFolder) -> Path:
    return run.path.parent.parent


def _matches(spec: str, runs: list[RunFolder]) -> list[RunFolder]:
    """The runs that a name can mean, newest first; the most exact reading that fits any wins."""
    named = [run for run in runs if run.name == spec]
    if named:
        return named
    name, _, beginning = spec.rpartition("/")
    candidates = [run for run in runs if not name or run.name == name]
    exact = [run for run in candidates if run.run_id == beginning]
    if exact or not beginning:
        return exact
    return [run for run in candidates if run.run_id.startswith(beginning)]


def _last_given(run: RunFolder) -> float:
    """When the run's command was given last: each time, the journal grows."""
    for path in (run.journal_file, run.plan_file):
        try:
            return os.stat(path).st_mtime
        except OSError:
            continue
    return 0.0


def _label(run: RunFolder) -> str:
    return f"{run.name}/{run.run_id}"


def _listing(runs: list[RunFolder]) -> str:
    labels = list(dict.fromkeys(map(_label, runs)))
    shown = ", ".join(labels[:_LISTED])
    return shown if len(labels) <= _LISTED else f"{shown}, and {len(labels) - _LISTED} more"


def find_cell(run: RunFolder, spec: str) -> dict[str, Any]:
    """The cell that the user named.

    Args:
        run: the run it belongs to.
        spec: an index, an id or a unique beginning of one, or ``best``.

    Raises:
        UserError: nothing, or more than one cell, has this name.
    """
    if spec == "best":
        best = results(run).best
        if best is None:
            raise UserError(
                f"{run.path} has no best cell: "
                + (
                    f"no cell has a value of {run.objective[0]!r} yet"
                    if run.objective
                    else "its recipe names no objective"
                )
            )
        return run.cell(best.cell.index)
    if spec in run.ids:
        return run.cell(run.ids[spec])
    if spec.isdecimal() and int(spec) < len(run):
        return run.cell(int(spec))
    index = spec.isdecimal() and len(spec) <= _DIGITS_OF_INDEX
    matches = [each for each in run.ids if spec and not index and each.startswith(spec)]
    if len(matches) == 1:
        return run.cell(run.ids[matches[0]])
    if matches:
        shown = ", ".join(matches[:_LISTED]) + (", and others" if len(matches) > _LISTED else "")
        raise UserError(f"{spec!r} can mean several cells: {shown}")
    raise UserError(
        f"no cell is named {spec!r} in {run.path}; "
        f"a cell is named by its index (0 to {len(run) - 1}), its id, or 'best'"
    )
