"""Whether a site does on this machine what hpcml relies on."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hpcml.recipe.units import format_memory
from hpcml.site import machine
from hpcml.site.schema import Site

# A sweep of a hundred cells makes more.
_FEW_FILES = 10_000


class Check(NamedTuple):
    """One thing looked at: its name, whether it is as it must be, and what was seen.

    ``good`` is None where it was not looked at, and ``seen`` then says why.
    """

    name: str
    good: bool | None
    seen: str


def check_site(site: Site, root: Path) -> Iterator[Check]:
    """Look at what a site needs of this machine, one part after another.

    Args:
        site: the site.
        root: the runs root; a temporary folder is made in it and removed again.
    """
    yield _attempt("bash", _bash)
    if site.scheduler != "volcano":  # whose pods have all of that in their image
        yield _attempt("python", lambda: _python(site))
    if site.scheduler == "local":
        yield _attempt("cores", lambda: f"{site.machine.cpus or machine.cores()}")
        yield _attempt("memory", lambda: format_memory(site.machine.memory or _memory()))
        yield _attempt("GPUs", lambda: ", ".join(machine.gpus()) or "none")
    yield _attempt("runs root", lambda: _root(root))
    if site.scheduler != "volcano":
        yield _attempt("setup lines", lambda: _setup(site))


def _attempt(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Check(name, False, str(error))


def _memory() -> int:
    return machine.memory() // 2**20 * 2**20


def _bash() -> str:
    result = subprocess.run(
        ["bash", "-c", "echo $BASH_VERSION"], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def _python(site: Site) -> str:
    python = site.python or sys.executable
    script = "import sys; print(sys.version.split()[0]); sys.exit(sys.version_info < (3, 9))"
    result = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    version = result.stdout.strip()
    if result.returncode:
        raise ValueError(f"{python} is Python {version or 'of no known version'}; 3.9 is needed")
    return f"{version} ({python})"


def _setup(site: Site) -> str:
    if not site.setup:
        return "none"
    result = subprocess.run(
        ["bash", "-c", "\n".join(site.setup)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise ValueError(f"exit code {result.returncode}: {result.stderr.strip()[-200:]}")
    return f"{len(site.setup)} lines run"


def _root(root: Path) -> str:
    """What a run folder needs of its filesystem, and how much room there is.

    Rename over a file, a link that only one can make, lines that two processes append whole, a
    lock that another process sees, flushing.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".check-", dir=root) as folder:
        old, new = Path(folder, "old"), Path(folder, "new")
        old.write_text("old")
        new.write_text("new")
        with open(new) as file:
            os.fsync(file.fileno())
        os.replace(new, old)
        if old.read_text() != "new":
            raise ValueError(f"{root}: renaming over a file does not replace it")
        os.link(old, new)
        try:
            os.link(old, new)
        except FileExistsError:
            pass
        else:
            raise ValueError(f"{root}: a link can be made where a file is")
        with open(old) as one, open(old) as other:
            fcntl.flock(one, fcntl.LOCK_EX)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                raise ValueError(f"{root}: two may hold a lock at once")
        _append_from_two(Path(folder, "lines"))
    return f"{root}, {_room(root)}"


_LINES = 200
_APPEND = f"""
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in range({_LINES}):
    os.write(file, sys.argv[2].encode() * 80 + b"\\n")
"""


def _append_from_two(path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", _APPEND, path, word]) for word in "ab"]
    codes = [writer.wait() for writer in writers]
    lines = path.read_text().splitlines() if codes == [0, 0] else []
    if sorted(lines) != ["a" * 80] * _LINES + ["b" * 80] * _LINES:
        raise ValueError(f"{path.parent.parent}: lines that two processes append are not whole")


def _room(root: Path) -> str:
    """Free space and files; many filesystems do not count files, and say 0."""
    found = os.statvfs(root)
    free = format_memory(shutil.disk_usage(root).free // 2**30 * 2**30)
    if not found.f_files:
        return f"{free} free"
    if found.f_favail < _FEW_FILES:
        raise ValueError(f"{root}: only {found.f_favail:,} more files fit; remove some (inodes)")
    return f"{free} and {found.f_favail:,} files free"
