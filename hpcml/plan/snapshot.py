"""The code a submission runs: a copy of the user's files and of hpcml, named by its content.

Cells run from the copy, so that editing a file does not change what is still in the queue.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import hpcml
from hpcml import resources
from hpcml.errors import UserError
from hpcml.files import RUNS_ROOT_MARK
from hpcml.recipe.units import format_memory
from hpcml.worker.flush import SIDE_BY_SIDE, flush_folder, flush_tree

# Reading more names than this means that the folder is no project but somebody's home.
_MAX_FILES = 20_000
_CLOSED = re.compile(rb"could not open directory '(.*)': Permission denied")


@dataclass(frozen=True)
class Snapshot:
    """Files to copy, as (path within the snapshot, source), and the digest of their content."""

    files: tuple[tuple[str, Path], ...]
    digest: str

    def write(self, folder: Path) -> Path:
        """Copy the files to ``folder/<digest>``, complete or not at all; returns that folder.

        The copy is on the disk, also after a crash of the machine, before it has its name.
        """
        target = folder / self.digest
        if target.is_dir():
            return target
        temporary = folder / f".{self.digest}.{uuid.uuid4().hex[:8]}"
        try:
            for parent in {"project", *(os.path.dirname(name) for name, _ in self.files)}:
                (temporary / parent).mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
                list(pool.map(lambda file: _copy(file[1], temporary / file[0]), self.files))
            # All at once, when all are written: the disk then has little left to wait for.
            flush_tree(temporary)
            os.rename(temporary, target)
            flush_folder(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target


def take(project: Path | None, limit: int, exclude: Path) -> Snapshot:
    """Find the files of a snapshot and digest them.

    Args:
        project: the user's project: a folder inside a git work tree (files that git tracks, and
            those that it neither tracks nor ignores) or any other folder (all that is not
            hidden). None takes hpcml alone.
        limit: the most that the user's files may have together, in bytes.
        exclude: the runs root, which is never part of a snapshot.

    Raises:
        UserError: the files are more than ``limit``, and the message names the largest; or one
            of them cannot be read.
    """
    files = [(f"hpcml/{name}", path) for name, path in _package()]
    digest = hashlib.sha256()
    with _readable(project):
        if project is not None:
            mine = sorted(_project(project, exclude.resolve()))
            _check_size(project, mine, limit)
            files += [(f"project/{name}", path) for name, path in mine]
        for name, path in files:
            mode = path.lstat().st_mode & 0o111
            digest.update(f"{name}\0{mode}\0".encode(errors="surrogateescape"))
            if path.is_symlink():
                digest.update(os.fsencode(_link_target(path)))
            else:
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return Snapshot(tuple(files), digest.hexdigest()[:10])


@contextmanager
def _readable(project: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; a run copies the files of {project}. Let "
            ".gitignore name what is no code, or move it out of there"
        ) from error


def project_root(folder: Path) -> Path:
    """The folder a snapshot starts at: the git work tree around ``folder``, or ``folder``.

    For a recipe that lies in a snapshot, because the command is given in a cell, that snapshot.
    """
    if (copy := _snapshot_around(folder)) is not None:
        return copy
    top = _git(folder, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(top.rstrip(b"\n"))) if top else folder


def _package() -> Iterator[tuple[str, Path]]:
    root = Path(hpcml.__file__).resolve().parent
    for path in sorted(root.rglob("*.py")):
        yield str(path.relative_to(root)), path
    # For commands that are given in a cell.
    for name in ("containers", "site_configs", "templates"):
        folder = resources.folder(name)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield f"{name}/{path.relative_to(folder)}", path


def _snapshot_around(folder: Path) -> Path | None:
    """The user's files in the snapshot of a run, where ``folder`` lies in one."""
    for parent in (folder, *folder.parents):
        # As Snapshot.write() and the run folder name them: RUN/code/DIGEST/project.
        run = parent.parent.parent.parent
        if parent.name == "project" and (run / "plan.json").is_file():
            return parent
    return None


def _project(folder: Path, exclude: Path) -> Iterator[tuple[str, Path]]:
    copied = _snapshot_around(folder) is not None
    names: Iterable[str]
    listed = None
    if not copied:
        listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is None:
        names = _walk(folder, exclude)
    else:
        names = {os.fsdecode(name) for name in listed.split(b"\0") if name}
    for count, name in enumerate(names):
        path = folder / name
        among_runs = path == exclude or exclude in path.parents or _among_runs(path.parent)
        if among_runs and not copied:
            continue
        if count > _MAX_FILES:
            raise UserError(
                f"{folder}: more than {_MAX_FILES:,} files to copy for the run. Put the recipe "
                "and its script in a folder of their own, or in a git repository whose "
                ".gitignore names the rest"
            )
        if path.is_symlink() or path.is_file():
            yield name, path
        elif path.is_dir():  # a submodule
            for below, source in _project(path, exclude):
                yield f"{name}/{below}", source


def _walk(folder: Path, exclude: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder, onerror=_raise):
        here = Path(parent)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name != "__pycache__"
            and here / name != exclude
            and not (here / name / RUNS_ROOT_MARK).exists()
        ]
        for name in files:
            if not name.startswith("."):
                yield str((here / name).relative_to(folder))


@lru_cache(maxsize=4096)
def _among_runs(folder: Path) -> bool:
    """Whether a runs root, this one or another, holds ``folder``."""
    if (folder / RUNS_ROOT_MARK).exists():
        return True
    return folder.parent != folder and _among_runs(folder.parent)


def _raise(error: OSError) -> None:
    raise error


def _check_size(folder: Path, files: list[tuple[str, Path]], limit: int) -> None:
    sizes = {name: path.lstat().st_size for name, path in files}
    total = sum(sizes.values())
    if total <= limit:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    listing = "\n".join(f"  {format_memory(sizes[name]):>8}  {name}" for name in largest)
    raise UserError(
        f"{folder}: a run copies the project's files, and they are {format_memory(total)} "
        f"together; the limit is {format_memory(limit)}. The largest:\n{listing}\n"
        "Let .gitignore name what is no code, or raise code.limit in the recipe"
    )


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Output of git in ``folder``; None where there is no git or no work tree."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        return None
    if closed := _CLOSED.search(result.stderr):
        # git leaves out what it may not look into.
        name = os.fsdecode(closed[1])
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / name))
    return result.stdout if result.returncode == 0 else None


def _copy(source: Path, copy: Path) -> None:
    if source.is_symlink():
        copy.symlink_to(_link_target(source))
    else:
        shutil.copy2(source, copy)


def _link_target(link: Path) -> str:
    """Where ``link`` points, such that the copy points there too when that lies outside."""
    target = os.readlink(link)
    return target if os.path.isabs(target) or ".." not in target else str(link.resolve())
