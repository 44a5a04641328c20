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
    """What a run folder needs: rename over a file, append, a lock that another process sees."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".check-", dir=root) as folder:
        old, new = Path(folder, "old"), Path(folder, "new")
        old.write_text("old")
        new.write_text("new")
        os.replace(new, old)
        if old.read_text() != "new":
            raise ValueError(f"{root}: renaming over a file does not replace it")
        with open(old) as one, open(old) as other:
            fcntl.flock(one, fcntl.LOCK_EX)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                raise ValueError(f"{root}: two may hold a lock at once")
    return f"{root}, {format_memory(shutil.disk_usage(root).free // 2**30 * 2**30)} free"
