"""Looking at the filesystem, with errors that a person understands."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcml.errors import UserError

# The file by which a runs root is known: what earlier runs left is no part of a project.
RUNS_ROOT_MARK = ".hpcml-runs"


def root_of_cell() -> Path | None:
    """The runs root of the cell in which this command is given, if it is given in one."""
    run_dir = os.environ.get("HPCML_RUN_DIR")
    return Path(run_dir).parent.parent if run_dir else None


_WHAT_TO_DO = {
    errno.ENOSPC: "the disk is full; free some space, or choose another place",
    errno.EDQUOT: "your disk quota is used up; free some space, or choose another place",
    errno.EROFS: "the filesystem is read-only; choose another place",
    errno.EACCES: "you have no permission there; choose another place",
    errno.EPERM: "the system does not permit it; choose another place",
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another place",
    errno.ENAMETOOLONG: "the path is too long; choose a shorter one",
    errno.ENOLCK: "the filesystem has no locks; choose a place on another one",
    errno.ENOSYS: "the filesystem has no locks; choose a place on another one",
    errno.EOPNOTSUPP: "the filesystem cannot do that; choose a place on another one",
}
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)


@contextmanager
def plain_errors(doing: str) -> Iterator[None]:
    """Turn an ``OSError`` into a :class:`UserError` that says what could not be done and why.

    Args:
        doing: the attempted work, as it reads after "cannot": ``write the run folder /scratch/r``.
    """
    try:
        yield
    except BrokenPipeError:
        # Whoever reads our output has enough; that is no trouble of the disk.
        raise
    except OSError as error:
        advice = _WHAT_TO_DO.get(error.errno or 0, error.strerror or str(error))
        raise UserError(f"cannot {doing}: {advice}") from error


def is_file(path: Path) -> bool:
    """Whether there is a file at ``path``.

    Raises:
        UserError: that cannot be found out, as in a folder without permission.
    """
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_dir(path: Path) -> bool:
    """Whether there is a folder at ``path``; raises like :func:`is_file`."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path: Path) -> int | None:
    with plain_errors(f"look at {path}"):
        try:
            return os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:  # a NUL character
            return None


def expanded(text: str, origin: str) -> Path:
    """The path that a text with ``~`` and ``$VARIABLES`` means.

    Args:
        text: the text.
        origin: where it was given, for the message.

    Raises:
        UserError: a variable is not set.
    """
    names = [plain or braced for plain, braced in _VARIABLE.findall(text)]
    missing = [f"${name}" for name in dict.fromkeys(names) if name not in os.environ]
    if missing:
        raise UserError(
            f"{origin}: {text}: {missing[0]} is not set in this environment; export it before the "
            "command, or choose another place"
        )
    return Path(os.path.expandvars(text)).expanduser()
