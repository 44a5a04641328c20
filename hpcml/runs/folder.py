"""The run folder: its paths, and writing it so that a kill never leaves half of one."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcml.errors import UserError
from hpcml.files import RUNS_ROOT_MARK, expanded, is_file, plain_errors, root_of_cell
from hpcml.runs.disk import append_line, dumps, replace
from hpcml.worker import rounds, stages
from hpcml.worker.flush import flush_folder, flush_tree
from hpcml.worker.halving import chosen

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CREATING = ".creating-"
# Between the birth of a temporary folder and its lock there is a moment; after this many seconds
# a temporary folder without a lock belongs to nobody.
_UNLOCKED_IS_ABANDONED = 3600.0


def now() -> str:
    """The time as all files of a run write it: ISO 8601, UTC, milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def workers(cell_dir: Path) -> list[Path]:
    """The folders of the workers that share a cell, by number; none where it has one attempt
    at a time.
    """
    try:
        names = [name for name in os.listdir(cell_dir / "workers") if name.isdecimal()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [cell_dir / "workers" / name for name in sorted(names, key=int)]


def default_root() -> Path:
    """Where runs live unless ``--root`` says otherwise: ``$HPCML_RUNS``, or ``runs`` here.

    In a cell, whose folder is a copy of the project, beside the run that it belongs to.
    """
    if named := os.environ.get("HPCML_RUNS"):
        return expanded(named, "$HPCML_RUNS").absolute()
    return root_of_cell() or Path("runs").absolute()


class RunFolder:
    """One run on disk. The layout is fixed in docs/design.md.

    Use :meth:`create` for a new run, :meth:`open` or :func:`hpcml.runs.find.find_run` for an
    existing one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._proposals: dict[int, list[dict[str, Any]]] = {}

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    # Paths

    @property
    def name(self) -> str:
        """The recipe's name: the folder that the run lies in."""
        return self.path.parent.name

    @property
    def run_id(self) -> str:
        """The run's id: the name of the folder itself."""
        return self.path.name

    @property
    def plan_file(self) -> Path:
        """The plan without its cells."""
        return self.path / "plan.json"

    @property
    def recipe_file(self) -> Path:
        """The recipe as it was given."""
        return self.path / "recipe.yaml"

    @property
    def site_file(self) -> Path:
        """The site as it was given."""
        return self.path / "site.yaml"

    @property
    def cells_file(self) -> Path:
        """One JSON line per cell."""
        return self.path / "cells.jsonl"

    @property
    def cells_index(self) -> Path:
        """The byte offset of each line of :attr:`cells_file`, little-endian uint64."""
        return self.path / "cells.idx"

    @property
    def code(self) -> Path:
        """What the payload runs: the package, and a snapshot of the user's files."""
        return self.path / "code"

    @property
    def submissions(self) -> Path:
        """The folder with one JSON file per submission."""
        return self.path / "submissions"

    @property
    def journal_file(self) -> Path:
        """The journal of calls to the scheduler."""
        return self.path / "submissions.jsonl"

    @property
    def scripts(self) -> Path:
        """The rendered batch scripts."""
        return self.path / "scripts"

    @property
    def tasks(self) -> Path:
        """The output of the batch scripts."""
        return self.path / "tasks"

    @property
    def cells_dir(self) -> Path:
        """One folder per cell that was started."""
        return self.path / "cells"

    @property
    def results_file(self) -> Path:
        """The table that ``hpcml results`` shows."""
        return self.path / "results.parquet"

    def cell_dir(self, cell_id: str) -> Path:
        """The folder of one cell; it exists once the cell was started or cancelled."""
        return self.cells_dir / cell_id

    # Creating and opening

    @classmethod
    def create(
        cls,
        root: Path,
        name: str,
        run_id: str,
        plan_json: dict[str, Any],
        recipe_text: str,
        site_text: str,
        cells: Iterable[tuple[str, str]],
    ) -> RunFolder:
        """Write a new run, or open it if it is there with the same plan.

        The folder is built under a temporary name and renamed, so that it is complete or absent.

        Args:
            root: the runs root; it is created if absent.
            name: the recipe's name.
            run_id: the folder's name.
            plan_json: the plan without its cells; ``digest`` identifies it.
            recipe_text: the recipe as it was given.
            site_text: the site as it was given.
            cells: of each its id, and ``"params":…,"payload":…`` as JSON, in the order of the
                index; read once, never kept in memory.

        Raises:
            UserError: the folder cannot be written, or holds a run with another plan. Nothing
                half-made is left.
        """
        target = root.absolute() / name / run_id
        if is_file(target / "plan.json"):
            return cls.open(target, digest=plan_json["digest"])
        with plain_errors(f"write the run folder {target}"), _new_folders(target.parent):
            _remove_abandoned(target.parent)
            with _temporary_folder(target.parent) as building:
                for folder in ("cells", "submissions", "scripts", "tasks"):
                    (building / folder).mkdir()
                _write_cells(building, cells)
                (building / "recipe.yaml").write_bytes(recipe_text.encode())
                (building / "site.yaml").write_bytes(site_text.encode())
                plan = json.dumps(plan_json, indent=2, ensure_ascii=False) + "\n"
                (building / "plan.json").write_bytes(plan.encode())
                flush_tree(building)
                # Two commands at once: the first rename wins, and both continue with that run.
                won = _publish(building, target)
            flush_folder(target.parent)
            (root.absolute() / RUNS_ROOT_MARK).touch()
        return cls(target) if won else cls.open(target, digest=plan_json["digest"])

    @classmethod
    def open(cls, path: Path, digest: str | None = None) -> RunFolder:
        """Open an existing run.

        Args:
            path: the run folder.
            digest: the digest that its plan must have; ``None`` accepts any.

        Raises:
            UserError: it is no run folder, or its plan is another one.
        """
        run = cls(path.absolute())
        found = run.plan.get("digest")
        if not isinstance(found, str):
            raise UserError(f"{run.plan_file}: the plan has no digest, so this is no run of hpcml")
        if digest is not None and found != digest:
            raise UserError(
                f"{run.path} holds a run with another plan (digest {found[:12]}, "
                f"this one has {digest[:12]}); use another --root, or move that folder away"
            )
        return run

    # Reading

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The plan as it was written."""
        try:
            plan = json.loads(self.plan_file.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{self.path} is not a run folder: it has no plan.json") from None
        except ValueError as error:
            raise UserError(f"{self.plan_file} is damaged: {error}") from error
        except OSError as error:
            raise UserError(f"cannot read {self.plan_file}: {error.strerror}") from error
        if not isinstance(plan, dict):
            raise UserError(f"{self.plan_file} is damaged: not a JSON object")
        return plan

    @property
    def swept(self) -> list[str]:
        """Names of the parameters that differ between the cells."""
        return list(self.plan.get("swept") or [])

    @property
    def objective(self) -> tuple[str, str] | None:
        """The metric that ranks the cells, and ``min`` or ``max``."""
        objective = self.plan.get("objective")
        return (objective["metric"], objective["mode"]) if objective else None

    @cached_property
    def offsets(self) -> array[int]:
        """The byte offset of each cell's line."""
        values = array("Q")
        with plain_errors(f"read {self.cells_index}"):
            values.frombytes(self.cells_index.read_bytes())
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def __len__(self) -> int:
        return len(self.offsets)

    def cell(self, index: int) -> dict[str, Any]:
        """The cell with this index, without reading the others."""
        return self.read_cells([index])[0]

    def read_cells(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Some cells by their indices."""
        with plain_errors(f"read {self.cells_file}"), self.cells_file.open("rb") as file:
            cells = []
            for index in indices:
                file.seek(self.offsets[index])
                cells.append(json.loads(file.readline()))
        return list(self._with_proposals(cells))

    def cells(self) -> Iterator[dict[str, Any]]:
        """All cells in order, one at a time."""
        with plain_errors(f"read {self.cells_file}"), self.cells_file.open("rb") as file:
            yield from self._with_proposals(map(json.loads, file))

    @cached_property
    def ids(self) -> dict[str, int]:
        """Index by id, of all cells."""
        # Only the head of each line is looked at, because parsing 100,000 lines takes a second.
        with plain_errors(f"read {self.cells_file}"):
            data = self.cells_file.read_bytes()
        ids = {}
        for index, offset in enumerate(self.offsets):
            start = data.index(b'"id":"', offset) + 6
            ids[data[start : data.index(b'"', start)].decode()] = index
        return ids

    def done(self) -> set[str]:
        """Ids of the cells that have a result, and need no further attempt."""
        with plain_errors(f"read {self.cells_dir}"), os.scandir(self.cells_dir) as folders:
            return {
                folder.name
                for folder in folders
                if folder.name in self.ids and os.path.exists(f"{folder.path}/result.json")
            }

    # Searching

    def proposals(self) -> dict[int, list[dict[str, Any]]]:
        """What the cells of the rounds of a search try, as far as it is proposed."""
        search = self.plan.get("search")
        # What is proposed stays so.
        for number in range(len(self._proposals) + 1, len(search["cells"]) + 1 if search else 1):
            with plain_errors(f"read {self.path / 'rounds'}"):
                cells = rounds.proposed(str(self.path), number)
            if cells is None:
                break
            self._proposals[number] = cells
        return self._proposals

    def _with_proposals(self, cells: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Cells with what a search proposed for them; before that they lack these parameters."""
        search = self.plan.get("search")
        if not search:
            yield from cells
            return
        proposed = [params for found in self.proposals().values() for params in found]
        for cell in cells:
            if cell["index"] < len(proposed):
                own = stages.searched(proposed[cell["index"]])
                cell = stages.complete(cell, "", own)
            else:
                cell = {**cell, "params": _without(cell["params"], search["params"])}
                payload = cell["payload"]
                if "parameters" in payload:  # the complete ones of a training
                    known = _without(payload["parameters"], search["params"])
                    cell["payload"] = {**payload, "parameters": known}
            yield cell

    # Halving

    def choices(self) -> dict[int, list[int]]:
        """The cells of the rungs after the first, the best first, as far as they are chosen."""
        halving = self.plan.get("halving")
        found = {}
        for rung in range(2, len(halving["steps"]) + 1 if halving else 2):
            with plain_errors(f"read {self.path / 'rungs'}"):
                cells = chosen(str(self.path), rung)
            if cells is None:
                break
            found[rung] = cells
        return found

    def places(self, record: dict[str, Any]) -> list[list[int]]:
        """The cells that each place in the list of a submission may stand for.

        It is one, but for a rung whose cells are not chosen yet: there it may be any, and each
        cell is given to one place.
        """
        listed = [cell for first, last in record["cells"] for cell in range(first, last + 1)]
        rung = record.get("rung") or 1
        if rung == 1:
            return [[cell] for cell in listed]
        known = self.choices().get(rung)
        if known is not None:
            return [known[place : place + 1] for place in listed]
        return [list(range(start, len(self), len(listed))) for start in range(len(listed))]

    # Submissions

    def next_submission(self) -> int:
        """The number that the next submission gets, unless another command is faster."""
        with plain_errors(f"read {self.submissions}"):
            taken = [int(file.stem) for file in self.submissions.glob("[0-9]*.json")]
        return max(taken, default=0) + 1

    def write_submission(self, record: dict[str, Any]) -> int:
        """Write ``submissions/NNN.json`` under the next free number, and return the number."""
        with plain_errors(f"write to {self.submissions}"):
            for number in itertools.count(self.next_submission()):
                path = self.submissions / f"{number:03}.json"
                # The empty file reserves the number against another command at the same time.
                with suppress(FileExistsError):
                    path.touch(exist_ok=False)
                    replace(path, dumps({"submission": number, **record}) + b"\n")
                    return number
        raise AssertionError("unreachable")

    def read_submission(self, number: int) -> dict[str, Any]:
        """The record of one submission."""
        with plain_errors(f"read {self.submissions}"):
            record: dict[str, Any] = json.loads(
                (self.submissions / f"{number:03}.json").read_bytes()
            )
        return record

    def codes(self) -> set[str]:
        """The code of all submissions, as folders in the run folder."""
        found = set()
        with plain_errors(f"read {self.submissions}"):
            for path in self.submissions.glob("[0-9]*.json"):
                with suppress(ValueError, KeyError):  # it is being written
                    found.add(json.loads(path.read_bytes())["code"])
        return found

    def journal(self, event: str, *, durable: bool = True, **fields: Any) -> None:
        """Append to the journal of submissions.

        Args:
            event: what happened.
            durable: flush it before returning, and with it what was appended before.
            fields: more about it.
        """
        with plain_errors(f"write to {self.journal_file}"):
            entry = {"time": now(), "event": event, **fields}
            append_line(self.journal_file, entry, durable=durable)


def _without(params: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name not in names}


def _write_cells(folder: Path, cells: Iterable[tuple[str, str]]) -> None:
    offsets = array("Q")
    position = 0
    with (folder / "cells.jsonl").open("wb") as file:
        for index, (cell_id, members) in enumerate(cells):
            if not _SAFE_ID.fullmatch(cell_id):
                raise ValueError(f"cell {index}: id {cell_id!r}")
            text = f'{{"index":{index},"id":"{cell_id}",{members}}}'
            # Text without escapes is easier to read.
            line = (dumps(json.loads(text)) if "\\u" in text else text.encode()) + b"\n"
            file.write(line)
            offsets.append(position)
            position += len(line)
    if sys.byteorder == "big":
        offsets.byteswap()
    (folder / "cells.idx").write_bytes(offsets.tobytes())


@contextmanager
def _new_folders(path: Path) -> Iterator[None]:
    """Create a folder and its parents; after an error remove those that were created."""
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """A folder beside the one to be, locked by this process, gone when the block ends."""
    building = Path(tempfile.mkdtemp(prefix=_CREATING, dir=parent))
    try:
        # mkdtemp makes it private; a run is as readable as the umask says.
        mask = os.umask(0)
        os.umask(mask)
        building.chmod(0o777 & ~mask)
        with (building / "owner").open("w") as lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _publish(building: Path, target: Path) -> bool:
    (building / "owner").unlink()
    try:
        building.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and (target / "plan.json").exists():
            return False
        raise
    return True


def _remove_abandoned(parent: Path) -> None:
    """Remove what earlier commands that were killed left behind."""
    for folder in parent.glob(f"{_CREATING}*"):
        with suppress(OSError):
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        with (folder / "owner").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _UNLOCKED_IS_ABANDONED
